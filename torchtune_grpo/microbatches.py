"""Cutting a rollout or trajectory into parts: mini-batches (one optimizer step each), then micro-batches.

Which rows make a micro-batch is for the ``LogprobsFn`` to plan, and every micro-batch is cropped to its own longest
prompt and completion. Since ``token_weights`` hold the normalisation, how rows are cut has no effect
on the gradient.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from torchtune_grpo.collectives import all_reduce
from torchtune_grpo.config import ConfigError
from torchtune_grpo.types import LogprobsFn, Rollout, Trajectory


def minibatch(trajectory: Trajectory, number: int, *, of: int) -> Trajectory:
    """Part ``number`` of ``of`` equal parts of whole groups, in order, for as many optimizer steps on one rollout.

    Raises:
        ConfigError: the groups of this rank cannot be divided by ``n``.
    """
    group_size = trajectory.rollout.group_size
    groups = len(trajectory) // group_size
    if of < 1 or groups % of:
        raise ConfigError(f"minibatches_per_epoch: got {of}, expected a divisor of the {groups} prompts of a rank")
    return trajectory.rows(torch.arange(len(trajectory)).view(of, -1)[number])


def split_in_step(trajectory: Trajectory, logprobs_fn: LogprobsFn, max_tokens: int) -> list[Trajectory]:
    """Micro-batches as ``logprobs_fn`` plans them, cropped; equally many on every rank, so that backwards pair up.

    A rank with fewer repeats its last micro-batch with ``token_weights`` 0: no gradient, no metrics.
    Collectives: one all_reduce.
    """
    parts = [crop(trajectory.rows(rows)) for rows in logprobs_fn.plan(trajectory.rollout, max_tokens)]
    idle = replace(parts[-1], token_weights=torch.zeros_like(parts[-1].token_weights))
    return parts + [idle] * (_most_on_any_rank(len(parts)) - len(parts))


def plan_whole_groups(rollout: Rollout, max_tokens: int) -> list[Tensor]:
    """Row indices, int64 on CPU, of micro-batches of whole groups; each row stands in exactly one of them.

    A micro-batch costs rows * (its longest real prompt + its longest real completion) <= ``max_tokens``. A
    single group that costs more is a micro-batch of its own: groups are never cut. Groups are taken longest
    first, so that neighbours are of like length, little is spent on padding, and memory peaks at the start.
    """
    size = rollout.group_size
    prompts = rollout.prompt_lengths.view(-1, size).amax(dim=1).tolist()
    responses = rollout.response_lengths.view(-1, size).amax(dim=1).tolist()
    siblings = torch.arange(size)
    parts = _plan_groups(prompts, responses, size, max_tokens)
    return [(torch.tensor(part).unsqueeze(1) * size + siblings).flatten() for part in parts]


def plan_in_step(rollout: Rollout, logprobs_fn: LogprobsFn, max_tokens: int) -> list[Tensor]:
    """``logprobs_fn.plan`` with the same number of parts on every rank: a rank with fewer repeats its last one.

    Collectives: one all_reduce.
    """
    parts = logprobs_fn.plan(rollout, max_tokens)
    return parts + parts[-1:] * (_most_on_any_rank(len(parts)) - len(parts))


def plan_lengths_in_step(lengths: Tensor, max_tokens: int) -> list[tuple[Tensor, float]]:
    """Micro-batches of independent rows of ``lengths [n]`` tokens, each as its row indices and a weight.

    Costs and order as in ``plan_whole_groups``; the same number on every rank, where a rank with fewer repeats its last
    one with weight 0 (all others have weight 1). Collectives: one all_reduce.
    """
    parts = _plan_groups(lengths.tolist(), [0] * len(lengths), 1, max_tokens)
    planned = [(torch.tensor(part), 1.0) for part in parts]
    return planned + [(planned[-1][0], 0.0)] * (_most_on_any_rank(len(planned)) - len(planned))


def crop(trajectory: Trajectory) -> Trajectory:
    """Without the columns that are padding in every row: left of the prompts and right of the completions."""
    width = _response_width(trajectory.rollout)
    return replace(
        trajectory,
        rollout=crop_rollout(trajectory.rollout),
        advantages=trajectory.advantages[:, :width],
        ref_logprobs=trajectory.ref_logprobs[:, :width],
        token_weights=trajectory.token_weights[:, :width],
    )


def crop_rollout(rollout: Rollout) -> Rollout:
    """``crop`` for a rollout; at least one response column stays."""
    width = _response_width(rollout)
    start = rollout.prompt_width - int(rollout.prompt_lengths.max())
    end = rollout.prompt_width + width
    return replace(
        rollout,
        tokens=rollout.tokens[:, start:end],
        positions=rollout.positions[:, start:end],
        response_mask=rollout.response_mask[:, :width],
        old_logprobs=rollout.old_logprobs[:, :width],
    )


def _plan_groups(prompts: list[int], responses: list[int], size: int, max_tokens: int) -> list[list[int]]:
    """Group numbers of each micro-batch, from every group's longest prompt and longest completion."""
    if max_tokens < 1:
        raise ConfigError(f"max_tokens: got {max_tokens}, expected a number of tokens per micro-batch >= 1")
    parts: list[list[int]] = []
    widest_prompt = widest_response = 0
    for group in sorted(range(len(prompts)), key=lambda i: -(prompts[i] + responses[i])):
        widest_prompt = max(widest_prompt, prompts[group])
        widest_response = max(widest_response, responses[group])
        rows = size * (len(parts[-1]) + 1) if parts else size
        if parts and rows * (widest_prompt + widest_response) <= max_tokens:
            parts[-1].append(group)
        else:
            parts.append([group])
            widest_prompt, widest_response = prompts[group], responses[group]
    return parts


def _response_width(rollout: Rollout) -> int:
    return max(int(rollout.response_lengths.max()), 1)


def _most_on_any_rank(count: int) -> int:
    return int(all_reduce(torch.tensor(count), dist.ReduceOp.MAX))
