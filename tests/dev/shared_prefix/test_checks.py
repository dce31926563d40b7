"""Everything that shared-prefix execution cannot compute is refused, with the key to change."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torchtune.models.gemma2 import gemma2
from torchtune.modules import TransformerDecoder

from dev.shared_prefix import SharedPrefixLogprobs
from dev.shared_prefix.checks import check_model
from tests.dev.shared_prefix.rollouts import shared_rollout
from tests.torchtune_grpo.tiny_models import KINDS, make_model
from torchtune_grpo.config import ConfigError
from torchtune_grpo.types import Rollout

DENSE = "torchtune_grpo.logprobs.DenseLogprobs"


def _rollout() -> Rollout:
    return shared_rollout([3, 3, 2], [2, 4, 1], [0, 0, 1], extra=1)


def _refused(rollout: Rollout) -> str:
    with pytest.raises(ConfigError) as error:
        SharedPrefixLogprobs()(make_model("mha"), rollout)
    assert str(error.value).startswith("logprobs: got") and DENSE in str(error.value)
    return str(error.value)


def test_prompts_that_differ_within_a_group_are_refused() -> None:
    rollout = _rollout()
    for column in (1, 2, 3):  # each of the prompt's three tokens
        tokens = rollout.tokens.clone()
        tokens[1, column] = (tokens[0, column] + 1) % 9
        assert "prompts that differ from that of their group's first row in rows [1]" in _refused(
            replace(rollout, tokens=tokens)
        )
    SharedPrefixLogprobs()(make_model("mha"), replace(rollout, tokens=_with_padding(rollout, 7)))


def _with_padding(rollout: Rollout, id_of_row_1: int) -> torch.Tensor:
    tokens = rollout.tokens.clone()
    tokens[1, 0] = id_of_row_1  # the column of padding before the prompts
    return tokens


def test_prompts_of_another_length_within_a_group_are_refused() -> None:
    rollout = shared_rollout([3, 2, 2], [2, 4, 1], [0, 1, 1], extra=1)
    tokens = rollout.tokens.clone()
    tokens[1, :4] = tokens[0, :4]  # the last tokens are the same
    message = _refused(replace(rollout, tokens=tokens, groups=torch.tensor([0, 0, 1])))
    assert "prompts that differ" in message and "[1]" in message


def test_empty_prompts_are_refused() -> None:
    rollout = _rollout()
    positions = rollout.positions.clone()
    positions[2] -= 2  # nothing of row 2 stands before its response
    assert "an empty prompt in rows [2]" in _refused(replace(rollout, positions=positions))


def test_empty_responses_are_refused() -> None:
    rollout = _rollout()
    mask = rollout.response_mask.clone()
    mask[1] = False
    assert "an empty response in rows [1]" in _refused(replace(rollout, response_mask=mask))


@pytest.mark.parametrize("column", [0, 1])
def test_responses_of_several_turns_are_refused(column: int) -> None:
    rollout = _rollout()
    mask = rollout.response_mask.clone()
    mask[1, column] = False
    message = _refused(replace(rollout, response_mask=mask))
    assert "a response_mask with gaps (several turns) in rows [1]" in message


@pytest.mark.parametrize("kind", KINDS)
def test_supported_families_pass(kind: str) -> None:
    check_model(make_model(kind))


def _model_with(change: str) -> nn.Module:
    model = make_model("gqa")
    layer = model.layers[1]
    if change == "dropout":
        layer.attn.attn_dropout = 0.1
    elif change == "not causal":
        layer.attn.is_causal = False
    elif change == "router":
        layer.mlp = nn.Identity()
    elif change == "cross-attention":
        model.layers.append(nn.Identity())
    elif change == "window":
        with torch.device("meta"):
            return gemma2(
                vocab_size=23,
                num_layers=2,
                num_heads=4,
                head_dim=8,
                num_kv_heads=2,
                embed_dim=32,
                intermediate_dim=40,
                max_seq_len=32,
            )
    elif change == "no decoder":
        return nn.Linear(2, 2)
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dropout", "model: got attn_dropout 0.1 in layer 1, expected attn_dropout: 0.0"),
        ("not causal", "model: got attention with is_causal=False in layer 1, expected causal attention"),
        ("router", "model: got a Identity in layer 1, expected a FeedForward"),
        ("cross-attention", "model: got a Identity in layer 2, expected a TransformerSelfAttentionLayer"),
        ("window", "model: got Gemma2Attention in layer 0, expected torchtune's MultiHeadAttention"),
        ("no decoder", "model: got a Linear, expected a torchtune TransformerDecoder"),
    ],
)
def test_models_that_cannot_be_expressed_are_refused(change: str, message: str) -> None:
    model = _model_with(change)
    with pytest.raises(ConfigError) as error:
        SharedPrefixLogprobs()(model, _rollout())
    assert str(error.value).startswith(message) and DENSE in str(error.value)


def test_rows_beyond_the_models_positions_are_refused() -> None:
    model: TransformerDecoder = make_model("gqa", max_seq_len=6)
    with pytest.raises(ConfigError, match="model.max_seq_len: got 6, expected at least 7"):
        SharedPrefixLogprobs()(model, _rollout())
