"""What pulls the student toward its teachers: an advantage for the policy gradient, or a divergence of distributions.

Either is one weighted sum over tokens, without any mean: ``token_weights`` carry the whole normalisation, as in GRPO.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from torchtune_grpo.advantages import GroupZScore
from torchtune_grpo.config import ConfigError
from torchtune_grpo.distillation.components import Divergence, ReverseKL
from torchtune_grpo.distillation.metrics import means, minima
from torchtune_grpo.distillation.payloads import DistillationTrajectory, HiddenStates, NoPayload, Payload
from torchtune_grpo.distillation.projection import DivergenceHead, TeacherSide
from torchtune_grpo.losses import ClippedSurrogate, loss_metric
from torchtune_grpo.types import AdvantageFn, LogprobsFn, LossFn, LossOutput, Rewards, Rollout


@dataclass(frozen=True, kw_only=True)
class DistillationOutput(LossOutput):
    """A loss whose metrics have extremes: local values by name, to be reduced as minimum and maximum."""

    minima: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


class Objective(Protocol):
    """``payload``: what the teachers hand over; ``needs_on_policy``: whether completions must be the student's own.

    ``min_group_size``: the least number of siblings that it can learn from.
    """

    payload: Payload
    needs_on_policy: bool
    min_group_size: int

    def advantages(self, rewards: Rewards, rollout: Rollout, teacher_logprobs: Tensor) -> Tensor:
        """``[N, R]`` fp32, worked out once a rollout; every rank calls it."""
        ...

    def __call__(
        self, model: nn.Module, trajectory: DistillationTrajectory, logprobs_fn: LogprobsFn, teachers: TeacherSide
    ) -> DistillationOutput:
        """The student's forward on a micro-batch, and its loss."""
        ...


class Completions(Protocol):
    """What an objective has to know of a ``GenerateFn``; ``on_policy``: it samples the model's own distribution."""

    group_size: int
    temperature: float
    on_policy: bool


def check_components(generate: Completions, logprobs_fn: LogprobsFn, objective: Objective) -> None:
    """Raises ConfigError for completions from which ``objective`` cannot learn, and for a ``logprobs_fn`` whose head
    cannot be replaced by one that teachers and divergences need."""
    if not hasattr(logprobs_fn, "head"):
        raise ConfigError(f"logprobs: got {type(logprobs_fn).__name__}, expected a component with a `head`")
    if objective.needs_on_policy and not generate.on_policy:
        raise ConfigError(
            "generate: got given completions, or greedy or truncated sampling (temperature 0, top_k, top_p, min_p), "
            "expected the student's own samples: `objective` is a policy gradient. FullVocabulary takes any"
        )
    if generate.temperature <= 0:
        raise ConfigError("generate.temperature: got 0, expected > 0: it divides the logits of student and teacher")
    if generate.group_size < objective.min_group_size:
        raise ConfigError(
            f"generate.group_size: got {generate.group_size}, expected at least {objective.min_group_size}: "
            "`objective` compares siblings"
        )


@dataclass(frozen=True, kw_only=True)
class SampledToken:
    """Reverse KL to the teacher by policy gradient: A_t = log pi_T - log pi_old of the sampled token.

    The expectation of -A_t over the student's samples is KL(student || teacher) at that state; ``loss`` is any of
    GRPO's (its reference, if it wants one, is the teacher). Lu, "On-Policy Distillation", Thinking Machines, 2025.
    ``reward_coefficient`` > 0 adds that much of ``reward_advantage`` (siblings compared by their rewards).
    Collectives: those of ``reward_advantage`` and of the forward.
    """

    loss: LossFn = field(default_factory=ClippedSurrogate)
    reward_coefficient: float = 0.0
    reward_advantage: AdvantageFn = field(default_factory=GroupZScore)
    payload: ClassVar[Payload] = NoPayload()
    needs_on_policy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.reward_coefficient < 0:
            raise ConfigError(f"reward_coefficient: got {self.reward_coefficient}, expected >= 0 (0: no rewards)")

    @property
    def min_group_size(self) -> int:
        return self.reward_advantage.min_group_size if self.reward_coefficient else 1

    def advantages(self, rewards: Rewards, rollout: Rollout, teacher_logprobs: Tensor) -> Tensor:
        advantages = torch.where(rollout.response_mask, teacher_logprobs - rollout.old_logprobs, 0.0)
        if self.reward_coefficient:
            advantages += self.reward_coefficient * self.reward_advantage(rewards, rollout, teacher_logprobs)
        return advantages

    def __call__(
        self, model: nn.Module, trajectory: DistillationTrajectory, logprobs_fn: LogprobsFn, teachers: TeacherSide
    ) -> DistillationOutput:
        out = self.loss(logprobs_fn(model, trajectory.rollout), trajectory)
        return DistillationOutput(loss=out.loss, metrics=out.metrics, minima={}, maxima={})


@dataclass(frozen=True, kw_only=True)
class FullVocabulary:
    """The exact divergence of student and teacher over the whole vocabulary at each response token.

    ``fused`` builds neither model's logits in one piece and needs the payload ``HiddenStates``; otherwise the student's
    exist. ``chunk_size``: tokens whose logits exist at a time, null for the divergence's own choice. It makes no
    difference who wrote the tokens, so completions may be given ones; rewards have no part in it.

    Metrics: ``reverse_kl`` and ``student_entropy`` in nats a token, whatever the divergence, with minima and maxima of
    the former; each also by teacher and source. Collectives: those of the forward and of ``DivergenceHead``.
    """

    divergence: Divergence = field(default_factory=ReverseKL)
    payload: Payload = field(default_factory=HiddenStates)
    fused: bool = True
    chunk_size: int | None = None
    needs_on_policy: ClassVar[bool] = False
    min_group_size: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.fused and not self.payload.needs_head:
            raise ConfigError("fused: got true with a payload of logits, which exist in one piece; set it to false")
        if self.chunk_size is not None and self.chunk_size < 1:
            raise ConfigError(f"chunk_size: got {self.chunk_size}, expected a number of tokens >= 1, or null")

    def advantages(self, rewards: Rewards, rollout: Rollout, teacher_logprobs: Tensor) -> Tensor:
        return torch.zeros_like(teacher_logprobs)

    def __call__(
        self, model: nn.Module, trajectory: DistillationTrajectory, logprobs_fn: LogprobsFn, teachers: TeacherSide
    ) -> DistillationOutput:
        head = DivergenceHead(self.divergence, trajectory, teachers, self.fused, self.chunk_size)
        loss = replace(logprobs_fn, head=head)(model, trajectory.rollout).sum()
        mask, weights, names = trajectory.rollout.response_mask, trajectory.token_weights, teachers.names
        _, reverse_kl, entropy = (
            torch.zeros_like(weights).masked_scatter(mask, values) for values in head.statistics.unbind(dim=1)
        )
        metrics = {
            **loss_metric(loss, trajectory),
            **means("reverse_kl", reverse_kl, trajectory, names),
            **means("student_entropy", entropy, trajectory, names),
        }
        highest = {name: -value for name, value in minima("reverse_kl_max", -reverse_kl, trajectory, names).items()}
        lowest = minima("reverse_kl_min", reverse_kl, trajectory, names)
        return DistillationOutput(loss=loss, metrics=metrics, minima=lowest, maxima=highest)
