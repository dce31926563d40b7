"""Rollouts whose rows share prompts, and the dense execution that a compact one is held against."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.torchtune_grpo.builders import make_rollout
from torchtune_grpo.logprobs import FullSoftmaxHead, target_logprobs
from torchtune_grpo.types import Rollout

# name -> (prompt length of each row, response length of each row, group of each row)
SHAPES = {
    "uneven groups": ([3, 5, 5, 5, 1, 1], [2, 4, 1, 3, 5, 2], [0, 1, 1, 1, 2, 2]),
    "interleaved": ([3, 2, 3, 2, 3], [2, 3, 1, 2, 4], [7, 9, 7, 9, 7]),
    "groups of one": ([4, 2, 3], [3, 2, 6], [0, 1, 2]),
    "one-token responses": ([4, 4, 4, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]),
    "equal lengths": ([6] * 4, [3] * 4, [0] * 4),
}


def shared_rollout(
    prompt_lengths: Sequence[int], response_lengths: Sequence[int], groups: Sequence[int], *, extra: int = 2
) -> Rollout:
    """Random tokens; rows of one group have the prompt of its first."""
    rollout = make_rollout(response_lengths, prompt_lengths=prompt_lengths, extra=extra)
    tokens = rollout.tokens.clone()
    for row, group in enumerate(groups):
        tokens[row, : rollout.prompt_width] = tokens[list(groups).index(group), : rollout.prompt_width]
    return replace(rollout, tokens=tokens, groups=torch.tensor(groups))


def dense_rows(model: nn.Module, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """Log-probabilities ``[N, R]`` by an ordinary causal forward of each row alone, without padding."""
    rows = []
    for row, (prompt, response) in enumerate(
        zip(rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist(), strict=True)
    ):
        start = rollout.prompt_width - prompt
        ids = rollout.tokens[row : row + 1, start : start + prompt + response]
        targets = torch.arange(prompt + response)[None] >= prompt
        logprobs = target_logprobs(model, ids, targets, FullSoftmaxHead(), temperature)
        rows.append(nn.functional.pad(logprobs, (0, rollout.response_mask.shape[1] - response)))
    return torch.stack(rows)


def gradients(
    logprobs: Tensor, rollout: Rollout, model: nn.Module, rows: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Of every parameter, for a loss with random coefficients over the ``rows`` (or all) that ``logprobs`` holds."""
    generator = torch.Generator().manual_seed(5)
    coefficients = torch.randn(rollout.response_mask.shape, generator=generator, dtype=torch.float64)
    chosen = coefficients if rows is None else coefficients[list(rows)]
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad((chosen.to(logprobs.dtype) * logprobs).sum(), parameters)
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in zip(names, found, strict=True)}


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Of the whole tensor, in the 2-norm."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def worst_error(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert actual.keys() == expected.keys()
    return max(relative_error(actual[name], expected[name]) for name in expected)
