"""The policy under training, and all that a checkpoint holds of it."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from torchtune_grpo.config import ConfigError, instantiate, to_dict
from torchtune_grpo.data import Dataset, Tokenizer
from torchtune_grpo.training.checkpoint_files import read_state
from torchtune_grpo.training.checkpoints import CheckpointManager, Resumed
from torchtune_grpo.training.distributed import Ranks, shut_down
from torchtune_grpo.training.optimizer_step import OptimizerStep
from torchtune_grpo.training.preemption import PREEMPTED, say_preempted
from torchtune_grpo.training.progress import say
from torchtune_grpo.training.reporting import Reporter
from torchtune_grpo.training.setup import TrainingConfig, build_policy, hf_exporter

MAY_CHANGE = frozenset(
    "output_dir resume total_steps device num_threads dp_replicate activation_checkpointing compile "
    "max_tokens_per_micro_batch evaluation evaluate_every_n_steps checkpoints metric_loggers log_every_n_steps "
    "log_samples_every_n_steps num_logged_samples max_skipped_updates weights "
    "teachers teacher_heads tensor_parallel".split()
)
"""Keys that a resumed run may change: they say how and how long to run, not which run it is. Which folder ``weights``
means, and which checkpoints the ``teachers`` are, is held against what was saved of its own."""

MEMORY_OF_GENERATE = frozenset({"max_cached_tokens", "gather_parameters", "cuda_graphs"})
"""Keys of ``generate`` that a resumed run may change too."""


class TrainState:
    """Builds the policy, its optimizer and its schedule from a config; saves and resumes them.

    Attributes:
        model: the sharded policy.
        optimizer_step: clips, steps and zeroes the gradients; call it after the last backward of an update.
        checkpoints: when to save, and where.

    Collective: building broadcasts the weights from rank 0.

    Raises:
        ConfigError: ``resume_from`` was saved with another config, but for the keys ``MAY_CHANGE``, or with other data;
            or what ``optimizer`` and ``lr_scheduler`` refuse, before weights load.
    """

    def __init__(
        self,
        cfg: TrainingConfig,
        ranks: Ranks,
        tokenizer: Tokenizer,
        checkpoints: CheckpointManager,
        resume_from: Path | None,
        dataset: Dataset,
    ) -> None:
        _check_optimizer(cfg, ranks)
        # Without what stands above it: whole trees are moved.
        weights = None if cfg.weights_folder is None else "/".join(cfg.weights_folder.resolve().parts[-2:])
        self._identity = {"dataset": dataset.fingerprint(), "weights": weights}
        if resume_from is not None:
            saved = read_state(resume_from)
            check_resumed_config(saved["config"], to_dict(cfg), resume_from)
            check_resumed_identity(saved["extra"], self._identity, resume_from)
        self._resume_from = resume_from
        if ranks.is_main and cfg.weights_folder is not None:
            say(f"weights from {cfg.weights_folder}")  # which of a run's checkpoints it is
        torch.manual_seed(cfg.seed + ranks.rank)
        self._cfg, self._is_main = cfg, ranks.is_main
        self.checkpoints = checkpoints
        self.model = build_policy(cfg, ranks)
        self._optimizer = instantiate(cfg.optimizer, params=list(self.model.parameters()))
        self._scheduler = instantiate(cfg.lr_scheduler, optimizer=self._optimizer, num_training_steps=cfg.total_steps)
        self.optimizer_step = OptimizerStep(
            self.model,
            self._optimizer,
            self._scheduler,
            cfg.clip_grad_norm,
            max_skipped=cfg.max_skipped_updates,
            folder=cfg.output_dir,
        )
        self._export = hf_exporter(cfg, self.model, tokenizer, ranks)

    def resume(self) -> Resumed | None:
        """Restores the checkpoint, if there is one to resume from, and returns the rest of it. Call it last in set-up:
        it restores the random state. Collective."""
        if self._resume_from is None:
            return None
        resumed = self.checkpoints.load(
            self._resume_from, model=self.model, optimizer=self._optimizer, scheduler=self._scheduler
        )
        self.optimizer_step.skipped_in_a_row = resumed.extra["skipped_in_a_row"]
        if self._is_main:
            say(f"resuming from {self._resume_from} | step {resumed.step} of {self._cfg.total_steps}")
        return resumed

    def save(
        self,
        step: int,
        report: Reporter,
        *,
        extra: Mapping[str, Any] = MappingProxyType({}),
        rollout: Mapping[str, Any] | None = None,
    ) -> None:
        """Saves the checkpoint of ``step`` with what ``report`` holds; ``extra`` as in ``CheckpointManager.save``.

        ``rollout``: this rank's part of the rollout that has updates left, ``rollout_state``. Collective.
        """
        with report.phase("checkpoint"):
            self.checkpoints.save(
                step,
                model=self.model,
                optimizer=self._optimizer,
                scheduler=self._scheduler,
                extra={**self._identity, "skipped_in_a_row": self.optimizer_step.skipped_in_a_row, **extra},
                local={"report": report.state(), "rollout": rollout},
                metrics=report.evaluated(step),
                config=to_dict(self._cfg),
                export=self._export,
            )

    def finish(self, report: Reporter, step: int, *, preempted: bool) -> None:
        """Ends a run after ``step``, once all of it is written; ranks wait for each other.

        Collective: that of ``shut_down``.

        Raises:
            RankError: the last save failed. SystemExit: ``PREEMPTED``, where the run was.
        """
        self.checkpoints.wait()
        report.close()
        if preempted:
            say_preempted(step)
        shut_down()
        if preempted:
            raise SystemExit(PREEMPTED)


def _check_optimizer(cfg: TrainingConfig, ranks: Ranks) -> None:
    """Builds the optimizer and its schedule for a single number. Raises ConfigError for what they refuse."""
    parameter = torch.nn.Parameter(torch.zeros(1, device=ranks.device))
    optimizer = instantiate(cfg.optimizer, params=[parameter])
    instantiate(cfg.lr_scheduler, optimizer=optimizer, num_training_steps=cfg.total_steps)


def check_resumed_config(saved: Mapping[str, Any], current: Mapping[str, Any], path: Path) -> None:
    """Refuses to go on as another run under the old name. Raises ConfigError with every key that differs."""
    keys = [k for k in {**saved, **current} if k not in MAY_CHANGE and _kept(saved, k) != _kept(current, k)]
    if keys:
        lines = [f"{key}: got {current.get(key)}, but {path} was saved with {saved.get(key)}" for key in keys]
        advice = "Set them back, or start another run: another `output_dir`, with `weights` naming this checkpoint."
        raise ConfigError("\n".join([*lines, advice]))


def _kept(config: Mapping[str, Any], key: str) -> Any:
    """What of a key makes the run the run that it is."""
    value = config.get(key)
    if key == "generate" and isinstance(value, Mapping):
        return {name: item for name, item in value.items() if name not in MEMORY_OF_GENERATE}
    return value


def check_resumed_identity(saved: Mapping[str, Any], current: Mapping[str, str | None], path: Path) -> None:
    """Raises ConfigError where ``weights`` now means another folder, as of a run that has gone on, or where the rows
    are no longer those of the run: the same step would be of other prompts."""
    remedies = {"weights": "name that checkpoint", "dataset": "bring its files back to what they were"}
    for key, remedy in remedies.items():
        if saved.get(key) != current[key]:
            raise ConfigError(
                f"{key}: got {current[key]}, but {path} was saved with {saved.get(key)}; {remedy}, or start another "
                "run: another `output_dir`, with `weights` naming this checkpoint"
            )
