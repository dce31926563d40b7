"""Divergences between two distributions over a vocabulary, as components: one elementwise formula each.

p_s and p_t are the student's and the teacher's distributions, p_s = softmax(z / temperature). A divergence L is a sum
over the vocabulary of an elementwise term, and its gradient is

    d L / d z_j = p_s,j (w_j - sum_k p_s,k w_k) / temperature,      p_s,j w_j = d L / d log p_s,j

with the weight w written out at each component. The teacher is a constant. No factor temperature^2 is applied.
"""

from dataclasses import dataclass
from math import log, log1p
from typing import Protocol

import torch
from torch import Tensor

from torchtune_grpo.config import ConfigError


class Divergence(Protocol):
    """Elementwise terms of a divergence over any tile ``[..., n]`` of the vocabulary.

    Given log p_s, log p_t (nats, finite) and p_s, returns the terms, whose sum over the vocabulary is the divergence,
    and the scores d L / d log p_s = p_s w. A constant may be added to w: it cancels in the gradient.
    """

    def __call__(
        self, student_logprobs: Tensor, teacher_logprobs: Tensor, student_probs: Tensor
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class ReverseKL:
    """KL(student || teacher) = sum p_s (log p_s - log p_t), nats; w = log p_s - log p_t.

    Mode seeking: it pushes the student out of what the teacher finds unlikely.
    """

    def __call__(
        self, student_logprobs: Tensor, teacher_logprobs: Tensor, student_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        terms = student_probs * (student_logprobs - teacher_logprobs)
        return terms, terms


@dataclass(frozen=True, kw_only=True)
class ForwardKL:
    """KL(teacher || student) = sum p_t (log p_t - log p_s), nats; w = -p_t / p_s, so that dL/dz = p_s - p_t.

    Mode covering. Its gradient is that of the usual distillation loss -sum p_t log p_s.
    """

    def __call__(
        self, student_logprobs: Tensor, teacher_logprobs: Tensor, student_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        teacher_probs = teacher_logprobs.exp()
        return teacher_probs * (teacher_logprobs - student_logprobs), -teacher_probs


@dataclass(frozen=True, kw_only=True)
class JSD:
    """beta KL(teacher || m) + (1 - beta) KL(student || m), nats, with the mixture m = beta p_t + (1 - beta) p_s.

    w = (1 - beta) (log p_s - log m). The generalized Jensen-Shannon divergence of GKD (Agarwal et al., arXiv
    2306.13649), beta in (0, 1). It is not rescaled: at most the entropy of (beta, 1 - beta), it vanishes at both ends,
    where JSD / beta tends to the forward KL (beta -> 0) and JSD / (1 - beta) to the reverse KL (beta -> 1). So that
    its gradient compares with a KL's, scale the learning rate or the loss by 1 / min(beta, 1 - beta).
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise ConfigError(
                f"beta: got {self.beta}, expected a number between 0 and 1, both excluded"
                " (for the ends take ForwardKL or ReverseKL)"
            )

    def __call__(
        self, student_logprobs: Tensor, teacher_logprobs: Tensor, student_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        mixture = torch.logaddexp(teacher_logprobs + log(self.beta), student_logprobs + log1p(-self.beta))
        scores = (1 - self.beta) * student_probs * (student_logprobs - mixture)
        return scores + self.beta * teacher_logprobs.exp() * (teacher_logprobs - mixture), scores


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """-sum p_s log p_t, nats: the teacher's surprise at the student; w = -log p_t.

    Reverse KL plus the student's entropy: its minimum is the teacher's likeliest token alone, not the teacher. For
    the cross-entropy whose target is the teacher, -sum p_t log p_s, take ``ForwardKL``: the gradient is the same.
    """

    def __call__(
        self, student_logprobs: Tensor, teacher_logprobs: Tensor, student_probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        terms = -student_probs * teacher_logprobs
        return terms, terms
