"""Given completions in place of sampled ones: the rollout by hand, scored by the model itself."""

from dataclasses import replace

import pytest
import torch

from tests.torchtune_grpo.tiny_models import dense_logprobs, make_model, make_prompts
from torchtune_grpo.config import ConfigError
from torchtune_grpo.distillation import GivenCompletions

PAD, STOP = 0, 5


def _batch():
    batch = make_prompts([[7, 8, 9], [4]], pad_id=PAD, stop_ids=(STOP,))
    return replace(batch, solutions=[[11, STOP], [12, 13, 14, STOP]])


def test_rollout_is_the_prompt_and_its_solution() -> None:
    rollout = GivenCompletions(max_new_tokens=4)(make_model("gqa"), _batch())
    assert rollout.tokens.tolist() == [[7, 8, 9, 11, STOP, PAD, PAD], [PAD, PAD, 4, 12, 13, 14, STOP]]
    assert rollout.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 2, 3, 4]]
    assert rollout.response_lengths.tolist() == [2, 4] and not rollout.truncated.any()
    assert (rollout.group_size, rollout.source) == (1, ["source 0", "source 1"])


def test_solutions_beyond_the_limit_are_cut_and_marked() -> None:
    rollout = GivenCompletions(max_new_tokens=3)(make_model("gqa"), _batch())
    assert rollout.responses.tolist() == [[11, STOP, PAD], [12, 13, 14]]
    assert rollout.truncated.tolist() == [False, True]


@pytest.mark.parametrize("max_tokens", [4, 1000])
def test_old_logprobs_are_the_models_own(max_tokens: int) -> None:
    model = make_model("gqa")
    rollout = GivenCompletions(max_new_tokens=4, temperature=0.7, max_tokens=max_tokens)(model, _batch())
    expected = dense_logprobs(model, rollout, 0.7).float()
    torch.testing.assert_close(rollout.old_logprobs, expected, atol=1e-5, rtol=0)
    assert not GivenCompletions.on_policy


@pytest.mark.parametrize(("key", "value"), [("max_new_tokens", 0), ("temperature", 0.0)])
def test_numbers_out_of_range_are_refused(key: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: got"):
        GivenCompletions(**({"max_new_tokens": 4} | {key: value}))
