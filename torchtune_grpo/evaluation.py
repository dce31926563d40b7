"""Success on held-out questions: pass@1, avg@k, pass@k and maj@k, each with its standard error and n.

Every row counts exactly once on any number of ranks and for any batch size, sampling has its own settings and
seeds, and training's random state is never touched.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from torch import nn

from torchtune_grpo.collectives import all_gather_objects
from torchtune_grpo.config import Component, ConfigError, instantiate
from torchtune_grpo.data import Dataset, EvalLoader, Prompt, Tokenizer
from torchtune_grpo.data.loader import DUMMY_ROW
from torchtune_grpo.generation import Generate
from torchtune_grpo.rewards import canonical_answer, parse_completion
from torchtune_grpo.rollouts import SAMPLE_COLUMNS, ScoreFn, sample_row, score_rollout
from torchtune_grpo.training.distributed import Ranks
from torchtune_grpo.training.progress import progress_bar

SAMPLES_PER_TASK = 1
_NAME = re.compile(r"\w[\w.-]*")  # of a task, after which files are called

__all__ = [
    "SAMPLE_COLUMNS",
    "EvaluationTask",
    "Evaluator",
    "RowResult",
    "build_evaluator",
    "summarize",
    "summarize_by_source",
]


@dataclass(frozen=True, kw_only=True)
class EvaluationTask:
    """What to ask and how to sample; ``generate.group_size`` completions of each question.

    ``batch_size``: questions a rank and forward. ``k``: for which k <= group_size to report pass@k and maj@k.
    """

    dataset: Dataset
    generate: Generate
    batch_size: int
    max_prompt_tokens: int
    seed: int = 0
    k: list[int] = field(default_factory=lambda: [1])

    def __post_init__(self) -> None:
        bad = [k for k in self.k if not 1 <= k <= self.generate.group_size]
        if bad or not self.k:
            raise ConfigError(
                f"k: got {self.k}, expected numbers from 1 to generate.group_size ({self.generate.group_size})"
            )


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """One question's completions: verdicts of the verifier (a completion it could not judge counts as wrong),
    extracted answers in canonical form (None = no answer), reward parts, lengths in tokens, cut-off flags, and the
    first completion as a row of the table of samples."""

    row: int
    source: str
    success: list[bool]
    answers: list[str | None]
    parts: dict[str, list[float]]
    lengths: list[int]
    truncated: list[bool]
    sample: list[Any]


class Evaluator:
    """Runs tasks on a model; built once, so that prompts are encoded once.

    Args:
        tasks: name -> task; metrics are called ``eval/<name>/...``.
        score: the rewards; its verifier decides success.

    Raises:
        ConfigError: a task without usable rows.
    """

    def __init__(
        self,
        tasks: Mapping[str, EvaluationTask],
        *,
        tokenizer: Tokenizer,
        prompt: Prompt,
        score: ScoreFn,
        rank: int,
        world_size: int,
    ) -> None:
        self.tasks, self._tokenizer, self._score = tasks, tokenizer, score
        self._loaders = {}
        for name, task in tasks.items():
            try:
                self._loaders[name] = EvalLoader(
                    task.dataset,
                    tokenizer,
                    prompt,
                    batch_size=task.batch_size,
                    max_prompt_tokens=task.max_prompt_tokens,
                    rank=rank,
                    world_size=world_size,
                    seed=task.seed,
                )
            except ConfigError as error:
                raise ConfigError(f"evaluation.{name}: {error}") from error

    def __bool__(self) -> bool:
        return bool(self.tasks)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and completion that any task allows; 0 without tasks."""
        return max((t.generate.longest(t.max_prompt_tokens) for t in self.tasks.values()), default=0)

    def num_rows(self, name: str) -> int:
        """Questions of a task, over all ranks."""
        return self._loaders[name].num_rows

    def dropped(self, name: str) -> dict[str, int]:
        """Reason -> rows left out, in loading and in encoding."""
        return {**self.tasks[name].dataset.dropped, **self._loaders[name].dropped}

    def headlines(self) -> list[str]:
        """The metric of each task to show first."""
        return [f"eval/{name}/pass@1" for name in self.tasks]

    def run(
        self, model: nn.Module, stop: Callable[[], bool] = lambda: False
    ) -> tuple[dict[str, float], list[list[Any]]] | None:
        """All tasks' metrics, and a few sample completions a task (``SAMPLE_COLUMNS``); the same on every rank.

        None as soon as ``stop()``, asked before every batch and the same on every rank, is true. Collectives: those of
        ``generate`` and ``stop`` for equally many batches on every rank, and one gather of results a task.
        """
        metrics: dict[str, float] = {}
        samples: list[list[Any]] = []
        for name, task in self.tasks.items():
            results = self.results(model, name, stop)
            if results is None:
                return None
            metrics |= summarize_by_source(results, task.k, prefix=f"eval/{name}/")
            samples += [[f"eval/{name}", *r.sample[1:]] for r in results[:SAMPLES_PER_TASK]]
        return metrics, samples

    def results(self, model: nn.Module, name: str, stop: Callable[[], bool] = lambda: False) -> list[RowResult] | None:
        """Every row's result in the data set's order, on every rank. ``stop`` and collectives: as ``run``."""
        local: list[RowResult] = []
        loader = self._loaders[name]
        for batch, rows in progress_bar(loader, f"evaluate {name}"):
            if stop():
                return None
            rollout = self.tasks[name].generate(model, batch)
            rewards, texts = score_rollout(rollout, self._tokenizer, self._score)
            size = rollout.group_size
            lengths, truncated = rollout.response_lengths.tolist(), rollout.truncated.tolist()
            for b, row in enumerate(rows):
                if row == DUMMY_ROW:
                    continue
                own = slice(b * size, (b + 1) * size)
                answers = [parse_completion(text).answer for text in texts[own]]
                local.append(
                    RowResult(
                        row=row,
                        source=rollout.source[b * size],
                        success=[value > 0 for value in rewards.success[own].tolist()],
                        answers=[None if a is None else canonical_answer(a) for a in answers],
                        parts={part: values[own].tolist() for part, values in rewards.parts.items()},
                        lengths=lengths[own],
                        truncated=truncated[own],
                        sample=sample_row(rollout, rewards, texts, self._tokenizer, b * size),
                    )
                )
        return sorted((r for part in all_gather_objects(local) for r in part), key=lambda r: r.row)


