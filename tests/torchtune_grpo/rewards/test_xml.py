import pytest

from torchtune_grpo.rewards.xml import parse_completion

GOOD = "2*9=18. </think> <answer> 18 </answer>"


@pytest.mark.parametrize(
    ("completion", "prefilled"),
    [(GOOD, True), ("<think>" + GOOD, False), (f"\n<think>{GOOD}\r\n", False), (f"\n{GOOD}\n\n", True)],
)
def test_parse_completion_accepts_the_contract(completion, prefilled):
    parsed = parse_completion(completion, prefilled)
    assert parsed.well_formed
    assert parsed.answer == "18"


@pytest.mark.parametrize(
    ("completion", "prefilled"),
    [
        (GOOD, False),  # nobody opened the thinking
        ("<think>" + GOOD, True),  # opened twice
        ("Sure! <think>" + GOOD, False),
        ("a </think> so <answer>18</answer>", True),
        ("a </think> <answer>18</answer> done", True),
        ("Maybe <answer>17</answer>? </think> <answer>18</answer>", True),
        ("a </think> b </think> <answer>18</answer>", True),
        ("a </think> <answer>18</answer></answer>", True),
        ("a </THINK> <ANSWER>18</ANSWER>", True),
        ("a </think> <answer>  </answer>", True),
        ("", True),
    ],
)
def test_parse_completion_refuses_what_breaks_the_contract(completion, prefilled):
    assert not parse_completion(completion, prefilled).well_formed


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("<answer>41</answer> </think> <answer>42</answer> and more", "42"),
        ("a </think> <answer>42</answer> <answer> 42 </answer>", "42"),
        ("a </think> <answer>41</answer> <answer>42</answer>", None),
        ("a </think> <answer>42", None),
        ("a </think> <answer>42</answer> <answer>", None),
        ("a </think> <answer><answer>42</answer></answer>", None),
        ("<answer>42</answer> a </think>", None),
        ("a <answer>42</answer>", None),
        ("a </think> 42", None),
        ("a </think> <answer></answer>", None),
        ("no tags", None),
    ],
)
def test_parse_completion_takes_one_answer_after_the_thinking(completion, answer):
    assert parse_completion(completion).answer == answer
