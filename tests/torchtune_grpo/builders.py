"""Small rollouts and a toy policy for the tests of the step's arithmetic."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torchtune_grpo.microbatches import plan_whole_groups
from torchtune_grpo.types import Rewards, Rollout, Trajectory

VOCAB = 11
PAD = 10


def make_rollout(
    response_lengths: Sequence[int],
    *,
    prompt_lengths: Sequence[int] | None = None,
    group_size: int = 1,
    extra: int = 0,
    seed: int = 0,
) -> Rollout:
    """Random tokens, one length a row, ``extra`` columns of padding on either side, old_logprobs -2."""
    prompts = list(prompt_lengths or [2] * len(response_lengths))
    n, p, r = len(prompts), max(prompts) + extra, max(max(response_lengths), 1) + extra
    column = torch.arange(p + r).expand(n, -1)
    start = p - torch.tensor(prompts).unsqueeze(1)
    real = (column >= start) & (column < p + torch.tensor(response_lengths).unsqueeze(1))
    tokens = torch.randint(0, PAD, (n, p + r), generator=torch.Generator().manual_seed(seed))
    mask = real[:, p:]
    return Rollout(
        tokens=tokens.masked_fill(~real, PAD),
        positions=(column - start).clamp(min=0),
        response_mask=mask,
        old_logprobs=torch.full(mask.shape, -2.0).masked_fill(~mask, 0.0),
        truncated=torch.zeros(n, dtype=torch.bool),
        groups=torch.arange(n) // group_size,
        answers=[str(row) for row in range(n)],
        source=[f"s{row}" for row in range(n)],
        group_size=group_size,
        cache_bytes=2**29,
    )


def make_rewards(total: Sequence[float]) -> Rewards:
    values = torch.tensor(total, dtype=torch.float32)
    return Rewards(total=values, parts={"answer": values}, success=(values > 0).float())


def make_trajectory(
    rollout: Rollout,
    row_advantages: Sequence[float],
    *,
    ref_logprobs: Tensor | None = None,
    token_weights: Tensor | None = None,
) -> Trajectory:
    """Row advantages at the response tokens; reference = old and weight 1 unless given."""
    mask = rollout.response_mask
    dtype = rollout.old_logprobs.dtype
    return Trajectory(
        rollout=rollout,
        advantages=torch.tensor(row_advantages, dtype=dtype).unsqueeze(1) * mask,
        ref_logprobs=rollout.old_logprobs if ref_logprobs is None else ref_logprobs,
        token_weights=mask.to(dtype) if token_weights is None else token_weights,
    )


class BigramPolicy(nn.Module):
    """Logits of the next token are a row of ``weight [V, V]``."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weight = nn.Parameter(torch.randn(VOCAB, VOCAB, generator=generator, dtype=dtype))


class BigramLogprobs:
    """A ``LogprobsFn`` for ``BigramPolicy``; shows every micro-batch it is given to ``watch`` first."""

    def __init__(self, watch: Callable[[nn.Module, Rollout], object] = lambda model, rollout: None) -> None:
        self._watch = watch

    def plan(self, rollout: Rollout, max_tokens: int) -> list[Tensor]:
        return plan_whole_groups(rollout, max_tokens)

    def __call__(self, model: nn.Module, rollout: Rollout) -> Tensor:
        self._watch(model, rollout)
        logits = model.weight[rollout.tokens[:, rollout.prompt_width - 1 : -1]]
        logprobs = logits.log_softmax(dim=-1).gather(2, rollout.responses.unsqueeze(2)).squeeze(2)
        return logprobs.masked_fill(~rollout.response_mask, 0.0)


bigram_logprobs = BigramLogprobs()
