from fractions import Fraction

import pytest

from torchtune_grpo.rewards.normalize import normalize
from torchtune_grpo.rewards.numeric import MAX_DIGITS, parse_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18),
        ("18.", 18),
        ("18.0", 18),
        (".5", Fraction(1, 2)),
        ("+7", 7),
        ("- 7", -7),
        ("\u22127", -7),
        ("(-7)", -7),
        ("033", 33),
        ("2,125.50", Fraction(4251, 2)),
        ("109,200,000", 109_200_000),
        ("10{,}080", 10_080),
        (r"10\,080", 10_080),
        ("10 080", 10_080),
        ("$18.00", 18),
        (r"\$18", 18),
        ("-$18", -18),
        ("€18", 18),
        ("50%", 50),
        (r"50\%", 50),
        ("90^\\circ", 90),
        ("90°", 90),
        ("1/2", Fraction(1, 2)),
        ("12/4", 3),
        (r"-\frac{1}{2}", Fraction(-1, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        (r"\dfrac12", Fraction(1, 2)),
        ("-2 1/2", Fraction(-5, 2)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        ("3½", Fraction(7, 2)),
        ("2^{31}", 2**31),
        ("-2^2", -4),
        (r"\frac{1}{2^{98}}", Fraction(1, 2**98)),
        ("2^{-98}", Fraction(1, 2**98)),
        ("1.5e3", 1500),
        (r"3\times 10^{4}", 30_000),
        (r"3 \cdot 10^{-1}", Fraction(3, 10)),
        ("2.5 million", 2_500_000),
        ("10 cm", 10),
        ("10cm²", 10),
        (r"864 \mbox{ inches}^2", 864),
        (r"9.8\text{ m/s}^2", Fraction(49, 5)),
        ("18 dollars per day", 18),
        ("She makes $18 a", None),  # "a" may be a variable
        ("The answer is 18.", 18),
        ("\u200b４２", 42),
    ],
)
def test_parse_number_reads_the_exact_value(text, value):
    assert parse_number(normalize(text)) == value


@pytest.mark.parametrize(
    "text",
    ["", "-", "x", "nan", "inf", "1/0", r"\frac{0}{0}", "0^{-1}", "4 10/3", "1,23", "2, 3", "8 or 9", "18 19"]
    + ["not 18", "less than 18", "5 pi", "18x", "18 x", "x - 18", "10m", "10xy", "2 dozen", "2/3/4", "1.2.3"]
    + ["12:30", "5!", "66_8", "5-3", "(1,2)", "0x2A", "1_000", "٤٢", r"18 \text{ or more}", "10^{10^{10}}"],
)
def test_parse_number_refuses_what_is_not_exactly_one_number(text):
    assert parse_number(normalize(text)) is None


@pytest.mark.parametrize("text", ["9" * (MAX_DIGITS + 1), "1e9999", "10^9999", "2^-9999", "10^10000000", "1e-1000"])
def test_parse_number_builds_no_huge_number(text):
    assert parse_number(text) is None


def test_parse_number_tells_neighbours_apart_where_floats_cannot():
    assert parse_number("99999999999999999999") != parse_number("100000000000000000000")
    assert parse_number(r"0.1") == Fraction(1, 10)
