"""One optimizer step, which a gradient that is not finite never takes."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchtune.modules import TransformerDecoder

from torchtune_grpo.collectives import rank
from torchtune_grpo.failures import RunError


class OptimizerStep:
    """Clips and steps. Where the gradient's norm is not finite, the update is skipped and the parameters stay.

    ``max_skipped`` such updates in a row end the run; the batch of the last one is then kept in ``folder``. A loss that
    is not finite counts by its gradient, the only part of it that reaches the parameters.
    """

    def __init__(
        self,
        model: TransformerDecoder,
        optimizer: Optimizer,
        scheduler: Any,
        clip_grad_norm: float | None,
        *,
        max_skipped: int,
        folder: str | Path,
    ) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._clip = float("inf") if clip_grad_norm is None else clip_grad_norm
        self._max_skipped, self._folder = max_skipped, Path(folder)
        self.skipped_in_a_row = 0

    def __call__(self, batch: Any, step: int) -> dict[str, float]:
        """``grad_norm`` before clipping, ``lr`` used, ``skipped_updates`` 0 or 1; the same on every rank.

        ``batch``: the dataclass that the gradient came from; ``step``: the number of this update, from 1.
        Collective: the all-reduce of the global norm.

        Raises:
            RunError: the ``max_skipped``-th skipped update in a row, on every rank.
        """
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        lr = float(self._optimizer.param_groups[0]["lr"])
        finite = bool(torch.isfinite(torch.tensor(norm)))
        if finite:
            self._optimizer.step()
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        if self.skipped_in_a_row >= self._max_skipped:
            raise RunError(
                f"step {step}: update number {self.skipped_in_a_row} in a row with a gradient that is not finite (norm "
                f"{norm}; all were skipped, max_skipped_updates ends the run); start another run from an "
                f"earlier checkpoint (weights, output_dir) with a lower optimizer.lr; {self._keep(batch, step)}"
            )
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()
        return {"grad_norm": norm, "lr": lr, "skipped_updates": float(not finite)}

    def _keep(self, batch: Any, step: int) -> str:
        """Writes this rank's batch, readable with ``torch.load(path, weights_only=True)``; says where."""
        path = self._folder / f"nonfinite_step_{step}_rank_{rank()}.pt"
        try:
            torch.save(_plain(batch), path)
        except (OSError, RuntimeError) as error:  # torch's own writer raises the latter on a full disk
            return f"the batch could not be written to {path}: {error}"
        return f"the batch is in {path}, one file a rank"


def _plain(batch: Any) -> dict[str, Any]:
    """Tensors (on CPU), counts and lists of texts of a dataclass, by field; dataclasses in it likewise.

    What a teacher handed over for each token is left out: it follows from the tokens and is many times larger.
    """
    values: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if is_dataclass(value):
            values[field.name] = _plain(value)
        elif isinstance(value, Tensor):
            values[field.name] = value.detach().cpu()
        elif isinstance(value, int | float | str) or (
            isinstance(value, list) and all(isinstance(x, str) for x in value)
        ):
            values[field.name] = value
    return values
