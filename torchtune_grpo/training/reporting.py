"""What a run tells: metrics with phase times and throughput, evaluations, sample completions, and what data it used."""

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchtune_grpo.config import to_dict, to_yaml
from torchtune_grpo.data import Dataset, overlap
from torchtune_grpo.evaluation import SAMPLE_COLUMNS, Evaluator
from torchtune_grpo.training.distributed import Ranks
from torchtune_grpo.training.metrics import MetricLog, MetricSums, PhaseTimer, peak_memory_gib
from torchtune_grpo.training.progress import say
from torchtune_grpo.training.setup import TrainingConfig
from torchtune_grpo.types import Metrics


class Reporter:
    """Collects a step's numbers and writes them; the only thing a recipe talks to about metrics.

    Args:
        resumed_step: the step that the run continues from, None for a fresh run; later lines are dropped.
        console: metrics to print each time, beside evaluations.
    """

    def __init__(
        self,
        cfg: TrainingConfig,
        ranks: Ranks,
        evaluator: Evaluator,
        *,
        resumed_step: int | None,
        console: Sequence[str],
    ) -> None:
        self._ranks, self._evaluator = ranks, evaluator
        self._timer = PhaseTimer(ranks.device)
        self._sums = MetricSums()
        self._tokens: dict[str, int] = {}
        self._lr = 0.0
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        self._log = MetricLog(
            cfg.output_dir,
            is_main=ranks.is_main,
            resumed_step=resumed_step,
            loggers=cfg.metric_loggers,
            config=to_dict(cfg),
            console=[*console, *evaluator.headlines()],
        )
        if ranks.is_main:
            (Path(cfg.output_dir) / "config.yaml").write_text(to_yaml(cfg))

    def phase(self, name: str, tokens: int = 0) -> AbstractContextManager[None]:
        """Times a phase of the step; ``tokens`` local tokens that it works on give its tokens per second."""
        self.count_tokens(name, tokens)
        return self._timer(name)

    def count_tokens(self, phase: str, tokens: int) -> None:
        """Local tokens that a phase has worked on, where they are known only afterwards."""
        self._tokens[phase] = self._tokens.get(phase, 0) + tokens

    def add(self, metrics: Metrics) -> None:
        """Local (sum, count) pairs."""
        self._sums.add_all(metrics)

    def add_extremes(self, minima: Mapping[str, Tensor], maxima: Mapping[str, Tensor]) -> None:
        """Local values whose least, or greatest, of all ranks and updates is to be written."""
        for name, value in minima.items():
            self._sums.minimum(name, value)
        for name, value in maxima.items():
            self._sums.maximum(name, value)

    def add_values(self, values: Mapping[str, float]) -> None:
        """Numbers averaged over ranks and over the updates since the last ``log``; of ``lr`` the last one stays."""
        for name, value in values.items():
            if name == "lr":
                self._lr = value
            else:
                self._sums.add(name, value, 1.0)

    def log(self, step: int) -> None:
        """Reduces what was added since the last call and writes one line.

        ``seconds/<phase>`` is the mean over ranks, ``tokens_per_second/<phase>`` that of all ranks together,
        ``peak_memory_gib`` the largest of any rank. Collective: one gather of Python objects.
        """
        for name, seconds in self._timer.pop().items():
            phase = name.removeprefix("seconds/")
            self._sums.add(name, seconds, 1.0)
            if self._tokens.get(phase) and seconds > 0:
                rate = f"tokens_per_second/{phase}"
                self._sums.add(rate, self._tokens[phase], seconds / self._ranks.world_size)
        self._tokens.clear()
        self._sums.maximum("peak_memory_gib", peak_memory_gib(self._ranks.device))
        self._log.log(step, {**self._sums.reduce(), "lr": self._lr})

    def evaluate(self, step: int, model: nn.Module) -> None:
        """Runs every evaluation task and writes its metrics as a line of their own. Collective: the evaluator's."""
        if not self._evaluator:
            return
        with self._timer("evaluate"):
            metrics, samples = self._evaluator.run(model)
        seconds = self._timer.pop().get("seconds/evaluate", 0.0)
        self._evaluated = (step, metrics)
        self._log.log(step, {**metrics, "seconds/evaluate": seconds})
        self.samples(step, samples)

    def evaluated(self, step: int) -> dict[str, float]:
        """The evaluation's metrics if the model of ``step`` was evaluated, else nothing: a stale score is no score."""
        return self._evaluated[1] if self._evaluated[0] == step else {}

    def samples(self, step: int, rows: Sequence[Sequence[Any]]) -> None:
        """A table of completions, columns ``SAMPLE_COLUMNS``; rank 0's rows are written. No collective."""
        self._log.log_table(step, SAMPLE_COLUMNS, rows)

    def close(self) -> None:
        self._log.close()


def report_data(
    cfg: TrainingConfig, ranks: Ranks, train: Dataset, dropped: Mapping[str, int], evaluator: Evaluator
) -> None:
    """Says, and writes to ``<output_dir>/data.json``, how many rows are used and dropped, and how many evaluation
    questions also stand in the training data. Rank 0 only; no collective."""
    if not ranks.is_main:
        return
    report: dict[str, Any] = {"train": {"rows": len(train), "dropped": {**train.dropped, **dropped}}}
    for name, task in evaluator.tasks.items():
        report[f"eval/{name}"] = {
            "rows": evaluator.num_rows(name),
            "dropped": evaluator.dropped(name),
            "also_in_train": overlap(train, task.dataset),
        }
    (Path(cfg.output_dir) / "data.json").write_text(json.dumps(report, indent=1) + "\n")
    for name, entry in report.items():
        say(f"data {name} | " + " | ".join(f"{key}: {value}" for key, value in entry.items()))
