"""What every recipe sets up the same way: shared config keys, checks before weights load, the policy, its export."""

import fcntl
import os
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_grpo.config import Component, ConfigError, component, instantiate, locate
from torchtune_grpo.data import Tokenizer
from torchtune_grpo.models.weights import (
    check_weights,
    read_hf_config,
    read_weights,
    scratch_hf_config,
    write_hf_folder,
)
from torchtune_grpo.training.checkpoint_files import resolve_weights
from torchtune_grpo.training.distributed import Ranks, build_sharded, full_state_dict

LEASE_S = 120.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(kw_only=True)
class RecipeConfig:
    """The top-level keys that all recipes share.

    ``dtype`` is that of compute; master weights and optimizer state are fp32 throughout. ``weights``: a Hugging
    Face folder, a checkpoint, or the output_dir of a run (its newest checkpoint); null trains from scratch.
    ``dp_replicate``: copies of the sharded model (HSDP); 1 shards over all ranks (FSDP2).
    """

    output_dir: str
    seed: int = 0
    device: str = "cpu"
    dtype: Literal["fp32", "bf16"] = "fp32"
    num_threads: int | None = None
    tokenizer: Component = component(provides=("encode_prompt", "vocab_size"))
    prompt: Component = component(provides=("encode",))
    model: Component = component(provides=("tok_embeddings", "layers"))
    weights: str | None
    dp_replicate: int = 1
    rewards: Component
    activation_checkpointing: ClassVar[bool] = False  # keys of training recipes only
    compile: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.output_dir:
            raise ConfigError("output_dir: got an empty string, expected a folder to write to")
        self.output_dir = os.path.abspath(self.output_dir)  # a judge may change the working directory
        if self.num_threads is not None:
            check_at_least(1, self, "num_threads")

    @cached_property
    def weights_folder(self) -> Path | None:
        """The Hugging Face folder that ``weights`` means, None for none; decided once, whatever is saved meanwhile.

        Raises:
            ConfigError: there is no such folder.
        """
        return None if self.weights is None else resolve_weights(self.weights)


@dataclass(kw_only=True)
class TrainingConfig(RecipeConfig):
    """The further keys that training recipes share. Steps are optimizer steps."""

    activation_checkpointing: bool = False
    compile: bool = False
    dataset: Component = component(provides=("examples", "dropped"))
    total_steps: int
    max_tokens_per_micro_batch: int
    optimizer: Component = component(runtime=("params",), provides=("step", "param_groups"))
    lr_scheduler: Component | None = component(runtime=("optimizer", "num_training_steps"), default=None)
    clip_grad_norm: float | None = 1.0  # null: gradients are not clipped
    max_skipped_updates: int = 5  # so many in a row without a finite gradient end the run
    evaluation: dict[str, Component] = component(provides=("generate", "max_prompt_tokens"), default={})
    evaluate_every_n_steps: int = 10
    checkpoints: Component = component(runtime=("output_dir",), provides=("start", "save"))
    resume: str | None = "auto"
    metric_loggers: list[Component] = component(default=[])

    def __post_init__(self) -> None:
        super().__post_init__()
        positive = ("total_steps", "max_tokens_per_micro_batch", "evaluate_every_n_steps", "max_skipped_updates")
        check_at_least(1, self, *positive)
        if self.clip_grad_norm is not None and self.clip_grad_norm <= 0:
            raise ConfigError(f"clip_grad_norm: got {self.clip_grad_norm}, expected > 0, or null for no clipping")
        best = self.checkpoints.get("best_metric")
        if best is not None and not any(best.startswith(f"eval/{task}/") for task in self.evaluation):
            names = ", ".join(f"eval/{task}/pass@1" for task in self.evaluation) or "none, as `evaluation` is empty"
            raise ConfigError(f"checkpoints.best_metric: got {best!r}, expected an evaluation's metric: {names}")

    def is_due(self, step: int, every: int, since: int = 1) -> bool:
        """Whether one of the last ``since`` steps is a multiple of ``every``; the very last always counts."""
        return step % every < since or step == self.total_steps


@dataclass(kw_only=True)
class RolloutConfig(TrainingConfig):
    """The further keys of recipes that train on completions of prompts, each rollout in one optimizer step or more."""

    prompts_per_step: int  # prompts of one rollout, over all ranks; each gets generate.group_size completions
    max_prompt_tokens: int  # longer prompts are left out and counted
    generate: Component = component(provides=("on_policy", "longest"))
    trained_rows: Component
    token_weights: Component
    logprobs: Component = component(runtime=("temperature",), provides=("plan",))
    old_logprobs: Component
    epochs_per_rollout: int = 1  # passes over a rollout
    minibatches_per_epoch: int = 1  # optimizer steps in a pass
    log_samples_every_n_steps: int = 10
    num_logged_samples: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, self, "epochs_per_rollout", "minibatches_per_epoch", "log_samples_every_n_steps")
        check_at_least(0, self, "num_logged_samples")
        if self.total_steps % self.updates_per_rollout:
            raise ConfigError(
                f"total_steps: got {self.total_steps}, expected a multiple of the {self.updates_per_rollout} optimizer "
                "steps of a rollout (epochs_per_rollout * minibatches_per_epoch)"
            )

    @property
    def updates_per_rollout(self) -> int:
        return self.epochs_per_rollout * self.minibatches_per_epoch

    def prompts_per_rank(self, ranks: Ranks) -> int:
        """Prompts of one rollout on each rank. Raises ConfigError unless they divide over ranks and mini-batches."""
        prompts = per_rank(self.prompts_per_step, ranks, "prompts_per_step")
        if prompts % self.minibatches_per_epoch:
            raise ConfigError(
                f"minibatches_per_epoch: got {self.minibatches_per_epoch}, expected a divisor of the {prompts} prompts "
                "of a rank"
            )
        return prompts


