"""The global random generators of a process, as plain values that ``torch.load`` takes with ``weights_only``."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Python's, NumPy's and torch's global generators, the current CUDA device's included."""
    name, keys, *rest = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})


def set_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
