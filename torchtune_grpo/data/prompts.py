"""The one place where prompts and completions are put into words, for SFT, RL and evaluation alike."""

from dataclasses import dataclass

from torchtune_grpo.config import ConfigError
from torchtune_grpo.data.tokenizer import Tokenizer

R1_TEMPLATE = (
    "This is a conversation between User and Assistant. User asks a question. Assistant first thinks "
    "the problem through, step by step, and then gives User the final answer. The thinking stands between "
    "<think> and </think>, and the answer alone between <answer> and </answer>, like this: "
    "<think> the thinking </think> <answer> the answer </answer>. User: {question} Assistant: <think>"
)
"""In the manner of DeepSeek-R1-Zero's prompt (arXiv:2501.12948, table 1); the think tag is prefilled."""

_PLACE = "{question}"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A question in its template; the policy goes on after the ``<think>`` that ends every prompt.

    ``template`` is taken literally but for one ``{question}``, so other braces in it, and any in the
    question, stay as they are.

    Raises:
        ConfigError: the template has not exactly one ``{question}`` or does not end in ``<think>``.
    """

    template: str = R1_TEMPLATE

    def __post_init__(self) -> None:
        if self.template.count(_PLACE) != 1:
            raise ConfigError(f"`prompt.template` has {_PLACE} {self.template.count(_PLACE)} times; expected it once")
        if not self.template.endswith("<think>"):
            raise ConfigError(f"`prompt.template` ends in {self.template[-20:]!r}; expected it to end in '<think>'")

    def text(self, question: str) -> str:
        """The prompt as text."""
        before, after = self.template.split(_PLACE)
        return before + question + after

    def encode(self, tokenizer: Tokenizer, question: str) -> list[int]:
        """The prompt's ids, with one begin token iff the tokenizer adds one."""
        return tokenizer.encode_prompt(self.text(question))


def completion_text(reasoning: str, answer: str) -> str:
    """What a policy should write after the prefilled ``<think>``, end token aside."""
    return f" {reasoning} </think> <answer> {answer} </answer>"
