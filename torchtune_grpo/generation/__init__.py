"""Sampling completions: one implementation for every device and world size."""

from torchtune_grpo.generation.generate import Generate

__all__ = ["Generate"]
