"""Brings a short answer to one plain spelling: no wrappers, no look-alike characters, one name for each
command.

Nothing is evaluated. Callers bound the length first; every pattern here is linear in it.
"""

import re
import unicodedata

_SYMBOLS = {
    **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63", "-"),
    **dict.fromkeys("\u2018\u2019", "'"),
    **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "∕": "/", "±": r"\pm "},
    **{"≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "},
    **{"∅": r"\emptyset ", "√": r"\sqrt ", "°": r"^\circ ", "π": r"\pi ", "θ": r"\theta ", "φ": r"\phi "},
    **{"α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "λ": r"\lambda ", "μ": r"\mu ", "ω": r"\omega "},
}
_SCRIPTS = re.compile("([⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)|([₀₁₂₃₄₅₆₇₈₉]+)")

_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"<<[^<>]*>>", ""),  # GSM8K's calculator annotations
        (r"\{,\}", ","),
        (r"(?<=[0-9])\\[,!;:](?=[0-9]{3})", ""),  # thin spaces between groups of thousands
        (r"\\(?:left|right)(?![a-zA-Z])\.?", ""),
        (r"(?<!\\)\\[!,;: ]|~|\\(?:quad|qquad|displaystyle)(?![a-zA-Z])", " "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:mbox|textrm|textbf|textit|textnormal|texttt|mathrm)(?=\s*\{)", r"\\text"),
        (r"\\(leq|geq|neq)(?![a-zA-Z])", lambda match: "\\" + match[1][:2]),
        (r"\\?[$€£¥₹₩₽¢]", " "),  # currency; a dollar may as well delimit math
        (r"\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?|\\degrees?(?![a-zA-Z])", " degrees"),
        (r"\\?%", " percent"),
        (r"_\{([0-9a-zA-Z])\}", r"_\1"),
    )
)

_LEAD_IN = re.compile(
    r"#+|=|(?:so|thus|hence|therefore)\b,?"
    r"|(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?(?:answer|result|solution)\b\s*(?:is\b|=)?\s*:?",
    re.IGNORECASE,
)
_FENCE = re.compile(r"```(?:[a-z]+\s)?(.*)```")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)\s*([^\s{}]+)")
_BRACED = ((r"\boxed", "{", "}"), (r"\fbox", "{", "}"), (r"\text", "{", "}"), ("", "{", "}"), ("", "(", ")"))
_PAIRS = ((r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))
_MAX_WRAPPERS = 10


def normalize(text: str) -> str:
    """One spelling for the answers that a reader would call the same; white space collapsed, case kept."""
    text = "".join(_plain_character(char) for char in text)
    text = _SCRIPTS.sub(_script, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = " ".join(text.split())
    for _ in range(_MAX_WRAPPERS):
        text = _unwrap_once(text)
    return text


def is_balanced(text: str) -> bool:
    r"""Whether every brace closes and no backslash dangles; ``\{`` and ``\}`` are characters, not braces."""
    bare = re.sub(r"\\.", "", text, flags=re.DOTALL)
    depth = 0
    for char in bare:
        depth += (char == "{") - (char == "}")
        if depth < 0:
            return False
    return depth == 0 and not bare.endswith("\\")


def _plain_character(char: str) -> str:
    if char.isascii() and char.isprintable():
        return char
    if "\uff01" <= char <= "\uff5e":  # full-width forms of ASCII
        return chr(ord(char) - 0xFEE0)
    if char in _SYMBOLS:
        return _SYMBOLS[char]
    category = unicodedata.category(char)
    if category == "Cf":  # zero-width and direction marks
        return ""
    if category in ("Cc", "Zs", "Zl", "Zp"):
        return "\n" if char == "\n" else " "
    return _vulgar_fraction(char)


def _vulgar_fraction(char: str) -> str:
    kind, _, parts = unicodedata.decomposition(char).partition(" ")
    digits = "".join(chr(int(part, 16)) for part in parts.split()) if kind == "<fraction>" else ""
    numerator, _, denominator = digits.partition("\u2044")
    return rf"\frac{{{numerator}}}{{{denominator}}}" if denominator else char


def _script(match: re.Match[str]) -> str:
    sign = "^" if match[1] else "_"
    return f"{sign}{{{unicodedata.normalize('NFKC', match[0]).replace(chr(0x2212), '-')}}}"


def _unwrap_once(text: str) -> str:
    """Remove one layer of what may stand around an answer without changing it."""
    if match := _FENCE.fullmatch(text) or _BARE_BOX.fullmatch(text):
        return match[1].strip()
    for opening, closing in _PAIRS:
        inner = text[len(opening) : -len(closing)]
        if inner and text == opening + inner + closing and closing not in inner:
            return inner.strip()
    for command, opening, closing in _BRACED:
        if text.startswith(command + opening) and _closes_at_end(text[len(command) :], opening, closing):
            inner = text[len(command) + 1 : -1]
            if opening == "{" or not re.search("[,;]", inner):  # (1, 2) is a pair or an interval
                return inner.strip()
    if (lead := _LEAD_IN.match(text)) and lead.end() < len(text):
        return text[lead.end() :].strip()
    return text[:-1].rstrip() if text.endswith(".") and len(text) > 1 else text


def _closes_at_end(text: str, opening: str, closing: str) -> bool:
    """Whether the bracket that opens ``text`` closes at its last character and not before."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char == opening) - (char == closing)
        if depth == 0:
            return i == len(text) - 1
    return False
