"""A training of a few numbers, and its checkpoints."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from torchtune_grpo.training.checkpoints import CheckpointManager


class TiedModel(nn.Module):
    """Embedding and head share one weight; 7 rows, so that two ranks hold unequal shards."""

    def __init__(self, dim: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, dim)
        self.inner = nn.Linear(dim, dim)
        self.head = nn.Linear(dim, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))


class Training(NamedTuple):
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None

    def run(self, steps: int) -> list[float]:
        """Steps on tokens of torch's generator; returns losses, draws of the other generators, and rates."""
        seen = []
        for _ in range(steps):
            tokens = torch.randint(0, 7, (4, 5))
            loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            seen += [loss.item(), random.random(), np.random.random(), self.optimizer.param_groups[0]["lr"]]
        return seen

    def tensors(self) -> dict[str, Tensor]:
        """Full parameters and both Adam moments."""
        found = {}
        for name, parameter in self.model.named_parameters():
            moments = self.optimizer.state.get(parameter, {})
            for kind, value in {"parameter": parameter, **moments}.items():
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                found[f"{name}/{kind}"] = value.detach().clone()
        return found


def make_training(seed: int, *, dim: int = 3, shard: bool = True) -> Training:
    torch.manual_seed(seed)
    model = TiedModel(dim)
    if shard:
        fully_shard(model.inner)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return Training(model, optimizer, scheduler)


def trained(seed: int) -> Training:
    training = make_training(seed)
    training.run(1)
    return training


def write_weights(folder: Path) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")


def save(
    manager: CheckpointManager,
    step: int,
    training: Training,
    *,
    metrics: dict[str, float] | None = None,
    extra: dict[str, Any] | None = None,
    local: dict[str, Any] | None = None,
    write: Callable[[Path], None] = write_weights,
) -> Path:
    """Saves and waits until it is done."""
    rest = {"extra": extra or {}, "local": local or {}, "metrics": metrics or {}, "config": {"seed": 0}}
    path = manager.save(step, **training._asdict(), **rest, export=lambda: write)
    manager.wait()
    return path
