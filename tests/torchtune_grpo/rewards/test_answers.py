import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtune_grpo.rewards import answers
from torchtune_grpo.rewards.answers import MAX_ANSWER_CHARS, answers_match, canonical_answer, is_gradable

ALPHABET = st.sampled_from(list("0123456789.,+-*/^_{}()[]\\$%= xyeπ½²–\u200b\x00") + [r"\frac", r"\text{", "or"])


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("18.0", "18"),
        (r"$\boxed 2$", "2"),
        (r"\[\boxed{73}\]", "73"),
        ("```\n42\n```", "42"),
        ("**42**", "42"),
        ("#### 24", "24"),
        ("<<48/2=24>>24", "24"),
        ("x = 5", "5"),
        ("5", "x=5"),
        ("5 = x", "5"),
        ("6*7 = 42", "42"),
        ("neither", r"\text{neither}"),
        ("Evelyn", "evelyn"),
        (r"\text{(C)}", "C"),
        ("C)", "(C)"),
        ("66_{8}", "66_8"),
        ("5!", "120"),
        ("2pi", r"2\pi"),
        ("2sqrt(3)", r"2\sqrt3"),
        ("√3", r"\sqrt{3}"),
        (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"),
        (r"0.75x", r"\frac{3}{4}x"),
        ("x**2 + 2*x + 1", "(x+1)^2"),
        ("y = 2x + 3", "2x+3"),
        (r"y=-\frac{1}{2}x+\frac{3}{4}", "2x+4y-3=0"),
        ("3 < x", "x > 3"),
        ("3, 2", "2, 3"),
        ("2 and 3", "2, 3"),
        (r"\{2,1\}", "1, 2"),
        (r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}"),
        (r"\left(0.5, 1\right)", r"(\frac{1}{2},1)"),
        (r"x \in [2,5]", "[2,5]"),
        ("(-∞,3)∪(3,∞)", r"(-\infty,3)\cup(3,\infty)"),
        (r"\begin{pmatrix} -\frac{1}{3} \\ 2 \end{pmatrix}", r"\begin{bmatrix} -1/3 \\ 2 \end{bmatrix}"),
        (r"10\pi \text{ cm}^2", r"10\pi"),
    ],
)
def test_answers_match_pays_equal_answers(answer, gold):
    assert answers_match(answer, gold) is True


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (None, "18"),
        ("120", "20"),
        ("20", "120"),
        ("18.5", "18"),
        ("1 8", "18"),
        ("4\x002", "42"),
        ("0.333333", r"\frac{1}{3}"),
        ("3.14159265358979", r"\pi"),
        ("50%", "0.5"),
        ("11/2", r"1\frac{1}{2}"),
        ("dog", r"\text{god}"),
        ("on", "no"),
        ("B", "A"),
        ("y=5", "x=5"),
        ("x=x+1", "x=x+2"),
        ("3x+y=0", "0"),
        ("3x+4y+14=0", "3x-y+13=0"),
        (r"x \ge 3", "x>3"),
        ("2, 3", "2"),
        ("2", "2, 3"),
        ("8 or 9", "8"),
        (r"1+\sqrt{19}", r"1 \pm \sqrt{19}"),
        ("(2,1)", "(1,2)"),
        ("1, 2", "(1,2)"),
        ("[1,2]", "(1,2)"),
        (r"\{1,2\}", "(1,2)"),
        (r"\frac{\pi}{2^{98}}", r"\frac{\pi}{2^{99}}"),
        (r"\frac{\pi}{2^{998}}", r"\frac{\pi}{2^{999}}"),
        ("(0.3333333, 1)", r"(\frac{1}{3},1)"),
        (r"(\frac{1}{2^{98}},1)", r"(\frac{1}{2^{99}},1)"),
        ("2^{64}+1", "2^{64}"),
        (r"41} \boxed{42", "42"),
        (r"\boxed{41} \boxed{42}", "42"),
        (r"4\sqrt(2)", "4"),
        ("nan", "5"),
        ("().__class__.__mro__", "0"),
        ("1" * (MAX_ANSWER_CHARS + 1), "1"),
    ],
)
def test_answers_match_does_not_pay_other_answers(answer, gold):
    assert answers_match(answer, gold) is False


@pytest.mark.parametrize("gold", ["", "  ", "$$", "???", r"\boxed{}", r"\frac{", "1}", "}1{", "5\\", "1" * 1001])
def test_gold_that_cannot_be_judged_is_never_paid(gold):
    assert not is_gradable(gold)
    assert answers_match(gold, gold) is None
    assert answers_match("1", gold) is None


def test_answers_match_cannot_judge_a_gold_that_is_no_mathematics():
    assert answers_match("5", r"\sqrt 3 & \\ 4 \int") is None


def test_answers_match_bounds_the_comparison():
    assert answers_match(r"9^{9^{9}}", "9", timeout_s=0.3) is not True


def test_canonical_answer_is_shared_by_equal_answers():
    same = ["18", "18.0", "$18", "18 dollars", "x = 18", "18 = x", r"\frac{36}{2}", "2*9 = 18", " 18. "]
    assert {canonical_answer(text) for text in same} == {"18"}
    assert canonical_answer("Neither") == canonical_answer(r"\text{neither}")
    assert canonical_answer("x^2  + 1") == canonical_answer("x^2+1") == "x^2+1"
    assert len({canonical_answer(text) for text in ("18", "-18", "1 8", "18, 19", "1/8", "", "x")}) == 7


def test_canonical_answer_keeps_an_overlong_text():
    assert canonical_answer("9" * 5000) == "9" * 5000


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(ALPHABET, max_size=30).map("".join), st.lists(ALPHABET, max_size=30).map("".join))
def test_any_text_has_a_canonical_answer_and_a_gradability(left, right):
    assert canonical_answer(left) == canonical_answer(left)
    assert is_gradable(left) in (True, False)
    if is_gradable(left):
        assert answers_match(left, left) is True


@pytest.mark.parametrize("answer", ["18 factorial", "18 hundredths", "18 below zero", "all but 18", "18 fewer"])
def test_number_with_a_word_that_changes_its_value_is_not_the_number(answer):
    assert answers_match(answer, "18") is False


def test_answer_that_is_no_latex_is_not_sent_to_the_judge(monkeypatch):
    monkeypatch.setattr(answers, "compare_math", lambda *_: pytest.fail("asked the judge"))
    assert answers_match("{" * 100, "x^2") is False
