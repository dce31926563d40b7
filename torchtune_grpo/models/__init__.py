"""Model builders beyond torchtune's, and weights in and out of Hugging Face folders."""

from torchtune_grpo.models.qwen3 import qwen3, qwen3_0_6b, qwen3_1_7b
from torchtune_grpo.models.tiny import tiny_llama

__all__ = ["qwen3", "qwen3_0_6b", "qwen3_1_7b", "tiny_llama"]
