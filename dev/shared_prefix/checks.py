"""What shared-prefix execution cannot compute, refused with the key to change."""

import torch
from torch import nn
from torchtune.modules import (
    FeedForward,
    MultiHeadAttention,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)

from dev.shared_prefix.layout import CompactLayout
from torchtune_grpo.config import ConfigError
from torchtune_grpo.types import Rollout

DENSE = "torchtune_grpo.logprobs.DenseLogprobs"


def check_model(model: nn.Module) -> None:
    """Raises ConfigError unless every layer of ``model`` is plain causal attention and a plain MLP, without dropout.

    Then all that mixes tokens is the attention that a compact layout replaces, as in llama, Qwen2.5 and Qwen3.
    """
    if not isinstance(model, TransformerDecoder):
        raise _refusal(f"a {type(model).__name__}", "a torchtune TransformerDecoder")
    for i, layer in enumerate(model.layers):
        _check_layer(layer, f" in layer {i}")


def _check_layer(layer: nn.Module, where: str) -> None:
    found = [m for m in layer.modules() if isinstance(m, TransformerSelfAttentionLayer)]  # itself, or what it wraps
    if len(found) != 1:
        raise _refusal(f"a {type(layer).__name__}{where}", "a TransformerSelfAttentionLayer")
    attention, mlp = found[0].attn, found[0].mlp
    if type(attention) is not MultiHeadAttention:
        expected = "torchtune's MultiHeadAttention (no window, soft-capping or chunks)"
        raise _refusal(f"{type(attention).__name__}{where}", expected)
    if not attention.is_causal:
        raise _refusal(f"attention with is_causal=False{where}", "causal attention")
    if attention.attn_dropout > 0:
        raise _refusal(f"attn_dropout {attention.attn_dropout}{where}", "attn_dropout: 0.0")
    if not isinstance(mlp, FeedForward):
        raise _refusal(f"a {type(mlp).__name__}{where}", "a FeedForward (a router would count each prompt once)")


def check_length(model: TransformerDecoder, layout: CompactLayout) -> None:
    """Raises ConfigError for a row longer than the model's positions reach."""
    if layout.longest_row > model.max_seq_len:
        raise ConfigError(
            f"model.max_seq_len: got {model.max_seq_len}, expected at least {layout.longest_row}, the longest prompt + "
            "completion"
        )


def check_rollout(rollout: Rollout) -> None:
    """Raises ConfigError unless every row is a prompt, the same in all rows of its group, and one response after it.

    ``rollout.prompt_lengths`` and ``groups`` say where prompts start and which are the same. Waits for the device.
    """
    if bool((rollout.prompt_lengths < 1).any()) or not rollout.prompt_width:
        raise _rows_refusal(rollout.prompt_lengths < 1, "an empty prompt", "at least one token")
    mask, lengths = rollout.response_mask, rollout.response_lengths
    if bool((lengths < 1).any()):
        raise _rows_refusal(lengths < 1, "an empty response", "at least one token")
    contiguous = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    if bool((mask != contiguous).any()):
        wrong = (mask != contiguous).any(dim=1)
        raise _rows_refusal(wrong, "a response_mask with gaps (several turns)", "one run from the first column")
    prompts = rollout.tokens[:, : rollout.prompt_width]
    columns = torch.arange(rollout.prompt_width, device=prompts.device)
    real = columns >= rollout.prompt_width - rollout.prompt_lengths[:, None]
    first = (rollout.groups[:, None] == rollout.groups).int().argmax(dim=1)  # of its group
    differs = (real != real[first]).any(dim=1) | ((prompts != prompts[first]) & real).any(dim=1)
    if bool(differs.any()):
        raise _rows_refusal(differs, "prompts that differ from that of their group's first row", "identical prompts")


def _refusal(got: str, expected: str) -> ConfigError:
    return ConfigError(f"model: got {got}, expected {expected}; or set logprobs to {DENSE}")


def _rows_refusal(wrong: torch.Tensor, got: str, expected: str) -> ConfigError:
    rows = wrong.nonzero().flatten().tolist()
    return ConfigError(
        f"logprobs: got {got} in rows {rows[:8]} of a rollout, expected {expected}; or set it to {DENSE}"
    )
