"""What a run tells: metrics with phase times and throughput, evaluations, sample completions, and what data it used."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchtune_grpo.config import to_dict, to_yaml
from torchtune_grpo.data import Dataset, overlap
from torchtune_grpo.evaluation import SAMPLE_COLUMNS, Evaluator
from torchtune_grpo.training.checkpoints import Resumed
from torchtune_grpo.training.distributed import Ranks
from torchtune_grpo.training.metrics import MetricLog, MetricSums
from torchtune_grpo.training.phases import PhaseTimer, peak_memory_gib
from torchtune_grpo.training.progress import say
from torchtune_grpo.training.random_state import random_state, set_random_state
from torchtune_grpo.training.setup import TrainingConfig
from torchtune_grpo.types import Metrics


class Reporter:
    """Collects a step's numbers and writes them; the only thing a recipe talks to about metrics.

    Args:
        resumed: what the run continues from, None for a fresh run; lines written later are dropped.
        console: metrics to print each time, beside evaluations.
    """

    def __init__(
        self,
        cfg: TrainingConfig,
        ranks: Ranks,
        evaluator: Evaluator,
        *,
        resumed: Resumed | None,
        console: Sequence[str],
    ) -> None:
        self._ranks, self._evaluator = ranks, evaluator
        self._timer = PhaseTimer(ranks.device)
        self._sums = MetricSums()
        self._seconds: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._lr = 0.0
        self._evaluated: tuple[int, dict[str, float]] = (-1, {})
        if resumed is not None:
            self._take_up(resumed)
        self._log = MetricLog(
            cfg.output_dir,
            is_main=ranks.is_main,
            resumed_step=None if resumed is None else resumed.step,
            resumed_lines={} if resumed is None else resumed.local[0]["report"]["lines"],
            loggers=cfg.metric_loggers,
            config=to_dict(cfg),
            console=[*console, *evaluator.headlines()],
        )
        if ranks.is_main:
            (Path(cfg.output_dir) / "config.yaml").write_text(to_yaml(cfg))

    def _take_up(self, resumed: Resumed) -> None:
        """At another number of ranks rank 0 takes the sums of all, and clocks start afresh."""
        reports = [local["report"] for local in resumed.local]
        for report in reports if resumed.same_ranks or self._ranks.is_main else []:
            self._sums.merge(report["sums"])
        self._lr, self._evaluated = reports[0]["lr"], reports[0]["evaluated"]
        if resumed.same_ranks:
            self._seconds, self._tokens = Counter(reports[0]["seconds"]), Counter(reports[0]["tokens"])

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs for the lines to come to be those of a run without interruption. Local."""
        self._stop_clocks()
        return {
            "sums": self._sums.state(),
            "seconds": dict(self._seconds),
            "tokens": dict(self._tokens),
            "lr": self._lr,
            "evaluated": self._evaluated,
            "lines": dict(self._log.lines),
        }

    def phase(self, name: str, tokens: int = 0) -> AbstractContextManager[None]:
        """Times a phase of the step; ``tokens`` local tokens that it works on give its tokens per second."""
        self.count_tokens(name, tokens)
        return self._timer(name)

    def count_tokens(self, phase: str, tokens: int) -> None:
        """Local tokens that a phase has worked on, where they are known only afterwards."""
        self._tokens[phase] += tokens

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
                share = 1.0 / self._ranks.world_size  # every rank adds it: an update counts once on any number of ranks
                self._sums.add(name, value * share, share)

    def log(self, step: int) -> None:
        """Reduces what was added since the last call and writes one line.

        ``seconds/<phase>`` is the mean over ranks, ``tokens_per_second/<phase>`` that of all ranks together,
        ``peak_memory_gib`` the largest of any rank. Collective: one gather of Python objects.
        """
        self._stop_clocks()
        for name, seconds in self._seconds.items():
            phase = name.removeprefix("seconds/")
            self._sums.add(name, seconds, 1.0)
            if self._tokens[phase] and seconds > 0:
                rate = f"tokens_per_second/{phase}"
                self._sums.add(rate, self._tokens[phase], seconds / self._ranks.world_size)
        self._seconds.clear()
        self._tokens.clear()
        self._sums.maximum("peak_memory_gib", peak_memory_gib(self._ranks.device))
        self._log.log(step, {**self._sums.reduce(), "lr": self._lr})

    def _stop_clocks(self) -> None:
        self._seconds.update(self._timer.pop())

    def evaluate(self, step: int, model: nn.Module, stop: Callable[[], bool]) -> bool:
        """Runs every evaluation task, unless it was done at ``step``, and writes its metrics as a line of their own.

        False, and nothing written, where ``stop()`` was true before one of the batches. Collective: the evaluator's,
        and those of ``stop``.
        """
        if not self._evaluator or self._evaluated[0] == step:
            return True
        timer, before = PhaseTimer(self._ranks.device), random_state()
        with timer("evaluate"):
            outcome = self._evaluator.run(model, stop)
        if outcome is None:
            set_random_state(before)  # judges may have drawn numbers, and will when it is done anew
            return False
        metrics, samples = outcome
        self._evaluated = (step, metrics)
        self._log.log(step, {**metrics, **timer.pop()})
        self.samples(step, samples)
        return True

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
