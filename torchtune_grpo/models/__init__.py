"""Model builders beyond torchtune's, and weights in and out of Hugging Face folders."""

from torchtune_grpo.models.tiny import tiny_llama

__all__ = ["tiny_llama"]
