import time

import pytest
import torch
import torch.distributed as dist

from tests.torchtune_grpo.distributed_helpers import RankError, run_ranks


def _sum_of_ranks(rank: int, offset: float) -> torch.Tensor:
    value = torch.tensor(rank + offset)
    dist.all_reduce(value)
    return value


def _fails_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("rank one is out")
    dist.barrier()


def _sleeps_on_rank_0(rank: int) -> None:
    if rank == 0:
        time.sleep(60)


def test_run_ranks_returns_each_ranks_result() -> None:
    assert [value.item() for value in run_ranks(_sum_of_ranks, 0.5)] == [2.0, 2.0]


def test_run_ranks_raises_the_childs_error() -> None:
    with pytest.raises(RankError, match="rank one is out"):
        run_ranks(_fails_on_rank_1)


def test_run_ranks_gives_up_after_timeout() -> None:
    with pytest.raises(TimeoutError, match="_sleeps_on_rank_0"):
        run_ranks(_sleeps_on_rank_0, timeout=4)
