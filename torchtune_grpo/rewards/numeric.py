"""Reads an answer as one exact rational number: the fast path that settles most answers without sympy.

All arithmetic is on ``Fraction``, never on floats: 0.333333 is not 1/3, and 1/2^98 is not 1/2^99. No number
of more than ``MAX_DIGITS`` digits is built, whatever the text asks for.
"""

import re
import string
from fractions import Fraction

MAX_DIGITS = 1000

_SIGN = r"[-+]?"
_EXPONENT = r"[-+]?[0-9]{1,4}(?![0-9])"
_GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+(?![0-9/])"
_DECIMAL = rf"(?:(?:{_GROUPED}|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
_TIMES_TEN = r" ?(?:\\times|\\cdot|\*) ?10\^"
_PART = rf"{_SIGN} ?(?:[0-9]+\^{_EXPONENT}|{_DECIMAL}(?:(?:[eE]|{_TIMES_TEN}){_EXPONENT})?)"
_MIXED = r"(?P<whole>[0-9]+) (?P<over>[0-9]+)/(?P<under>[0-9]+)"
_RATIO = rf"(?P<numerator>{_PART})(?: ?/ ?(?P<denominator>{_PART}))?"

_SENTENCE = re.compile(
    rf"(?P<before>(?:[A-Za-z']+[,:]? )*)(?P<sign>{_SIGN}) ?(?:{_MIXED}|{_RATIO})(?P<after>(?:[^0-9].*)?)"
)
_SPLIT_PART = re.compile(
    rf"(?P<sign>{_SIGN}) ?(?:(?P<base>[0-9]+)\^(?P<power>{_EXPONENT})"
    rf"|(?P<decimal>{_DECIMAL})(?:(?:[eE]|{_TIMES_TEN})(?P<tens>{_EXPONENT}))?)"
)
_BRACED_EXPONENT = re.compile(r"\^ ?\{ ?([-+]?[0-9]+) ?\}")
_LATEX_FRACTION = re.compile(r"\\frac ?(?:\{([^{}]*)\}|([0-9])) ?(?:\{([^{}]*)\}|([0-9]))")

_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
UNITS = frozenset(
    "percent degrees cents cm mm km kg mg ml mL ft in yd mi lb lbs oz hr hrs min mins sec secs ms mph kmh kph"
    " am pm st nd rd th sq cu".split()
)
_LETTER_UNITS = frozenset("mgslhL")  # where any other letter is a variable
_LETTERS = frozenset(string.ascii_letters)
_SHORT_WORDS = frozenset("of in is at to by on an it he we us so".split())
_NOT_PROSE = frozenset(  # words that change the value, deny it, or offer another
    "or not no never nor isn't than least most about approximately nearly over under between negative minus"
    " plus times half double twice squared cubed dozen point mod root sqrt pi exp log ln sin cos tan sec csc"
    " cot inf infinity infty frac cdot if unless except factorial tenths hundredths thousandths thirds quarters fifths"
    " below but fewer less more maybe perhaps".split()
)
_TEXT_COMMAND = re.compile(r"\\text ?\{([^{}]*)\}")
_UNIT_EXPONENT = re.compile(r"(?<=[A-Za-z }])\^ ?(?:[0-9]|\{[0-9]\})")
_WORDS = re.compile(r"[A-Za-z']+")


def parse_number(text: str) -> Fraction | None:
    """The value of a normalised text that holds exactly one number, None where it is anything else.

    Understood: signs, commas, decimals, ``a/b``, ``\\frac{a}{b}``, mixed numbers, ``2^{31}``, ``1.5e3``,
    ``3 \\times 10^4``, "2.5 million". A unit or plain words may stand around it and carry no value: "10 cm"
    is 10, and so is "10 m"; 50% is 50, never 0.5. Two numbers are no number, so listing guesses does not pay.
    """
    text = _BRACED_EXPONENT.sub(r"^\1", text)
    text = _LATEX_FRACTION.sub(lambda m: f" {m[1] or m[2]}/{m[3] or m[4]}", text).strip()
    match = _SENTENCE.fullmatch(text)
    if not match or not _is_prose(match["before"]):
        return None
    scale = _scale_of_words(match["after"])
    if scale is None:
        return None
    try:
        value = _mixed(match) if match["whole"] else _ratio(match)
    except ZeroDivisionError:
        return None
    if value is None:
        return None
    return -value * scale if match["sign"] == "-" else value * scale


def _ratio(match: re.Match[str]) -> Fraction | None:
    numerator, denominator = _part(match["numerator"]), _part(match["denominator"] or "1")
    return None if numerator is None or denominator is None else numerator / denominator


def _mixed(match: re.Match[str]) -> Fraction | None:
    whole, over, under = (int(match[name]) for name in ("whole", "over", "under"))
    return whole + Fraction(over, under) if over < under else None


def _part(text: str) -> Fraction | None:
    """An integer power, or a decimal with an optional power of ten."""
    match = _SPLIT_PART.fullmatch(text)
    sign = -1 if match["sign"] == "-" else 1
    if match["base"]:
        base, power = match["base"], int(match["power"])
        return sign * Fraction(int(base)) ** power if len(base) * abs(power) <= MAX_DIGITS else None
    tens = int(match["tens"] or 0)
    digits = re.sub("[, ]", "", match["decimal"])
    if len(digits) + abs(tens) > MAX_DIGITS:
        return None
    return sign * Fraction(f"0{digits}".rstrip(".")) * Fraction(10) ** tens


def _is_prose(text: str) -> bool:
    return all(_may_surround(word) for word in _WORDS.findall(text))


def _scale_of_words(after: str) -> int | None:
    """What the text behind a number multiplies it by: 1 for units and prose, None where it is neither."""
    spelled = _TEXT_COMMAND.sub(r" \1 ", _UNIT_EXPONENT.sub("", after))
    words = _WORDS.findall(spelled)
    if not words:
        return None if after.strip() else 1
    if _WORDS.sub("", spelled).strip(" /.,-()") or (after[0].isalpha() and words[0] not in UNITS):
        return None
    letters = _LETTERS if "\\text" in after else _LETTER_UNITS
    if not all(word in letters or _may_surround(word) for word in words):
        return None
    return 10 ** _SCALES.get(words[0], 0)


def _may_surround(word: str) -> bool:
    if word in UNITS or word.lower() in _SHORT_WORDS:
        return True
    return len(word) >= 3 and word.lower() not in _NOT_PROSE
