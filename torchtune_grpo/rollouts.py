"""Rollouts from completions, and between tokens and judges: decoding, scoring, and describing them in numbers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.collectives import shared_errors
from torchtune_grpo.data import Tokenizer
from torchtune_grpo.layout import key_mask
from torchtune_grpo.rewards.combine import RewardError
from torchtune_grpo.types import Metrics, PromptBatch, Rewards, Rollout

ScoreFn = Callable[..., Rewards]
"""``RewardSum`` or anything called like it."""


def completions(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """The completions as text, stop token left out (a cut-off completion keeps its last token)."""
    texts = []
    for tokens, length, truncated in zip(
        rollout.responses.tolist(), rollout.response_lengths.tolist(), rollout.truncated.tolist(), strict=True
    ):
        texts.append(tokenizer.decode(tokens[: length if truncated else length - 1]))
    return texts


def score_rollout(rollout: Rollout, tokenizer: Tokenizer, score: ScoreFn) -> tuple[Rewards, list[str]]:
    """Decodes and judges every row; returns the rewards and the judged texts.

    Collective: one gather of error messages, so that a judge that fails on one rank ends all with its message.
    """
    texts = completions(rollout, tokenizer)
    with shared_errors("rewards"):
        try:
            rewards = score(
                texts,
                rollout.answers,
                response_lengths=rollout.response_lengths.tolist(),
                truncated=rollout.truncated.tolist(),
                source=rollout.source,
            )
        except RewardError as error:
            if error.row is None:
                raise
            question = f"source {rollout.source[error.row]!r}, prompt {_prompt(rollout, tokenizer, error.row)!r:.400}"
            raise RewardError(f"{error}; {question}", error.row) from error
    return rewards, texts


def rollout_metrics(rollout: Rollout, rewards: Rewards) -> Metrics:
    """Rewards, success, lengths, truncated share, the KV cache's peak and entropy, as local (sum, count) pairs.

    ``entropy`` is the Monte Carlo estimate -mean(log pi(token)) over sampled tokens, in nats a token: unbiased, since
    tokens come from pi itself, and free.
    """
    rows = torch.tensor(float(len(rollout)))
    tokens = rollout.response_mask.sum().cpu().double()
    metrics: dict[str, Any] = {
        "reward": _judged(rewards.total),
        "success": _judged(rewards.success),
        "unjudged": (rewards.total.isnan().sum(), rows),
        "response_length": (tokens, rows),
        "prompt_length": (rollout.prompt_lengths.sum().cpu(), rows),
        "truncated": (rollout.truncated.sum().cpu(), rows),
        "rollout_cache_gib": (torch.tensor(rollout.cache_bytes / 2**30), torch.tensor(1.0)),
        "entropy": (-rollout.old_logprobs.sum().cpu(), tokens),
    }
    metrics |= {f"reward/{name}": _judged(part) for name, part in rewards.parts.items()}
    return metrics


def build_rollout(
    batch: PromptBatch,
    *,
    responses: Tensor,
    logprobs: Tensor,
    lengths: Tensor,
    truncated: Tensor,
    group_size: int,
    cache_bytes: int,
) -> Rollout:
    """Prompts and their completions as a rollout, on the device of ``responses``.

    ``responses [N, W]`` int64 with pad ids after ``lengths [N]``, ``logprobs [N, W]`` fp32; both are cut to
    the longest.
    """
    device, width, prompt_width = responses.device, int(lengths.max()), batch.tokens.shape[1]
    of_row = torch.arange(len(batch), device=device).repeat_interleave(group_size)
    prompts, prompt_lengths = (values.to(device)[of_row] for values in (batch.tokens, batch.lengths))
    positions = torch.arange(prompt_width + width, device=device) - (prompt_width - prompt_lengths)[:, None]
    return Rollout(
        tokens=torch.cat([prompts, responses[:, :width]], dim=1),
        positions=positions.clamp(min=0),
        response_mask=key_mask(width, lengths),
        old_logprobs=logprobs[:, :width],
        truncated=truncated,
        groups=of_row,
        answers=[answer for answer in batch.answers for _ in range(group_size)],
        source=[source for source in batch.source for _ in range(group_size)],
        group_size=group_size,
        cache_bytes=cache_bytes,
    )


SAMPLE_COLUMNS = ["source", "prompt", "completion", "answer", "reward", "success"]


def sample_row(rollout: Rollout, rewards: Rewards, texts: list[str], tokenizer: Tokenizer, row: int) -> list[Any]:
    """One row of the table of sample completions, by ``SAMPLE_COLUMNS``."""
    reward, success = float(rewards.total[row]), float(rewards.success[row])
    return [rollout.source[row], _prompt(rollout, tokenizer, row), texts[row], rollout.answers[row], reward, success]


def sample_rows(
    rollout: Rollout, rewards: Rewards, texts: list[str], tokenizer: Tokenizer, count: int
) -> list[list[Any]]:
    """Up to ``count`` rows of the table, the first completion of each group."""
    first = range(0, len(rollout), rollout.group_size)
    return [sample_row(rollout, rewards, texts, tokenizer, row) for row in first[:count]]


def _prompt(rollout: Rollout, tokenizer: Tokenizer, row: int) -> str:
    start = rollout.prompt_width - int(rollout.prompt_lengths[row])
    return tokenizer.decode(rollout.tokens[row, start : rollout.prompt_width].tolist())


def _judged(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    kept = ~values.isnan()
    return values[kept].double().sum(), kept.sum()
