"""Learning-rate schedules beyond torchtune's cosine."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from torchtune_grpo.config import ConfigError


def linear_schedule_with_warmup(
    optimizer: Optimizer, num_training_steps: int, num_warmup_steps: int = 0, final_lr_ratio: float = 0.0
) -> LambdaLR:
    """Linear from 0 to the optimizer's lr over ``num_warmup_steps``, then linear to ``final_lr_ratio`` of it.

    ``num_training_steps`` counts optimizer steps, those skipped for non-finite gradients included; step 0 already
    has lr / num_warmup_steps, so that no update is void.
    """
    if not 0 <= num_warmup_steps < num_training_steps:
        raise ConfigError(
            f"num_warmup_steps: got {num_warmup_steps}, expected fewer than total_steps ({num_training_steps})"
        )
    if final_lr_ratio < 0:
        raise ConfigError(f"final_lr_ratio: got {final_lr_ratio}, expected >= 0")

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return (step + 1) / num_warmup_steps
        progress = min(1.0, (step - num_warmup_steps) / (num_training_steps - num_warmup_steps))
        return 1.0 - (1.0 - final_lr_ratio) * progress

    return LambdaLR(optimizer, factor)


def constant_schedule_with_warmup(optimizer: Optimizer, num_training_steps: int, num_warmup_steps: int = 0) -> LambdaLR:
    """Linear from 0 over ``num_warmup_steps``, then the optimizer's lr."""
    return linear_schedule_with_warmup(optimizer, num_training_steps, num_warmup_steps, final_lr_ratio=1.0)
