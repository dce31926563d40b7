"""Penalties on length. Both are 0 or negative; their scale is their weight in ``RewardSum``."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchtune_grpo.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class LengthPenalty:
    """Minus the share of ``max_response_tokens`` that the completion used: 0 to -1, linear, no free part."""

    max_response_tokens: int

    def __post_init__(self) -> None:
        _check_limit(self.max_response_tokens)

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], *, response_lengths: Sequence[int]
    ) -> list[float | None]:
        return [-min(length / self.max_response_tokens, 1.0) for length in response_lengths]


@dataclass(frozen=True, kw_only=True)
class SoftOverlongPenalty:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13).

    With L_max = ``max_response_tokens`` and L_cache = ``buffer_tokens``: 0 up to L_max - L_cache tokens, then
    ``(L_max - L_cache - length) / L_cache``, and -1 from L_max on. Lengths count the stop token.
    """

    max_response_tokens: int
    buffer_tokens: int

    def __post_init__(self) -> None:
        _check_limit(self.max_response_tokens)
        if not 0 < self.buffer_tokens <= self.max_response_tokens:
            raise ConfigError(
                f"buffer_tokens: got {self.buffer_tokens}, "
                f"expected 1 to max_response_tokens = {self.max_response_tokens}"
            )

    def __call__(
        self, completions: Sequence[str], answers: Sequence[str], *, response_lengths: Sequence[int]
    ) -> list[float | None]:
        free = self.max_response_tokens - self.buffer_tokens
        return [-min(max(length - free, 0) / self.buffer_tokens, 1.0) for length in response_lengths]


def _check_limit(max_response_tokens: int) -> None:
    if max_response_tokens <= 0:
        raise ConfigError(f"max_response_tokens: got {max_response_tokens}, expected at least 1")
