"""Sharded over two ranks that need different numbers of micro-batches."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dev.shared_prefix import SharedPrefixLogprobs
from tests.dev.shared_prefix.rollouts import dense_rows, shared_rollout, worst_error
from tests.torchtune_grpo.builders import make_trajectory
from tests.torchtune_grpo.distributed_helpers import run_ranks
from tests.torchtune_grpo.tiny_models import make_model
from torchtune_grpo.losses import ClippedSurrogate
from torchtune_grpo.microbatches import split_in_step
from torchtune_grpo.normalization import TokenMean, normalize
from torchtune_grpo.training.distributed import Ranks, build_sharded, set_gradient_sync
from torchtune_grpo.types import Rollout, Trajectory

ROWS = [[0, 1, 2, 3], [4, 5, 6, 7]]  # of each rank: two groups of two
PARTS = [[[0, 1, 2, 3]], [[0], [1, 2], [3]]]  # rank 1 splits both of its groups


@dataclass(frozen=True, kw_only=True)
class _Planned(SharedPrefixLogprobs):
    parts: list[list[int]]

    def plan(self, rollout: Rollout, max_tokens: int) -> list[Tensor]:
        return [torch.tensor(part) for part in self.parts]


def _trajectory() -> Trajectory:
    rollout = shared_rollout([3, 3, 5, 5, 1, 1, 4, 4], [2, 4, 1, 3, 5, 1, 2, 6], [0, 0, 1, 1, 2, 2, 3, 3])
    rollout = replace(rollout, group_size=2)
    return make_trajectory(rollout, [1.0, -0.5, 0.7, -1.2, 0.3, 0.9, 2.0, -0.8])


def _on_rank(rank: int) -> dict[str, Tensor]:
    model = build_sharded(
        lambda: make_model("gqa"),
        lambda: make_model("gqa").state_dict(),
        ranks=Ranks(device=torch.device("cpu"), rank=rank, world_size=2),
        activation_checkpointing=True,
    )
    trajectory = _trajectory().rows(torch.tensor(ROWS[rank]))
    trajectory = normalize(trajectory, TokenMean(), world_size_for_averaging=2)
    logprobs_fn = _Planned(parts=PARTS[rank])
    micro_batches = split_in_step(trajectory, logprobs_fn, max_tokens=100)
    assert len(micro_batches) == 3
    for i, micro in enumerate(micro_batches):
        set_gradient_sync(model, i == 2)
        ClippedSurrogate()(logprobs_fn(model, micro.rollout), micro).loss.backward()
    found = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}


def test_sharded_gradient_over_uneven_micro_batches_equals_dense_execution() -> None:
    model = make_model("gqa")
    trajectory = normalize(_trajectory(), TokenMean(), world_size_for_averaging=1)
    ClippedSurrogate()(dense_rows(model, trajectory.rollout), trajectory).loss.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for found in run_ranks(_on_rank):
        assert worst_error(found, expected) <= 1e-5
