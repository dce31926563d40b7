import pytest
import torch

from torchtune_grpo.config import ConfigError
from torchtune_grpo.training.schedules import constant_schedule_with_warmup, linear_schedule_with_warmup


def _rates(schedule, steps: int, **settings: float) -> list[float]:
    """The learning rate that each of ``steps`` optimizer steps uses; the optimizer's own is 2."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = schedule(optimizer, **settings)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_linear_schedule_warms_up_then_falls_to_the_ratio() -> None:
    settings = {"num_training_steps": 8, "num_warmup_steps": 4, "final_lr_ratio": 0.2}
    rates = _rates(linear_schedule_with_warmup, 10, **settings)
    assert rates == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0, 1.6, 1.2, 0.8, 0.4, 0.4])


def test_linear_schedule_without_warmup_starts_at_the_full_rate_and_never_uses_zero() -> None:
    rates = _rates(linear_schedule_with_warmup, 5, num_training_steps=5)
    assert rates == pytest.approx([2.0, 1.6, 1.2, 0.8, 0.4])


def test_linear_schedule_takes_a_single_step() -> None:
    assert _rates(linear_schedule_with_warmup, 1, num_training_steps=1) == [2.0]


def test_constant_schedule_stays_after_warmup() -> None:
    rates = _rates(constant_schedule_with_warmup, 6, num_training_steps=4, num_warmup_steps=2)
    assert rates == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 2.0])


@pytest.mark.parametrize("schedule", [linear_schedule_with_warmup, constant_schedule_with_warmup])
@pytest.mark.parametrize("warmup", [-1, 5, 6])
def test_schedules_refuse_a_warmup_that_fills_the_run(schedule, warmup: int) -> None:
    with pytest.raises(ConfigError, match="num_warmup_steps.*fewer than total_steps .5."):
        _rates(schedule, 1, num_training_steps=5, num_warmup_steps=warmup)
