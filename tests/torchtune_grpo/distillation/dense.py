"""The oracle of the divergences: float64, whole vocabulary, PyTorch's own KL, gradients by autograd."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtune_grpo.distillation import JSD, CrossEntropy, Divergence, ForwardKL, ReverseKL

DIVERGENCES: dict[str, Divergence] = {
    "reverse_kl": ReverseKL(),
    "forward_kl": ForwardKL(),
    "jsd_0.5": JSD(beta=0.5),
    "jsd_0.2": JSD(beta=0.2),
    "cross_entropy": CrossEntropy(),
}


def kl(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of each row of log-probabilities."""
    return F.kl_div(second, first, log_target=True, reduction="none").sum(dim=-1)


def _jsd(beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    def value(student: Tensor, teacher: Tensor) -> Tensor:
        mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
        return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)

    return value


_DENSE = {
    "reverse_kl": lambda student, teacher: kl(student, teacher),
    "forward_kl": lambda student, teacher: kl(teacher, student),
    "jsd_0.5": _jsd(0.5),
    "jsd_0.2": _jsd(0.2),
    "cross_entropy": lambda student, teacher: -(student.exp() * teacher).sum(dim=-1),
}


def dense(name: str, student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """The divergence of each row ``[T]`` in float64, differentiable."""
    student = (student_logits.double() / temperature).log_softmax(dim=-1)
    teacher = (teacher_logits.double() / temperature).log_softmax(dim=-1)
    return _DENSE[name](student, teacher)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    return torch.distributions.Categorical(logits=logits.double() / temperature).entropy()


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Normal numbers in float64."""
    return scale * torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
