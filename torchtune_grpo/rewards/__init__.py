"""Judges of completions and what they are made of.

Only ``RewardSum`` needs torch; it is imported when it is asked for, so that grading files starts at once.
"""

from typing import TYPE_CHECKING, Any

from torchtune_grpo.rewards.answers import answers_match, canonical_answer, is_gradable
from torchtune_grpo.rewards.components import CallableReward, ExactAnswerReward, FormatReward
from torchtune_grpo.rewards.length import LengthPenalty, SoftOverlongPenalty
from torchtune_grpo.rewards.xml import ParsedCompletion, parse_completion

if TYPE_CHECKING:
    from torchtune_grpo.rewards.combine import RewardSum

__all__ = [
    "CallableReward",
    "ExactAnswerReward",
    "FormatReward",
    "LengthPenalty",
    "ParsedCompletion",
    "RewardSum",
    "SoftOverlongPenalty",
    "answers_match",
    "canonical_answer",
    "is_gradable",
    "parse_completion",
]


def __getattr__(name: str) -> Any:
    if name == "RewardSum":
        from torchtune_grpo.rewards.combine import RewardSum

        return RewardSum
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
