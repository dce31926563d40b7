"""Evaluation: statistics by hand, and the same numbers on any number of ranks."""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch

from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.config import ConfigError
from torchtune_grpo.data import TINY_TEMPLATE, Dataset, Example, Prompt, tiny_tokenizer
from torchtune_grpo.evaluation import (
    SAMPLES_PER_TASK,
    EvaluationTask,
    Evaluator,
    RowResult,
    majority_at_k,
    pass_at_k,
    summarize,
    summarize_by_source,
)
from torchtune_grpo.generation import Generate
from torchtune_grpo.models import tiny_llama
from torchtune_grpo.types import PromptBatch, Rewards, Rollout

TOKENIZER = tiny_tokenizer()
NAN = math.nan


def _result(row: int, success: Sequence[int], answers: Sequence[str | None], source: str = "a") -> RowResult:
    size = len(success)
    return RowResult(
        row=row,
        source=source,
        success=[bool(s) for s in success],
        answers=list(answers),
        parts={"correct": [float(s) for s in success], "other": [NAN] * size},
        lengths=[row + 1] * size,
        truncated=[i == 0 for i in range(size)],
        sample=[],
    )


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 1, 2), (5, 2, 3), (6, 0, 2), (6, 6, 6), (8, 3, 1), (5, 4, 2)])
def test_pass_at_k_counts_subsets_with_a_success(n: int, correct: int, k: int) -> None:
    subsets = list(combinations(range(n), k))
    share = sum(any(i < correct for i in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(n, correct, k) == pytest.approx(share)


@pytest.mark.parametrize(
    ("answers", "success", "k", "credit"),
    [
        (["1", "2", "2"], [1, 0, 0], 3, 0.0),
        (["1", "2", "1"], [1, 0, 1], 3, 1.0),
        (["1", "2", "3", "2"], [1, 0, 0, 0], 2, 0.5),  # only the first two vote: a tie
        (["1", "2", "3"], [0, 0, 1], 3, 1 / 3),
        ([None, None, "5"], [0, 0, 1], 3, 1.0),  # no answer is no vote
        ([None, None], [0, 0], 2, 0.0),
        (["2", "1", "1"], [1, 0, 0], 1, 1.0),
    ],
)
def test_majority_at_k(answers: list[str | None], success: list[bool], k: int, credit: float) -> None:
    assert majority_at_k(answers, success, k) == pytest.approx(credit)


def test_summarize_by_hand() -> None:
    results = [
        _result(0, [1, 0, 0, 1], ["1", "2", "2", "1"]),
        _result(1, [0, 0, 0, 0], ["3", "3", "3", None]),
        _result(2, [1, 1, 1, 1], ["4", "4", "4", "4"]),
    ]
    metrics = summarize(results, [1, 2])
    assert metrics["n"] == 3
    assert metrics["pass@1"] == metrics["avg@4"] == pytest.approx(0.5)
    assert metrics["pass@1_stderr"] == metrics["avg@4_stderr"] == pytest.approx(0.5 / math.sqrt(3))
    # pass@2: 1 - C(2, 2) / C(4, 2) = 5/6, 0 and 1; deviations from 11/18
    assert metrics["pass@2"] == pytest.approx(11 / 18)
    variance = ((15 / 18 - 11 / 18) ** 2 + (11 / 18) ** 2 + (7 / 18) ** 2) / 2
    assert metrics["pass@2_stderr"] == pytest.approx(math.sqrt(variance / 3))
    assert metrics["maj@2"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert metrics["maj@2_stderr"] == pytest.approx(0.5 / math.sqrt(3))
    assert metrics["reward/correct"] == pytest.approx(0.5) and "reward/other" not in metrics
    assert metrics["response_length"] == pytest.approx(2) and metrics["truncated"] == pytest.approx(0.25)


def test_summarize_of_one_completion_has_no_further_names() -> None:
    metrics = summarize([_result(0, [1], ["1"]), _result(1, [0], ["1"])], [1])
    assert {name for name in metrics if "@" in name} == {"pass@1", "pass@1_stderr"}
    assert metrics["pass@1_stderr"] == pytest.approx(0.5)  # sqrt(1/2) / sqrt(2)


def test_summarize_of_one_row_has_no_standard_error() -> None:
    assert math.isnan(summarize([_result(0, [1], ["1"])], [1])["pass@1_stderr"])


def test_summarize_by_source_reports_each_source_of_several() -> None:
    results = [_result(0, [1], ["1"]), _result(1, [0], ["1"], "b"), _result(2, [0], ["1"], "b")]
    metrics = summarize_by_source(results, [1], prefix="eval/x/")
    assert metrics["eval/x/pass@1"] == pytest.approx(1 / 3)
    assert metrics["eval/x/a/pass@1"] == 1.0 and metrics["eval/x/a/n"] == 1
    assert metrics["eval/x/b/pass@1"] == 0.0 and metrics["eval/x/b/n"] == 2
    assert not any("/a/" in name for name in summarize_by_source(results[:1], [1], prefix="eval/x/"))


def _dataset(rows: int) -> Dataset:
    return Dataset(
        examples=[
            Example(
                question=" ".join(["Tom"] * (1 + row % 3)),
                answer=str(row),
                solution=f" ? </think> <answer> {row} </answer>",
                source="even" if row % 2 == 0 else "odd",
            )
            for row in range(rows)
        ]
    )


def _score(texts: list[str], answers: list[str], **context: Any) -> Rewards:
    """Verdicts by a checksum of text and gold; every fourth gold cannot be judged."""
    marks = [float(sum(map(ord, text + gold)) % 2) for text, gold in zip(texts, answers, strict=True)]
    verdicts = torch.tensor([NAN if int(gold) % 4 == 3 else m for m, gold in zip(marks, answers, strict=True)])
    return Rewards(total=verdicts, parts={"correct": verdicts}, success=verdicts)


def _evaluator(batch_size: int, *, rank: int = 0, world_size: int = 1, rows: int = 7, **task: Any) -> Evaluator:
    generate = Generate(group_size=4, max_new_tokens=5)
    settings = {
        "dataset": _dataset(rows),
        "generate": generate,
        "batch_size": batch_size,
        "max_prompt_tokens": 20,
        "k": [1, 2, 4],
        "seed": 3,
    } | task
    return Evaluator(
        {"toy": EvaluationTask(**settings)},
        tokenizer=TOKENIZER,
        prompt=Prompt(template=TINY_TEMPLATE),
        score=_score,
        rank=rank,
        world_size=world_size,
    )


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 16, "intermediate_dim": 16}
    return tiny_llama(vocab_size=TOKENIZER.vocab_size, **sizes)


def _run_on_rank(rank: int, batch_size: int) -> tuple[dict[str, float], list[list[Any]], int]:
    metrics, samples = _evaluator(batch_size, rank=rank, world_size=2).run(_model())
    return metrics, samples, len(_evaluator(batch_size, rank=rank, world_size=2).results(_model(), "toy"))


def test_evaluation_is_the_same_for_any_batch_size_and_number_of_ranks() -> None:
    """Seven rows: rank 1 of 2 is one short, and batches of 3 leave a last one of 1."""
    metrics, samples = _evaluator(7).run(_model())
    assert metrics["eval/toy/n"] == 7
    assert metrics["eval/toy/even/n"] == 4 and metrics["eval/toy/odd/n"] == 3
    assert 0 < metrics["eval/toy/pass@1"] < 1
    assert [(row[0], row[3]) for row in samples] == [("eval/toy", str(i)) for i in range(SAMPLES_PER_TASK)]
    for other, shown in [_evaluator(2).run(_model()), *(run[:2] for run in run_ranks(_run_on_rank, 3))]:
        assert other == pytest.approx(metrics, nan_ok=True, abs=1e-12)
        assert [row[:3] for row in shown] == [row[:3] for row in samples]


def test_evaluation_stops_between_batches_when_asked_to() -> None:
    answers = iter([False, False, True])
    assert _evaluator(2).run(_model(), stop=lambda: next(answers)) is None
    assert next(answers, None) is None  # asked once a batch, and not again


def test_evaluation_leaves_the_random_state_alone() -> None:
    model, evaluator = _model(), _evaluator(3)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, _ = evaluator.run(model)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert evaluator.run(model)[0] == pytest.approx(first, nan_ok=True)
    assert _evaluator(3, seed=4).results(model, "toy") != evaluator.results(model, "toy")


def test_results_come_in_order_and_count_the_unjudged_as_wrong() -> None:
    results = _evaluator(2).results(_model(), "toy")
    assert [r.row for r in results] == list(range(7))
    assert [r.source for r in results] == ["even", "odd"] * 3 + ["even"]
    assert results[3].success == [False] * 4  # unjudgeable
    assert all(math.isnan(value) for value in results[3].parts["correct"])
    judged = [value for r in results for value in r.parts["correct"] if not math.isnan(value)]
    metrics = summarize(results, [1])
    assert metrics["reward/correct"] == pytest.approx(sum(judged) / 24)
    assert metrics["pass@1"] == pytest.approx(sum(judged) / 28)


class _Scripted:
    """Generates what it is told, whatever the model."""

    group_size = 2

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __call__(self, model: torch.nn.Module, batch: PromptBatch) -> Rollout:
        ids = [[*TOKENIZER.encode(text), TOKENIZER.eos_id] for text in self._texts]
        width = max(map(len, ids))
        lengths = torch.tensor([len(row) for row in ids])
        responses = torch.tensor([row + [TOKENIZER.pad_id] * (width - len(row)) for row in ids])
        prompts = batch.tokens.repeat_interleave(2, dim=0)
        mask = torch.arange(width) < lengths[:, None]
        return Rollout(
            tokens=torch.cat([prompts, responses], dim=1),
            positions=torch.arange(prompts.shape[1] + width).expand(len(ids), -1),
            response_mask=mask,
            old_logprobs=torch.zeros(mask.shape),
            truncated=torch.zeros(len(ids), dtype=torch.bool),
            groups=torch.arange(len(ids)) // 2,
            answers=[a for a in batch.answers for _ in range(2)],
            source=[s for s in batch.source for _ in range(2)],
            group_size=2,
            cache_bytes=0,
        )


def test_results_carry_canonical_answers_and_lengths() -> None:
    generate = _Scripted([" ? </think> <answer> 9*2=18 </answer>", " no answer"])
    (result,) = _evaluator(1, rows=1, generate=generate, k=[1]).results(_model(), "toy")
    assert result.answers == ["18", None]
    assert result.lengths == [len(TOKENIZER.encode(t)) + 1 for t in generate._texts]
    assert result.sample[:2] == ["even", "User: Tom Assistant: <think>"]
    assert "9*2=18" in result.sample[2] and result.sample[3] == "0"


def test_evaluator_tells_what_it_left_out() -> None:
    evaluator = _evaluator(2, max_prompt_tokens=7)  # every third question has three words, 8 tokens in all
    assert evaluator.num_rows("toy") == 5
    assert evaluator.dropped("toy") == {"prompt_too_long": 2}
    assert evaluator.headlines() == ["eval/toy/pass@1"] and evaluator
    assert [r.row for r in evaluator.results(_model(), "toy")] == [0, 1, 3, 4, 6]


@pytest.mark.parametrize("k", [[], [0], [1, 5]])
def test_task_refuses_k_beyond_the_group(k: list[int]) -> None:
    with pytest.raises(ConfigError, match="k: got"):
        _evaluator(2, k=k)


def test_task_without_usable_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="usable rows"):
        _evaluator(2, max_prompt_tokens=1)
