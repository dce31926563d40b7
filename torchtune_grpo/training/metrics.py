"""Metrics of a run: reduced over ranks, written to disk, handed to torchtune's metric loggers.

``<output_dir>/metrics.jsonl`` is always written: one object a line, ``{"step": int, "time_s": float, name:
float, ...}`` with ``time_s`` the seconds since the run began, earlier parts of a resumed run included. It is
the only field that differs between two equal runs, beside whatever else a recipe measures with a clock. A
value that is not finite is written as null. ``<output_dir>/samples.jsonl`` holds the rows of completion
tables.
"""

import json
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import torch
from omegaconf import OmegaConf
from torch import Tensor
from torchtune.training.metric_logging import MetricLoggerInterface, WandBLogger

from torchtune_grpo.collectives import all_gather_objects
from torchtune_grpo.config import instantiate
from torchtune_grpo.failures import RunError
from torchtune_grpo.training.checkpoint_files import write_durably
from torchtune_grpo.training.progress import say
from torchtune_grpo.types import Metrics


class MetricSums:
    """Accumulates (sum, count) pairs on this rank, in float64; ``reduce`` makes global means of them."""

    def __init__(self) -> None:
        self._pairs: dict[str, Tensor] = {}
        self._minima: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        """Adds a local sum and the number of things summed. Tensors stay on their device until ``reduce``."""
        pair = torch.stack([_float64(x) for x in (total, count)])
        self._pairs[name] = self._pairs[name].to(pair.device) + pair if name in self._pairs else pair

    def add_all(self, metrics: Metrics) -> None:
        for name, (total, count) in metrics.items():
            self.add(name, total, count)

    def minimum(self, name: str, value: Tensor | float) -> None:
        value = _float64(value)
        self._minima[name] = torch.minimum(value, self._minima.get(name, value).to(value.device))

    def maximum(self, name: str, value: Tensor | float) -> None:
        value = _float64(value)
        self._maxima[name] = torch.maximum(value, self._maxima.get(name, value).to(value.device))

    def state(self) -> dict[str, dict[str, Tensor]]:
        """What has been added since the last ``reduce``, for a checkpoint; ``merge`` takes it up again."""
        return {"pairs": dict(self._pairs), "minima": dict(self._minima), "maxima": dict(self._maxima)}

    def merge(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Adds what another ``MetricSums`` held."""
        for name, pair in state["pairs"].items():
            self.add(name, *pair)
        for kind, add in (("minima", self.minimum), ("maxima", self.maximum)):
            for name, value in state[kind].items():
                add(name, value)

    def reduce(self) -> dict[str, float]:
        """Global sum / count, minimum or maximum of every name that any rank added; then starts afresh.

        A name whose global count is 0 is left out, and so is an extreme that is infinite. Collective: one all-gather
        of Python objects on every rank, whatever it added, names included: they need not agree.
        """
        pairs = {name: pair.tolist() for name, pair in self._pairs.items()}
        extremes = ({name: float(value) for name, value in part.items()} for part in (self._minima, self._maxima))
        ranks = all_gather_objects((pairs, *extremes))
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for local, _, _ in ranks:
            for name, (total, count) in local.items():
                sums[name][0] += total
                sums[name][1] += count
        result = {name: total / count for name, (total, count) in sums.items() if count}
        for kind, choose in ((1, min), (2, max)):
            for name in {name for rank in ranks for name in rank[kind]}:
                result[name] = choose(rank[kind][name] for rank in ranks if name in rank[kind])
                if math.isinf(result[name]):  # of nothing
                    del result[name]
        self.__init__()
        return dict(sorted(result.items()))


class MetricLog:
    """Writes scalars and tables of completions. Ranks other than the main one write nothing.

    ``loggers`` are config nodes of torchtune metric loggers (TensorBoard, W&B, ...), built on the main rank
    only. One that fails, at its construction or later, is warned about once and left out from then on.
    ``resumed_step`` is the step the run continues from, and ``resumed_lines`` (by file name) what the files held
    when its checkpoint was saved: what they say of later steps, and what was added since, is dropped, so that they
    become those of an uninterrupted run; step None starts them afresh. ``console`` names the scalars to print.

    Attributes:
        lines: of each file, by its name; to be saved with a checkpoint. Empty on other ranks than the main one.
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        is_main: bool,
        resumed_step: int | None = None,
        resumed_lines: Mapping[str, int] = MappingProxyType({}),
        loggers: Sequence[Mapping[str, Any]] = (),
        config: Mapping[str, Any] | None = None,
        console: Sequence[str] = (),
    ) -> None:
        self._is_main = is_main
        self._console = console
        self._loggers: list[MetricLoggerInterface] = []
        self.lines: dict[str, int] = {}
        if not is_main:
            return
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        kept = {
            name: _drop_after(folder / name, resumed_step, resumed_lines.get(name))
            for name in ("metrics.jsonl", "samples.jsonl")
        }
        self.lines = {name: len(lines) for name, lines in kept.items()}
        self._start = time.monotonic() - (kept["metrics.jsonl"][-1]["time_s"] if kept["metrics.jsonl"] else 0.0)
        self._metrics_file = (folder / "metrics.jsonl").open("a")
        self._samples_file = (folder / "samples.jsonl").open("a")
        for node in loggers:
            with _warning_instead_of_error(f"metric logger {node['_component_']}"):
                self._loggers.append(instantiate(node))
        if config is not None:
            self._to_loggers(lambda logger: logger.log_config(OmegaConf.create(dict(config))))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One line of scalars for ``step``, on disk when this returns."""
        if not self._is_main:
            return
        seconds = round(time.monotonic() - self._start, 3)
        self._append(self._metrics_file, {"step": step, "time_s": seconds, **values})
        self._to_loggers(lambda logger: logger.log_dict(values, step=step))
        shown = [f"{name} {values[name]:.4g}" for name in self._console if name in values]
        if shown:
            say(f"step {step} | " + " | ".join(shown))

    def log_table(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Sample completions: whole to ``samples.jsonl`` and W&B, shortened to the console."""
        if not self._is_main:
            return
        for row in rows:
            self._append(self._samples_file, {"step": step, **dict(zip(columns, row, strict=True))})
            cells = (f"{column}: {_shorten(cell)}" for column, cell in zip(columns, row, strict=True))
            say(f"sample at step {step} | " + " | ".join(cells))
        self._to_loggers(lambda logger: _log_wandb_table(logger, step, columns, rows))

    def close(self) -> None:
        if not self._is_main:
            return
        self._metrics_file.close()
        self._samples_file.close()
        self._to_loggers(lambda logger: logger.close())

    def _append(self, file: TextIO, line: Mapping[str, Any]) -> None:
        try:
            file.write(json_text(line) + "\n")
            file.flush()
        except OSError as error:
            raise RunError(
                f"{file.name}: cannot be written: {error}; mend that and launch again, which resumes from the newest "
                "checkpoint"
            ) from error
        self.lines[Path(file.name).name] += 1

    def _to_loggers(self, call: Callable[[MetricLoggerInterface], None]) -> None:
        for logger in list(self._loggers):
            self._loggers.remove(logger)
            with _warning_instead_of_error(f"metric logger {type(logger).__name__}"):
                call(logger)
                self._loggers.append(logger)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file; one cut short by a kill is left out."""
    lines = []
    for text in Path(path).read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            continue
    return lines


def _drop_after(path: Path, step: int | None, count: int | None) -> list[dict[str, Any]]:
    """Rewrites a JSONL file, in one rename, with those of its first ``count`` lines that are not after ``step``, and
    returns them."""
    if not path.exists():
        return []
    kept = [line for line in read_metrics(path)[:count] if step is not None and line["step"] <= step]
    write_durably(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def _float64(value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(torch.float64)
    return torch.tensor(value, dtype=torch.float64)


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON of plain values at any depth; a number that is not finite, which JSON lacks, becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _warning_instead_of_error(what: str) -> Iterator[None]:
    """Training outlives a tracker that is down, misconfigured or not installed."""
    try:
        yield
    except Exception as error:
        warnings.warn(f"{what} failed and is left out from here on: {error!r}", stacklevel=3)


def _log_wandb_table(
    logger: MetricLoggerInterface, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> None:
    if not isinstance(logger, WandBLogger):
        return
    import wandb  # optional: present wherever its logger is

    cells = [[str(cell) for cell in row] for row in rows]
    wandb.log({"samples": wandb.Table(columns=list(columns), data=cells), "global_step": step})


def _shorten(cell: Any, limit: int = 160) -> str:
    one_line = " ".join((f"{cell:.4g}" if isinstance(cell, float) else str(cell)).split())
    return one_line if len(one_line) <= limit else f"{one_line[: limit // 2]} ... {one_line[-limit // 2 :]}"
