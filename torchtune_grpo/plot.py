"""Draws the learning curves of runs: ``python -m torchtune_grpo.plot RUN_DIR... [--out FILE.png]``.

Four panels: success and reward, each against optimizer steps and against minutes. Success shows that of the
training rollouts (thin) and pass@1 of every evaluation (dots, with its standard error).
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from torchtune_grpo.json_rows import RowError, checked
from torchtune_grpo.training.metrics import read_metrics

_EVALUATION = re.compile(r"eval/(.+)/pass@1")
_CLOCKS = (("step", "optimizer step", 1.0), ("time_s", "minutes", 60.0))


def read_run(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl.

    Raises:
        FileNotFoundError: the folder holds none; the message says which folders beneath it do.
        RowError: a row is no object of numbers with ``step`` and ``time_s``; names the row.
    """
    path = folder / "metrics.jsonl"
    if path.is_file():
        try:
            lines = read_metrics(path)
        except UnicodeDecodeError as error:
            raise RowError(f"{path}: not UTF-8: {error}") from error
        return [_checked(line, f"{path}, row {number}") for number, line in enumerate(lines, start=1)]
    runs = ", ".join(str(found.parent) for found in sorted(folder.glob("*/metrics.jsonl")))
    hint = f"; did you mean {runs}?" if runs else ""
    raise FileNotFoundError(f"{folder}: expected a run's output_dir with a metrics.jsonl in it{hint}")


def _checked(value: Any, where: str) -> dict[str, Any]:
    line = checked(value, where)
    for key, _, _ in _CLOCKS:
        if line.get(key) is None:
            raise RowError(f"{where}: missing the key {key!r}, expected a number")
    for key, value in line.items():
        if not isinstance(value, int | float | None):
            raise RowError(f"{where}: {key!r} is a {type(value).__name__}, expected a number or null")
    return line


def series(lines: Sequence[dict[str, Any]], name: str, clock: str) -> tuple[list[float], list[float]]:
    """``clock`` values and values of ``name``, of the lines that hold a finite one."""
    found = [(line[clock], line[name]) for line in lines if line.get(name) is not None]
    return [x for x, _ in found], [y for _, y in found]


def draw(runs: dict[str, list[dict[str, Any]]]) -> Figure:
    """The 2 x 2 figure; rows success and reward, columns steps and minutes; one colour a run."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    for column, (clock, label, unit) in enumerate(_CLOCKS):
        for i, (name, lines) in enumerate(runs.items()):
            _draw_run(panels[:, column], lines, name, clock=clock, unit=unit, color=f"C{i % 10}")
        panels[1, column].set_xlabel(label)
    panels[0, 0].set_ylabel("success")
    panels[0, 0].set_ylim(-0.02, 1.02)
    panels[1, 0].set_ylabel("training reward")
    for panel in panels.flat:
        panel.grid(alpha=0.3)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    if labels:
        figure.legend(handles, labels, fontsize="small", loc="outside upper center", ncols=3)
    return figure


def _draw_run(
    panels: Sequence[Axes], lines: list[dict[str, Any]], name: str, *, clock: str, unit: float, color: str
) -> None:
    success_panel, reward_panel = panels
    times, success = series(lines, "success", clock)
    if times:
        x = [time / unit for time in times]
        success_panel.plot(x, success, color=color, lw=1, alpha=0.5, label=f"{name}: training rollouts")
    evaluations = sorted({key for line in lines for key in line if _EVALUATION.fullmatch(key)})
    for marker, key in zip("osD^v" * len(evaluations), evaluations, strict=False):
        evaluated = [line for line in lines if line.get(key) is not None]
        success_panel.errorbar(
            [line[clock] / unit for line in evaluated],
            [line[key] for line in evaluated],
            yerr=[line.get(f"{key}_stderr") or 0.0 for line in evaluated],
            color=color,
            marker=marker,
            capsize=3,
            label=f"{name}: {_EVALUATION.fullmatch(key)[1]} pass@1",
        )
    times, reward = series(lines, "reward", clock)
    reward_panel.plot([time / unit for time in times], reward, color=color, lw=1)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m torchtune_grpo.plot", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="output_dir of a run")
    parser.add_argument("--out", type=Path, default=None, help="default: RUN_DIR/learning_curve.png of the first")
    options = parser.parse_args(arguments)
    try:
        runs = {str(folder): read_run(folder) for folder in options.runs}
        out = options.out or options.runs[0] / "learning_curve.png"
        out.parent.mkdir(parents=True, exist_ok=True)
        draw(runs).savefig(out, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: a row, or a kind of picture that matplotlib does not know
        sys.exit(str(error))
    print(out)


if __name__ == "__main__":
    main()
