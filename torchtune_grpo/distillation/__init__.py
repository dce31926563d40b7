"""Distillation: full-vocabulary divergences between a student and its teachers."""

from torchtune_grpo.distillation.components import JSD, CrossEntropy, Divergence, ForwardKL, ReverseKL
from torchtune_grpo.distillation.divergences import (
    TokenStatistics,
    divergence_from_hidden,
    divergence_from_logits,
    divergence_fused,
)

__all__ = [
    "CrossEntropy",
    "Divergence",
    "ForwardKL",
    "JSD",
    "ReverseKL",
    "TokenStatistics",
    "divergence_from_hidden",
    "divergence_from_logits",
    "divergence_fused",
]