def build_evaluator(
    tasks: Mapping[str, Component], *, tokenizer: Tokenizer, prompt: Prompt, score: ScoreFn, ranks: Ranks
) -> Evaluator:
    """The ``Evaluator`` of a recipe: ``tasks`` are the nodes under its key ``evaluation``.

    Raises:
        ConfigError: what a task or its data refuses, or a name that cannot be that of a file.
    """
    for name in tasks:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"evaluation: got the name {name!r}, expected one of letters, digits, '_', '-' and '.'")
    return Evaluator(
        {name: instantiate(node) for name, node in tasks.items()},
        tokenizer=tokenizer,
        prompt=prompt,
        score=score,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )


def summarize(results: Sequence[RowResult], ks: Sequence[int]) -> dict[str, float]:
    """Means over questions with their standard errors (sample standard deviation over questions / sqrt(n)).

    ``pass@1`` is the mean success of all G completions: with G samples it is avg@G, reported under that name too.
    ``pass@k``: the unbiased estimate 1 - C(G - c, k) / C(G, k) with c successes of G (Chen et al., arXiv 2107.03374).
    ``maj@k``: whether the most frequent answer among the first k completions is right; completions without an answer do
    not vote, tied answers share the credit.
    """
    size = len(results[0].success)
    per_row = {"pass@1": [fmean(r.success) for r in results]}
    if size > 1:
        per_row[f"avg@{size}"] = per_row["pass@1"]
    for k in ks:
        if k > 1:
            per_row[f"pass@{k}"] = [pass_at_k(size, sum(r.success), k) for r in results]
            per_row[f"maj@{k}"] = [majority_at_k(r.answers, r.success, k) for r in results]
    metrics: dict[str, float] = {"n": len(results)}
    for name, values in per_row.items():
        metrics[name] = fmean(values)
        metrics[f"{name}_stderr"] = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    for part in results[0].parts:
        judged = [v for r in results for v in r.parts[part] if not math.isnan(v)]
        if judged:
            metrics[f"reward/{part}"] = fmean(judged)
    metrics["response_length"] = fmean(length for r in results for length in r.lengths)
    metrics["truncated"] = fmean(flag for r in results for flag in r.truncated)
    return metrics


def summarize_by_source(results: Sequence[RowResult], ks: Sequence[int], *, prefix: str) -> dict[str, float]:
    """``summarize`` of all rows and, where there are several sources, of each: ``<prefix><source>/pass@1``."""
    metrics = {f"{prefix}{key}": value for key, value in summarize(results, ks).items()}
    sources = sorted({r.source for r in results})
    for source in sources if len(sources) > 1 else []:
        own = summarize([r for r in results if r.source == source], ks)
        metrics |= {f"{prefix}{source}/{key}": value for key, value in own.items()}
    return metrics


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that one of k draws without replacement from n completions, ``correct`` of them right, is right."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_at_k(answers: Sequence[str | None], success: Sequence[bool], k: int) -> float:
    """Credit of a majority vote among the first k answers: share of the tied winners that are right, 0 without a vote.

    An answer is right if the first completion that gave it is.
    """
    votes = Counter(a for a in answers[:k] if a is not None)
    if not votes:
        return 0.0
    winners = [a for a, count in votes.items() if count == max(votes.values())]
    return fmean(float(success[answers.index(a)]) for a in winners)
