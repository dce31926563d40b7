"""Left-padded rows shifted so that each starts at position 0.

Sampling wants prompts to end together (left padding); a causal forward wants rows to start together, since then
padding comes last, no real token can see it, and attention needs no mask at all.
"""

import torch
from torch import Tensor


def shift_left(tokens: Tensor, padding: Tensor) -> Tensor:
    """``tokens [n, s]`` with ``padding [n]`` pad tokens before each row -> the same rows without them, ``[n, s]``.

    What follows a row's last token is a repetition of it: unseen under causal attention.
    """
    index = torch.arange(tokens.shape[1], device=tokens.device) + padding[:, None]
    return tokens.gather(1, index.clamp(max=tokens.shape[1] - 1))


def key_mask(width: int, lengths: Tensor) -> Tensor:
    """``[n, width]`` bool, True for the first ``lengths[n]`` positions."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]
