"""The teachers' LM heads as the student's side needs them: one slice ``[V / tp, D]`` a teacher, apart from the models.

``keep`` leaves them on the device; ``offload`` keeps a copy in CPU memory and moves it over once a rollout; ``evict``
keeps nothing and reads each from its checkpoint once a rollout.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchtune_grpo.config import ConfigError
from torchtune_grpo.models.weights import read_lm_head

Lifecycle = Literal["keep", "offload", "evict"]


class TeacherHeads:
    """Slices ``start:stop`` of the teachers' LM heads, by the teachers' numbers.

    Args:
        widths: hidden size of each teacher's payload; a head of another one is refused here, not at the first matmul.
        dtype: that of the payload, to which heads are cast, as the teachers themselves do.

    Raises:
        ConfigError: a head of another width or with fewer rows than ``stop``.
    """

    def __init__(
        self,
        checkpoints: Sequence[str],
        widths: Sequence[int],
        *,
        dtype: torch.dtype,
        start: int,
        stop: int,
        device: torch.device,
        lifecycle: Lifecycle,
    ) -> None:
        self._checkpoints, self._widths, self._dtype = checkpoints, widths, dtype
        self._start, self._stop, self._device, self._lifecycle = start, stop, device, lifecycle
        self._on_device: dict[int, Tensor] = {}
        self._on_cpu: dict[int, Tensor] = {}
        for number in range(len(self)):
            self.weight(number)
            self.release()

    def __len__(self) -> int:
        return len(self._checkpoints)

    def weight(self, number: int) -> Tensor:
        """The head of teacher ``number`` on the device, ``[stop - start, D]`` without gradient. No collective."""
        if number not in self._on_device:
            head = self._on_cpu.get(number)
            head = self._read(number) if head is None else head
            if self._lifecycle == "offload":
                self._on_cpu[number] = head
            self._on_device[number] = head.to(self._device)
        return self._on_device[number]

    def release(self) -> None:
        """Frees the device as ``lifecycle`` says; call it when an update has ended."""
        if self._lifecycle != "keep":
            self._on_device.clear()

    def _read(self, number: int) -> Tensor:
        head = read_lm_head(self._checkpoints[number], self._start, self._stop)
        expected = (self._stop - self._start, self._widths[number])
        if tuple(head.shape) != expected:
            raise ConfigError(
                f"teachers: got an LM head of shape {tuple(head.shape)} in {self._checkpoints[number]} (rows "
                f"{self._start} to {self._stop}), expected {expected}, as wide as that teacher's payload"
            )
        return head.to(self._dtype)
