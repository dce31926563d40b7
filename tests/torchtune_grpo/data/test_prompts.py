import pytest

from torchtune_grpo.config import ConfigError
from torchtune_grpo.data import R1_TEMPLATE, TINY_TEMPLATE, Prompt, completion_text


def test_prompt_puts_the_question_into_its_template():
    prompt = Prompt(template="Q: {question} A: <think>")
    assert prompt.text("How many?") == "Q: How many? A: <think>"


def test_prompt_takes_braces_of_template_and_question_literally():
    prompt = Prompt(template='{"q": {question}} {} <think>')
    assert prompt.text(r"$\{1, 2\}$ {question} {0}") == r'{"q": $\{1, 2\}$ {question} {0}} {} <think>'


@pytest.mark.parametrize("template", [R1_TEMPLATE, TINY_TEMPLATE])
def test_shipped_templates_end_in_the_prefilled_tag_right_after_the_assistants_turn(template):
    assert Prompt(template=template).text("1+1?").endswith("User: 1+1? Assistant: <think>")


def test_r1_template_shows_every_tag():
    assert all(tag in R1_TEMPLATE for tag in ("<think>", "</think>", "<answer>", "</answer>"))


@pytest.mark.parametrize("template", ["no place <think>", "{question} and {question} <think>"])
def test_prompt_refuses_a_template_without_exactly_one_question(template):
    with pytest.raises(ConfigError, match="prompt.template"):
        Prompt(template=template)


@pytest.mark.parametrize("template", ["{question}", "{question} <think> ", "<think> {question}"])
def test_prompt_refuses_a_template_that_does_not_end_in_think(template):
    with pytest.raises(ConfigError, match="prompt.template.*<think>"):
        Prompt(template=template)


def test_completion_text_closes_the_prefilled_tag():
    assert completion_text("9*2=18.", "18") == " 9*2=18. </think> <answer> 18 </answer>"
