import pytest

from torchtune_grpo.config import ConfigError, instantiate
from torchtune_grpo.rewards import CallableReward, ExactAnswerReward, FormatReward

WELL_FORMED = "a </think> <answer>18</answer>"
LOOSE = "a </think> <answer>18</answer> bye"
WRONG = "a </think> <answer>17</answer>"
MISSING = "a"


def test_format_reward_looks_at_the_format_alone():
    assert FormatReward()([WELL_FORMED, LOOSE, WRONG, MISSING], ["18"] * 4) == [1.0, 0.0, 1.0, 0.0]
    assert FormatReward(prefilled_think=False)([WELL_FORMED, "<think>" + WELL_FORMED], [""] * 2) == [0.0, 1.0]


def test_exact_answer_reward_looks_at_the_answer_alone():
    assert ExactAnswerReward()([WELL_FORMED, LOOSE, WRONG, MISSING], ["18"] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_exact_answer_reward_can_require_the_format():
    judge = ExactAnswerReward(require_format=True)
    assert judge([WELL_FORMED, LOOSE, WRONG], ["18"] * 3) == [1.0, 0.0, 0.0]
    opened = ExactAnswerReward(require_format=True, prefilled_think=False)
    assert opened([WELL_FORMED, "<think>" + WELL_FORMED], ["18"] * 2) == [0.0, 1.0]


@pytest.mark.parametrize("require_format", [False, True])
def test_exact_answer_reward_is_none_where_the_gold_cannot_be_judged(require_format):
    judge = ExactAnswerReward(require_format=require_format)
    assert judge([WELL_FORMED, LOOSE, MISSING, WELL_FORMED], ["", "", "", "18"]) == [None, None, None, 1.0]


def test_exact_answer_reward_needs_one_gold_for_each_completion():
    with pytest.raises(ValueError):
        ExactAnswerReward()([WELL_FORMED, WELL_FORMED], ["18"])


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_exact_answer_reward_refuses_an_unbounded_timeout(timeout_s):
    with pytest.raises(ConfigError, match="timeout_s"):
        ExactAnswerReward(timeout_s=timeout_s)


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "user_rewards.py").write_text(
        "def long(completions, answers, response_lengths):\n"
        "    return [float(n) for n in response_lengths]\n"
        "def plain(completions, answers):\n"
        "    return [len(c) for c in completions]\n"
        "def greedy(completions, answers, temperature): ...\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


def test_callable_reward_passes_what_the_function_names(user_module):
    context = {"response_lengths": [3], "truncated": [False], "source": ["s"]}
    assert CallableReward(path="user_rewards.long")(["ab"], ["1"], **context) == [3.0]
    assert CallableReward(path="user_rewards.plain")(["ab"], ["1"], **context) == [2]


@pytest.mark.parametrize(
    "name", ["user_rewards.shrt", "user_rewards.number", "user_rewards", "no_such.fn", "not a path"]
)
def test_callable_reward_refuses_what_it_cannot_import(user_module, name):
    with pytest.raises(ConfigError, match=r"^path: "):
        CallableReward(path=name)


def test_callable_reward_refuses_a_function_that_needs_more(user_module):
    with pytest.raises(ConfigError, match="path: .*temperature"):
        CallableReward(path="user_rewards.greedy")


def test_callable_reward_error_names_the_config_key(user_module):
    node = {"_component_": "torchtune_grpo.rewards.CallableReward", "path": "user_rewards.lng"}
    with pytest.raises(ConfigError, match="path: .*did you mean 'long'"):
        instantiate(node)
