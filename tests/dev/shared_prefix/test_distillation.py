"""A full-vocabulary objective brings its own head, which shared-prefix execution feeds like any other."""

from pathlib import Path

import torch

from dev.shared_prefix import SharedPrefixLogprobs
from tests.dev.shared_prefix.rollouts import shared_rollout
from tests.torchtune_grpo.distillation.small_models import make_distillation, make_side, make_small, two_teachers
from torchtune_grpo.distillation import FullVocabulary, HiddenStates
from torchtune_grpo.logprobs import DenseLogprobs


def test_full_vocabulary_divergence_equals_that_of_dense_execution(tmp_path: Path) -> None:
    student, teachers = make_small(0), two_teachers(tmp_path)
    trajectory = make_distillation(shared_rollout([3, 2, 3, 2], [2, 3, 1, 4], [7, 9, 7, 9]), teachers)
    side = make_side(tmp_path, (16, 24))
    objective = FullVocabulary(payload=HiddenStates(dtype="fp32"))
    shared, dense = (objective(student, trajectory, fn, side) for fn in (SharedPrefixLogprobs(), DenseLogprobs()))
    assert dense.loss > 0.5
    torch.testing.assert_close(shared.loss, dense.loss, rtol=1e-5, atol=0)
    parameters = list(student.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(shared.loss, parameters),
        torch.autograd.grad(dense.loss, parameters),
        rtol=1e-4,
        atol=1e-5,
    )
