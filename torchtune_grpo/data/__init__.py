"""Data: tokenizer, prompts, data sets and loaders."""

from torchtune_grpo.data.dataset import Dataset, Example, mixed_dataset, overlap
from torchtune_grpo.data.gsm8k import gsm8k_dataset
from torchtune_grpo.data.loader import EvalLoader, PromptLoader, SFTBatch, SFTLoader, left_pad
from torchtune_grpo.data.math import math_dataset
from torchtune_grpo.data.prompts import R1_TEMPLATE, Prompt, completion_text
from torchtune_grpo.data.tiny import TINY_TEMPLATE, tiny_dataset, tiny_tokenizer
from torchtune_grpo.data.tokenizer import Tokenizer

__all__ = [
    "R1_TEMPLATE",
    "TINY_TEMPLATE",
    "Dataset",
    "EvalLoader",
    "Example",
    "Prompt",
    "PromptLoader",
    "SFTBatch",
    "SFTLoader",
    "Tokenizer",
    "completion_text",
    "gsm8k_dataset",
    "left_pad",
    "math_dataset",
    "mixed_dataset",
    "overlap",
    "tiny_dataset",
    "tiny_tokenizer",
]