def make_output_dir(cfg: RecipeConfig, ranks: Ranks) -> None:
    """Makes the folder on rank 0, before any work is done, and claims it for as long as the process lives.

    Raises:
        ConfigError: it cannot be written to, or another live run writes to it.
    """
    if not ranks.is_main:
        return
    try:
        Path(cfg.output_dir).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=cfg.output_dir):
            pass
        lock = os.open(Path(cfg.output_dir) / ".lock", os.O_RDWR | os.O_CREAT, 0o644)  # never closed: death releases it
    except (OSError, ValueError) as e:
        raise ConfigError(f"output_dir: got {cfg.output_dir!r}, which cannot be written to: {e}") from e
    try:
        owner = _take(lock)
    except OSError as e:
        warnings.warn(f"output_dir cannot be locked ({e}): see that no two runs share it", stacklevel=2)
        return
    if owner is not None:
        raise ConfigError(
            f"output_dir: got {cfg.output_dir!r}, to which a live run writes ({owner}); end that one or choose another"
        )
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
    os.register_at_fork(after_in_child=partial(_drop_lock, lock, os.getpid()))


def _take(lock: int) -> str | None:
    """Locks the open file; None, or what its owner has written into it. The owner's death on another node may take a
    file server ``LEASE_S`` seconds to notice: so long it is waited for."""
    deadline = time.monotonic() + LEASE_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            owner = os.pread(lock, 200, 0).decode()
            if owner.endswith(f" on {socket.gethostname()}") or time.monotonic() > deadline:
                return owner
        time.sleep(2)


def _drop_lock(lock: int, owner: int) -> None:
    """In a process that the owner forks, as a judge may: what it leaves behind must not hold the folder."""
    if os.getppid() == owner:
        os.close(lock)


def check_at_least(least: int, cfg: RecipeConfig, *keys: str) -> None:
    """Raises ConfigError for the first of ``keys`` whose number is below ``least``."""
    for key in keys:
        if getattr(cfg, key) < least:
            raise ConfigError(f"{key}: got {getattr(cfg, key)}, expected at least {least}")


def build_policy(cfg: RecipeConfig, ranks: Ranks, *, trainable: bool = True) -> TransformerDecoder:
    """The sharded model with the weights that ``cfg`` names, or initialised from ``cfg.seed``. Collective.

    A frozen one (``trainable`` false) serves as reference policy and for evaluation.
    """

    def initial_state() -> Mapping[str, Tensor]:
        if cfg.weights_folder is not None:
            return read_weights(cfg.weights_folder)
        torch.manual_seed(cfg.seed)
        return instantiate(cfg.model).state_dict()

    return build_sharded(
        lambda: instantiate(cfg.model),
        initial_state,
        ranks=ranks,
        dp_replicate=cfg.dp_replicate,
        compute_dtype=DTYPES[cfg.dtype],
        activation_checkpointing=cfg.activation_checkpointing,
        compile_layers=cfg.compile,
        trainable=trainable,
    )


def check_model(cfg: RecipeConfig, tokenizer: Tokenizer, longest: int) -> None:
    """Holds the model against its weights, the tokenizer and the longest sequence, on meta: nothing is loaded.

    A component at the top level of ``cfg`` whose class has a static ``check_model(model)`` is asked too.

    Raises:
        ConfigError: other shapes, a vocabulary too small, ``longest`` tokens beyond ``max_seq_len``, or a component
            that cannot work with the model.
    """
    with torch.device("meta"):
        model = instantiate(cfg.model)
    vocab_size = model.tok_embeddings.num_embeddings
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            f"model: got a vocabulary of {vocab_size}, expected at least the tokenizer's {tokenizer.vocab_size}; "
            "change `model` or `tokenizer.path`"
        )
    if longest > model.max_seq_len:
        raise ConfigError(
            f"model.max_seq_len: got {model.max_seq_len}, expected at least {longest}, the longest prompt + completion"
        )
    for node in vars(cfg).values():
        if isinstance(node, Component):
            refuse = getattr(locate(node["_component_"], node.path), "check_model", None)
            if refuse is not None:
                refuse(model)
    if cfg.weights_folder is not None:
        check_weights(cfg.weights_folder, model)


def per_rank(total: int, ranks: Ranks, key: str) -> int:
    """A global number divided over the ranks. Raises ConfigError unless it divides."""
    if total < 1 or total % ranks.world_size:
        raise ConfigError(f"{key}: got {total}, expected a multiple of the number of ranks ({ranks.world_size})")
    return total // ranks.world_size


def hf_exporter(
    cfg: RecipeConfig, model: TransformerDecoder, tokenizer: Tokenizer, ranks: Ranks
) -> Callable[[], Callable[[Path], None]]:
    """A function that copies the weights of ``model``, in the compute dtype, and returns another one, which writes the
    copy as a Hugging Face folder, tokenizer included.

    The first is collective: it gathers every parameter. The second is not; rank 0 writes.
    """
    if cfg.weights_folder is not None:
        hf_config = read_hf_config(cfg.weights_folder)
    else:
        hf_config = scratch_hf_config(model, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id)

    def export() -> Callable[[Path], None]:
        state = {name: tensor.to(DTYPES[cfg.dtype], copy=True) for name, tensor in full_state_dict(model).items()}

        def write(folder: Path) -> None:
            if ranks.is_main:
                write_hf_folder(folder, state, hf_config, DTYPES[cfg.dtype])
                for path in tokenizer.files:
                    shutil.copyfile(path, folder / path.name)

        return write

    return export
