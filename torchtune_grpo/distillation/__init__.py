"""On-policy distillation: teachers, what they hand over, whose rows they judge, and the objectives."""

from torchtune_grpo.distillation.components import JSD, CrossEntropy, Divergence, ForwardKL, ReverseKL
from torchtune_grpo.distillation.divergences import (
    TokenStatistics,
    divergence_from_hidden,
    divergence_from_logits,
    divergence_fused,
)
from torchtune_grpo.distillation.given import GivenCompletions
from torchtune_grpo.distillation.metrics import means
from torchtune_grpo.distillation.objectives import FullVocabulary, Objective, SampledToken, check_components
from torchtune_grpo.distillation.payloads import DistillationTrajectory, HiddenStates, Logits
from torchtune_grpo.distillation.routing import Routing
from torchtune_grpo.distillation.teachers import Teacher, TeacherPool
from torchtune_grpo.distillation.vocabulary_parallel import make_head_group

__all__ = [
    "JSD",
    "CrossEntropy",
    "DistillationTrajectory",
    "Divergence",
    "ForwardKL",
    "FullVocabulary",
    "GivenCompletions",
    "HiddenStates",
    "Logits",
    "Objective",
    "ReverseKL",
    "Routing",
    "SampledToken",
    "Teacher",
    "TeacherPool",
    "TokenStatistics",
    "check_components",
    "divergence_from_hidden",
    "divergence_from_logits",
    "divergence_fused",
    "make_head_group",
    "means",
]
