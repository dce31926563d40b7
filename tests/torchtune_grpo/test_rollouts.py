import math
from dataclasses import replace

import pytest
import torch

from tests.torchtune_grpo.builders import make_rollout
from torchtune_grpo.collectives import RankError
from torchtune_grpo.data import tiny_tokenizer
from torchtune_grpo.rewards.combine import RewardError
from torchtune_grpo.rollouts import completions, rollout_metrics, sample_rows, score_rollout
from torchtune_grpo.types import Rewards, Rollout

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_id
NAN = math.nan


def _rollout() -> Rollout:
    """Two prompts, two completions each: ended, cut off, ended at once, ended."""
    texts = ["4+5=9.", "Tom has 7", "", "?"]
    ids = [TOKENIZER.encode(text) for text in texts]
    ids = [row if i == 1 else [*row, EOS] for i, row in enumerate(ids)]
    width = max(map(len, ids))
    responses = torch.tensor([row + [TOKENIZER.pad_id] * (width - len(row)) for row in ids])
    rollout = make_rollout([len(row) for row in ids], prompt_lengths=[3, 3, 2, 2], group_size=2)
    return replace(
        rollout,
        tokens=torch.cat([rollout.tokens[:, : rollout.prompt_width], responses], dim=1),
        truncated=torch.tensor([False, True, False, False]),
    )


def _rewards() -> Rewards:
    return Rewards(
        total=torch.tensor([1.0, 0.5, NAN, 0.0]),
        parts={"correct": torch.tensor([1.0, 0.0, NAN, 0.0]), "format": torch.tensor([1.0, 1.0, 0.0, 0.0])},
        success=torch.tensor([1.0, 0.0, NAN, 0.0]),
    )


def test_completions_leave_the_stop_token_out_and_keep_a_cut_off_last_token() -> None:
    assert completions(_rollout(), TOKENIZER) == ["4+5=9.", "Tom has 7", "", "?"]


def test_score_rollout_gives_judges_texts_answers_and_context() -> None:
    calls = []

    def score(texts: list[str], answers: list[str], **context: object) -> Rewards:
        calls.append((texts, answers, context))
        return _rewards()

    rewards, texts = score_rollout(_rollout(), TOKENIZER, score)
    assert rewards.total[0] == 1.0
    context = {
        "response_lengths": [7, 3, 1, 2],
        "truncated": [False, True, False, False],
        "source": ["s0", "s1", "s2", "s3"],
    }
    assert calls == [(texts, ["0", "1", "2", "3"], context)]


def test_score_rollout_names_the_question_of_a_row_that_fails() -> None:
    def score(*_: object, **__: object) -> Rewards:
        raise RewardError("fns.mine: this judge raised KeyError", 2)

    rollout = _rollout()
    prompt = TOKENIZER.decode(rollout.tokens[2, rollout.prompt_width - 2 : rollout.prompt_width].tolist())
    with pytest.raises(RankError) as caught:
        score_rollout(rollout, TOKENIZER, score)
    expected = f"rewards: rank 0: fns.mine: this judge raised KeyError; source 's2', prompt {prompt!r}"
    assert str(caught.value) == expected


def test_rollout_metrics_are_sums_and_counts_over_judged_rows() -> None:
    metrics = {name: (float(a), float(b)) for name, (a, b) in rollout_metrics(_rollout(), _rewards()).items()}
    assert metrics == {
        "reward": (1.5, 3.0),
        "success": (1.0, 3.0),
        "unjudged": (1.0, 4.0),
        "response_length": (13.0, 4.0),
        "prompt_length": (10.0, 4.0),
        "truncated": (1.0, 4.0),
        "rollout_cache_gib": (0.5, 1.0),
        "entropy": (26.0, 13.0),  # every token has log-probability -2
        "reward/correct": (1.0, 3.0),
        "reward/format": (2.0, 4.0),
    }


def test_sample_rows_show_the_first_completion_of_each_group() -> None:
    rollout, rewards = _rollout(), _rewards()
    texts = completions(rollout, TOKENIZER)
    rows = sample_rows(rollout, rewards, texts, TOKENIZER, 5)
    prompts = [TOKENIZER.decode(rollout.tokens[row, : rollout.prompt_width].tolist()) for row in (0, 2)]
    assert rows[0] == ["s0", prompts[0].replace("<pad>", "").strip(), "4+5=9.", "0", 1.0, 1.0]
    assert rows[1][0] == "s2" and rows[1][2:4] == ["", "2"] and math.isnan(rows[1][4])
    assert len(rows) == 2
    assert sample_rows(rollout, rewards, texts, TOKENIZER, 1) == rows[:1]
