"""What tests of checkpoints start from."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.torchtune_grpo.training.small_training import Training, trained


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone, as a recipe on one device has."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def training(one_rank: None) -> Training:
    return trained(0)
