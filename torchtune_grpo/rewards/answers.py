"""Whether an answer equals the gold answer: exact numbers first, then text, then math-verify in a killable
worker."""

import re

from torchtune_grpo.rewards.judge import compare_math
from torchtune_grpo.rewards.normalize import is_balanced, normalize
from torchtune_grpo.rewards.numeric import UNITS, parse_number

MAX_ANSWER_CHARS = 1000

_FUNCTIONS = "arcsin arccos arctan sinh cosh tanh sin cos tan sec csc cot log ln exp sqrt pi theta infty infinity inf"
_WORDS = re.compile(r"[A-Za-z][A-Za-z' -]*[A-Za-z]")
_LETTER = re.compile(r"([A-Za-z])[).:]")
_NAME = re.compile(r" ?(?:[A-Za-z][A-Za-z ]*(?:_[A-Za-z0-9])?(?:\([A-Za-z]\))?|\\[a-z]+) ?")
_ARITHMETIC = re.compile(r"(?:[-0-9+*/().,^ ]|\\times|\\cdot|\\frac|[{}])*")
_EQUALS = re.compile(r"(?<![<>!:\\])=|\\in(?![a-z])")  # x = 5, and x \in [2, 5]
_LOOSE_SPACE = re.compile(r" (?=[^\w ])|(?<=[^\w ]) ")

_ASCII_MATH = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\*\*", "^"),
        (r"\\?(?<![A-Za-z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])sqrt ?([0-9]+)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])(?:infinity|inf)(?![A-Za-z])", r"\\infty "),
        (rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS.split())})(?![A-Za-z])", r"\\\1 "),
    )
)
_DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")
_TRAILING_UNIT = re.compile(
    rf"(?<=[^ ]) ?(?:\\text ?\{{(?! ?(?:and|or)\b)[^{{}}]*\}}|(?<=[ 0-9}}])(?:{'|'.join(sorted(UNITS))}))"
    r"(?:\^\{?[0-9]\}?)?"
)


def is_gradable(gold: str) -> bool:
    """Whether answers can be held against this gold answer; cheap and bounded, for use while a data set
    loads.

    False for one that is blank, longer than ``MAX_ANSWER_CHARS``, without any letter or digit, or broken
    LaTeX.
    """
    if len(gold) > MAX_ANSWER_CHARS:
        return False
    text = normalize(gold)
    return any(char.isalnum() for char in text) and is_balanced(text)


def answers_match(answer: str | None, gold: str, timeout_s: float = 1.0) -> bool | None:
    """Whether ``answer`` says the same as ``gold``; None where the gold answer cannot be judged.

    Two numbers are compared exactly, two texts without regard to case, all else as mathematics for at most
    ``timeout_s`` seconds. An answer that is missing, over-long, malformed or too slow to judge is False.
    """
    if not is_gradable(gold):
        return None
    if answer is None or len(answer) > MAX_ANSWER_CHARS:
        return False
    answer, gold = normalize(answer), normalize(gold)
    if bool(_EQUALS.search(answer)) != bool(_EQUALS.search(gold)):
        answer, gold = _right_hand_side(answer), _right_hand_side(gold)
    values = parse_number(answer), parse_number(gold)
    if None not in values:
        return values[0] == values[1]
    if _text_key(answer) == _text_key(gold):
        return True
    if not _may_be_equal(answer, gold):
        return False
    return compare_math(_to_latex(answer), _to_latex(gold), timeout_s)


def canonical_answer(text: str) -> str:
    """A key that equal answers share, for majority votes: 18, 18.0, $18 and x = 18 have the same one.

    Numbers are told apart by value, all else by its text; what is over-long is its own key.
    """
    if len(text) > MAX_ANSWER_CHARS:
        return text
    plain = _right_hand_side(normalize(text))
    value = parse_number(plain)
    return _text_key(plain) if value is None else str(value)


def _right_hand_side(text: str) -> str:
    """``18`` of ``x = 18``, ``18 = x`` and ``2*9 = 18``; the text itself where a left side is a true
    expression."""
    *left, right = _EQUALS.split(text)
    if len(left) == 1 and _NAME.fullmatch(right) and not _NAME.fullmatch(left[0]):
        left, right = [right], left[0]
    if all(_NAME.fullmatch(side) or _ARITHMETIC.fullmatch(side) for side in left):
        return right.strip()
    return text


def _text_key(text: str) -> str:
    if letter := _LETTER.fullmatch(text):  # the choice "C)"
        return letter[1]
    return _LOOSE_SPACE.sub("", text.casefold() if _is_words(text) else text)


def _is_words(text: str) -> bool:
    """Plain words rather than mathematics, where letters are factors and dog = god."""
    return bool(_WORDS.fullmatch(text)) and not set(text.split()) & set(_FUNCTIONS.split())


def _may_be_equal(answer: str, gold: str) -> bool:
    """What the texts alone can rule out before sympy is asked."""
    if _is_words(answer) or _is_words(gold) or not is_balanced(answer):
        return False
    if bool(_EQUALS.search(answer)) != bool(_EQUALS.search(gold)):
        return False  # else the right side of 3x + y = 0 would be paid for 0
    both_listed = "," in answer and "," in gold
    return not both_listed or _brackets(answer) == _brackets(gold)


def _brackets(text: str) -> tuple[str, str]:
    """The brackets that make a list a tuple or an interval; sets and bare lists have none."""
    return text[0] if text[0] in "([" else "", text[-1] if text[-1] in ")]" else ""


def _to_latex(text: str) -> str:
    """LaTeX for the parser: ASCII names as commands, no trailing unit, decimals as exact fractions."""
    for pattern, replacement in _ASCII_MATH:
        text = pattern.sub(replacement, text)
    if (unit := _TRAILING_UNIT.search(text)) and unit.end() == len(text):
        text = text[: unit.start()]
    return _DECIMAL.sub(lambda m: rf"{{\frac{{{int((m[1] + m[2]) or 0)}}}{{1{'0' * len(m[2])}}}}}", text)
