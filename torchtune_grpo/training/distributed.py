"""Process groups, FSDP2 / HSDP sharding, and building a sharded model from a config.

Everything runs under torchrun at any world size, one included; the device's type picks gloo or NCCL, and a gloo
group beside NCCL carries Python objects and CPU tensors.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torchtune.modules import TransformerDecoder, TransformerSelfAttentionLayer
from torchtune.training import set_activation_checkpointing

from torchtune_grpo.config import ConfigError
from torchtune_grpo.failures import stop_watching, watch_ranks
from torchtune_grpo.models.linear import use_onednn


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where this process stands. All ranks are data parallel: each holds other prompts."""

    device: torch.device
    rank: int
    world_size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init_ranks(device: str, *, num_threads: int | None = None, timeout_minutes: float = 30.0) -> Ranks:
    """Starts the default process group from torchrun's environment (or alone, without one).

    From here on one rank's failure ends all (``torchtune_grpo.failures``).

    Collective: every rank calls it once. Denormals are flushed to zero, since a small model's backward is many
    times slower on them. Raises ConfigError for a device this machine lacks.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device: got {device!r}, expected 'cpu' or 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: got 'cuda', but this machine has no usable GPU; set device=cpu")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29500" if int(os.environ["WORLD_SIZE"]) > 1 else "0")
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(f"device: rank {local_rank} of this node has no GPU of its own; lower --nproc_per_node")
        torch.cuda.set_device(local_rank)
    elif num_threads is not None:
        torch.set_num_threads(num_threads)
    else:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, _usable_cores() // per_node))
    torch.set_flush_denormal(True)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        timeout = timedelta(minutes=timeout_minutes)
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        if world_size > 1:
            watch_ranks(store, rank, world_size)
    return Ranks(
        device=torch.device(device, local_rank) if device == "cuda" else torch.device("cpu"),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shut_down() -> None:
    """Ends the process group. Collective: ranks wait for each other, so none leaves while another still writes.

    The barrier also lets gloo's threads drop the Python objects of earlier collectives: one that still does so
    while the interpreter exits aborts the process.
    """
    dist.barrier()  # whoever fails before it is still watched
    stop_watching()
    dist.barrier()
    dist.destroy_process_group()


def data_parallel_mesh(ranks: Ranks, dp_replicate: int) -> DeviceMesh:
    """A mesh ``(replicate, shard)``: parameters are sharded over the second axis and copied over the first."""
    if dp_replicate < 1 or ranks.world_size % dp_replicate:
        raise ConfigError(
            f"dp_replicate: got {dp_replicate}, expected a divisor of the number of ranks ({ranks.world_size})"
        )
    shape = (dp_replicate, ranks.world_size // dp_replicate)
    return init_device_mesh(ranks.device.type, shape, mesh_dim_names=("replicate", "shard"))


def build_sharded(
    build: Callable[[], TransformerDecoder],
    read_state_dict: Callable[[], Mapping[str, Tensor]],
    *,
    ranks: Ranks,
    dp_replicate: int = 1,
    compute_dtype: torch.dtype = torch.float32,
    activation_checkpointing: bool = False,
    compile_layers: bool = False,
    trainable: bool = True,
) -> TransformerDecoder:
    """Builds on meta, shards, then loads full weights that rank 0 alone reads.

    Master weights, gradients' reduction and the optimizer are fp32; a bf16 ``compute_dtype`` casts parameters and
    activations only for compute, so an update of 1e-6 is not rounded away. A model that is not ``trainable`` is
    stored in ``compute_dtype``. Collective: broadcast of every tensor from rank 0.
    """
    with torch.device("meta"):
        model = build()
    model.to(torch.float32 if trainable else compute_dtype)
    model.requires_grad_(trainable)
    if ranks.device.type == "cpu" and compute_dtype == torch.float32 and not compile_layers:
        use_onednn(model)
    if activation_checkpointing and trainable:
        set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    if compile_layers:
        for layer in model.layers:
            layer.compile()
    mesh = data_parallel_mesh(ranks, dp_replicate)
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    model.to_empty(device=ranks.device)
    with ranks.device:
        for module in model.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()
    full = dict(read_state_dict()) if ranks.is_main else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    return model


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Full CPU tensors on rank 0, an empty dict elsewhere; where nothing is split over ranks they share the
    parameters' memory. Collective: one all-gather a parameter."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The model's FSDP units, root first; empty for a model that is not sharded."""
    return [m for m in model.modules() if isinstance(m, FSDPModule)]


@contextmanager
def parameters_gathered(model: nn.Module) -> Iterator[None]:
    """Parameters are whole on every rank inside the block, and forwards make no collective: ranks run freely.

    Collective at entry (one all-gather a unit). Memory: a full copy of the parameters in the compute dtype.
    """
    units = fsdp_modules(model)
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(unit is not model, recurse=False)
            unit.reshard()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout off, no autograd. On exit the model's mode is restored and its parameters are sharded:
    the root unit keeps them whole after a forward, for a backward that does not come here."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)
        for unit in fsdp_modules(model):
            unit.reshard()


def set_gradient_sync(model: nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients over ranks; off while micro-batches accumulate."""
    for unit in fsdp_modules(model)[:1]:
        unit.set_requires_gradient_sync(sync)
