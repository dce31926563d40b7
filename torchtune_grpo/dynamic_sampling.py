"""Dynamic sampling: sample again until there are enough groups to learn from.

DAPO, arXiv 2503.14476, section 3.2. A step's sampling reads::

    pool = InformativeGroups(num_groups=prompts_per_rank, max_rounds=max_sampling_rounds)
    while not pool.full:
        rollout = generate(model, next(prompts))
        pool.add(rollout, score(rollout))
    rollout, rewards = pool.result(pad_id)

With ``max_rounds`` 1 and rounds of ``num_groups`` groups the rollout comes back as it is: plain sampling.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from torchtune_grpo.advantages import zero_variance_groups
from torchtune_grpo.collectives import all_reduce
from torchtune_grpo.config import ConfigError
from torchtune_grpo.types import Metrics, Rewards, Rollout


class InformativeGroups:
    """Collects rollouts until every rank has enough groups with spread, or a bound is reached.

    Args:
        num_groups: groups per rank that ``result`` returns, and that every rank needs to be done.
        max_rounds: bound on the rollouts added; 1 for no further sampling.
    """

    def __init__(self, *, num_groups: int, max_rounds: int) -> None:
        if max_rounds < 1:
            raise ConfigError(f"max_sampling_rounds: got {max_rounds}, expected >= 1 (1: no dynamic sampling)")
        self.full = False
        """True once no more rounds are wanted; the same on every rank."""
        self._num_groups = num_groups
        self._max_rounds = max_rounds
        self._rollouts: list[Rollout] = []
        self._rewards: list[Rewards] = []
        self._zero_variance: list[bool] = []

    def add(self, rollout: Rollout, rewards: Rewards) -> None:
        """Adds one round. Collectives: one all_reduce, so every rank adds the same number of rounds."""
        self._rollouts.append(rollout)
        self._rewards.append(rewards)
        self._zero_variance += zero_variance_groups(rewards, rollout.group_size).tolist()
        missing = torch.tensor(self._num_groups - self._zero_variance.count(False))
        all_reduce(missing, dist.ReduceOp.MAX)
        self.full = bool(missing <= 0) or len(self._rollouts) == self._max_rounds

    def result(self, pad_id: int) -> tuple[Rollout, Rewards]:
        """The first ``num_groups`` groups with spread, in the order of sampling; the others are dropped.

        Where the bound left too few, the first groups without spread fill up: their advantage is 0, and
        ``TrainedRows(drop_zero_variance=True)`` also gives them weight 0. ``pad_id`` as in ``PromptBatch``.
        """
        by_use = sorted(range(len(self._zero_variance)), key=lambda group: self._zero_variance[group])
        chosen = torch.tensor(sorted(by_use[: self._num_groups]))
        if len(chosen) < self._num_groups:
            raise ConfigError(
                f"prompts_per_step: {len(chosen)} groups were sampled, expected {self._num_groups} or more"
            )
        size = self._rollouts[0].group_size
        rows = (chosen.unsqueeze(1) * size + torch.arange(size)).flatten()
        rollout = concat_rollouts(self._rollouts, pad_id)
        return rollout.rows(rows), _reward_rows(concat_rewards(self._rewards), rows)

    @property
    def metrics(self) -> Metrics:
        """``zero_variance``: share of all sampled groups; ``sampling_rounds``: rounds that it took."""
        count = torch.tensor(float(len(self._zero_variance)))
        return {
            "zero_variance": (torch.tensor(float(sum(self._zero_variance))), count),
            "sampling_rounds": (torch.tensor(float(len(self._rollouts))), torch.tensor(1.0)),
        }


def concat_rollouts(rollouts: Sequence[Rollout], pad_id: int) -> Rollout:
    """One rollout with the rows of all, padded to the widest prompt (left) and completion (right).

    Positions go on counting through the padding on the right, and are 0 on the left. Groups are numbered on.
    """
    prompt_width = max(rollout.prompt_width for rollout in rollouts)
    response_width = max(rollout.response_mask.shape[1] for rollout in rollouts)
    padded = [_widen(rollout, prompt_width, response_width, pad_id) for rollout in rollouts]
    first_group = accumulate((int(rollout.groups.max()) + 1 for rollout in rollouts), initial=0)
    return replace(
        padded[0],
        tokens=torch.cat([rollout.tokens for rollout in padded]),
        positions=torch.cat([rollout.positions for rollout in padded]),
        response_mask=torch.cat([rollout.response_mask for rollout in padded]),
        old_logprobs=torch.cat([rollout.old_logprobs for rollout in padded]),
        truncated=torch.cat([rollout.truncated for rollout in padded]),
        groups=torch.cat([rollout.groups + first for rollout, first in zip(rollouts, first_group, strict=False)]),
        answers=[answer for rollout in padded for answer in rollout.answers],
        source=[source for rollout in padded for source in rollout.source],
        cache_bytes=max(rollout.cache_bytes for rollout in padded),
    )


def concat_rewards(rewards: Sequence[Rewards]) -> Rewards:
    """The rewards of several rollouts with the same parts, in order."""
    return Rewards(
        total=torch.cat([r.total for r in rewards]),
        parts={name: torch.cat([r.parts[name] for r in rewards]) for name in rewards[0].parts},
        success=torch.cat([r.success for r in rewards]),
    )


def _reward_rows(rewards: Rewards, rows: Tensor) -> Rewards:
    parts = {name: part[rows] for name, part in rewards.parts.items()}
    return Rewards(total=rewards.total[rows], parts=parts, success=rewards.success[rows])


def _widen(rollout: Rollout, prompt_width: int, response_width: int, pad_id: int) -> Rollout:
    left = prompt_width - rollout.prompt_width
    right = response_width - rollout.response_mask.shape[1]
    tail = rollout.positions[:, -1:] + torch.arange(1, right + 1, device=rollout.positions.device)
    return replace(
        rollout,
        tokens=pad(rollout.tokens, (left, right), value=pad_id),
        positions=torch.cat([pad(rollout.positions, (left, 0)), tail], dim=1),
        response_mask=pad(rollout.response_mask, (0, right), value=False),
        old_logprobs=pad(rollout.old_logprobs, (0, right)),
    )
