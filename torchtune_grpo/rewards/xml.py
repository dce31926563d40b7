"""The completion's format: ``<think> reasoning </think> <answer> 18 </answer>``, as in the R1 template.

Everything here is counting and slicing, linear in the text: a completion of any size or shape is safe to
parse.
"""

from dataclasses import dataclass

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
TAGS = (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE)


@dataclass(frozen=True, kw_only=True)
class ParsedCompletion:
    """``well_formed``: the format contract holds. ``answer``: the stripped final answer, None where there is
    none."""

    well_formed: bool
    answer: str | None


def parse_completion(text: str, prefilled_think: bool = True) -> ParsedCompletion:
    """Check the format contract and take out the answer; the two are independent of each other.

    The contract: exactly one of each tag (tags are case-sensitive, and one that is only mentioned counts),
    the thinking before the answer, nothing but white space outside the two blocks, and an answer that is not
    blank.

    Args:
        text: the completion, without its prompt.
        prefilled_think: True where the prompt already ended in ``<think>``, so that ``text`` starts inside
        it.
    """
    if prefilled_think:
        text = THINK_OPEN + text
    answer = _final_answer(text)
    return ParsedCompletion(well_formed=answer is not None and _follows_contract(text), answer=answer)


def _follows_contract(text: str) -> bool:
    if any(text.count(tag) != 1 for tag in TAGS):
        return False
    before, _, rest = text.partition(THINK_OPEN)
    _, closed_think, rest = rest.partition(THINK_CLOSE)
    between, opened_answer, rest = rest.partition(ANSWER_OPEN)
    _, closed_answer, after = rest.partition(ANSWER_CLOSE)
    in_order = bool(closed_think and opened_answer and closed_answer)
    return in_order and not (before.strip() or between.strip() or after.strip())


def _final_answer(text: str) -> str | None:
    """What stands in ``<answer>`` after ``</think>``.

    Several blocks that disagree, a block left open and a blank block are no answer: listing values must not
    pay.
    """
    _, _, tail = text.partition(THINK_CLOSE)
    answers = set()
    for block in tail.split(ANSWER_OPEN)[1:]:
        content, closed, _ = block.partition(ANSWER_CLOSE)
        if not closed:
            return None
        answers.add(content.strip())
    if len(answers) != 1:
        return None
    return answers.pop() or None
