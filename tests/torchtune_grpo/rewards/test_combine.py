import math
from contextlib import contextmanager

import pytest
import torch

from torchtune_grpo.config import ConfigError, instantiate
from torchtune_grpo.rewards import RewardSum, combine
from torchtune_grpo.rewards.combine import RewardError

NAN = math.nan


def returns(*values):
    return lambda completions, answers: list(values)


def score(reward, rows=2):
    return reward(
        ["c"] * rows,
        ["a"] * rows,
        response_lengths=list(range(rows)),
        truncated=[False] * rows,
        source=["s"] * rows,
    )


def assert_close(actual, expected):
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=1e-7, equal_nan=True)


def test_reward_sum_weighs_its_parts():
    fns = {"format": returns(1, 0), "answer": returns(0.0, 1.0)}
    rewards = score(RewardSum(fns=fns, weights={"answer": 1.0, "format": 0.25}, verifier="answer"))
    assert_close(rewards.total, [0.25, 1.0])
    assert_close(rewards.parts["format"], [1.0, 0.0])
    assert_close(rewards.success, [0.0, 1.0])


def test_reward_sum_success_is_a_positive_verifier():
    fns = {"answer": returns(-1.0, 0.5, 0.0, None)}
    assert_close(score(RewardSum(fns=fns, weights={"answer": 2.0}, verifier="answer"), 4).success, [0.0, 1.0, 0.0, NAN])


def test_reward_sum_leaves_out_only_the_row_that_cannot_be_judged():
    fns = {"format": returns(1.0, None), "answer": returns(1.0, 1.0)}
    rewards = score(RewardSum(fns=fns, weights={"answer": 1.0, "format": 0.5}, verifier="answer"))
    assert_close(rewards.total, [1.5, NAN])
    assert_close(rewards.parts["format"], [1.0, NAN])
    assert_close(rewards.success, [1.0, 1.0])


def test_reward_sum_logs_a_weight_0_part_without_a_say():
    fns = {"seen": returns(None, 7.0), "answer": returns(1.0, 0.0)}
    rewards = score(RewardSum(fns=fns, weights={"answer": 1.0, "seen": 0.0}, verifier="answer"))
    assert_close(rewards.total, [1.0, 0.0])
    assert_close(rewards.parts["seen"], [NAN, 7.0])


def test_reward_sum_gives_each_judge_what_it_names():
    def by_length(completions, answers, response_lengths):
        return [float(n) for n in response_lengths]

    def by_all(completions, answers, **context):
        return [float(len(context)) for _ in completions]

    fns = {"length": by_length, "all": by_all}
    rewards = score(RewardSum(fns=fns, weights={"length": 1.0, "all": 1.0}, verifier="all"))
    assert_close(rewards.parts["length"], [0.0, 1.0])
    assert_close(rewards.parts["all"], [3.0, 3.0])


@pytest.mark.parametrize(
    ("returned", "got", "row"),
    [
        ([1.0], "1 rewards, expected a list of 2", None),
        (None, "None, expected a list of 2", None),
        (0.5, "0.5, expected a list of 2", None),
        ("10", "'10', expected a list of 2", None),
        ({0: 1.0, 1: 0.0}, "{0: 1.0, 1: 0.0}, expected a list of 2", None),
        ([1.0, "2"], "'2' for row 1, expected a finite number, or None", 1),
        ([1.0, math.inf], "inf for row 1", 1),
        ([NAN, 1.0], "nan for row 0", 0),
        ([-1e39, 0.0], "-1e[+]39 for row 0", 0),
        ([1j, 0], "1j for row 0", 0),
        (torch.ones(2), r"tensor\(1.\) for row 0", 0),
    ],
)
def test_reward_sum_names_the_judge_that_returns_something_else(returned, got, row):
    fns = {"good": returns(1.0, 1.0), "bad": lambda completions, answers: returned}
    with pytest.raises(RewardError, match=f"^fns.bad: this judge returned {got}") as caught:
        score(RewardSum(fns=fns, weights={"good": 1.0, "bad": 1.0}, verifier="good"))
    assert caught.value.row == row


def test_reward_sum_names_the_row_at_which_a_judge_raises():
    def raises(completions, answers, response_lengths):
        return [1 / (2 - length) for length in response_lengths]

    with pytest.raises(
        RewardError, match=r"^fns.bad: this judge raised ZeroDivisionError: .*\(.*test_combine.py:\d+\)"
    ) as e:
        score(RewardSum(fns={"bad": raises}, weights={"bad": 1.0}, verifier="bad"), rows=4)
    assert e.value.row == 2 and "at row 2, answer 'a', completion 'c'" in str(e.value)


def test_reward_sum_names_no_row_where_none_is_to_blame():
    def raises(completions, answers):
        if len(completions) > 1:
            raise ConnectionError("no server")
        return [0.0]

    with pytest.raises(RewardError, match="ConnectionError: no server .* on 2 rows") as caught:
        score(RewardSum(fns={"bad": raises}, weights={"bad": 1.0}, verifier="bad"))
    assert caught.value.row is None


def test_reward_sum_limits_the_time_of_each_judge(monkeypatch):
    asked = []

    @contextmanager
    def time_limit(seconds, what):
        asked.append((seconds, what))
        yield

    monkeypatch.setattr(combine, "time_limit", time_limit)
    fns = {"one": returns(1.0, 0.0), "two": returns(0.0, 0.0)}
    score(RewardSum(fns=fns, weights={"one": 1.0, "two": 1.0}, verifier="one", timeout_s=7.0))
    assert [seconds for seconds, _ in asked] == [7.0, 7.0]
    assert asked[1][1].startswith("rewards.fns.two ")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fns": {}}, "fns"),
        ({"weights": {}}, "weights: .*'answer'"),
        ({"weights": {"answer": 1.0, "anwser": 1.0}}, "weights.anwser: .*did you mean 'answer'"),
        ({"weights": {"answer": math.inf}}, "weights.answer"),
        ({"timeout_s": 0.0}, "timeout_s: got 0.0"),
        ({"timeout_s": NAN}, "timeout_s: got nan"),
        ({"verifier": "answr"}, "verifier: .*did you mean 'answer'"),
        ({"fns": {"answer": lambda completions, answers, prompts: []}}, "fns.answer: .*prompts"),
    ],
)
def test_reward_sum_refuses_a_config_that_contradicts_itself(changes, message):
    good = {"fns": {"answer": returns(0.0)}, "weights": {"answer": 1.0}, "verifier": "answer"}
    with pytest.raises(ConfigError, match=message):
        RewardSum(**good | changes)


def test_reward_sum_is_built_from_a_config():
    package = "torchtune_grpo.rewards"
    node = {
        "_component_": f"{package}.RewardSum",
        "fns": {
            "format": {"_component_": f"{package}.FormatReward"},
            "answer": {"_component_": f"{package}.ExactAnswerReward"},
            "length": {"_component_": f"{package}.LengthPenalty", "max_response_tokens": 4},
        },
        "weights": {"format": 0.5, "answer": 1.0, "length": 0.1},
        "verifier": "answer",
    }
    rewards = instantiate(node)(
        ["a </think> <answer>18.0</answer>", "18"],
        ["18", "18"],
        response_lengths=[2, 4],
        truncated=[False, True],
        source=["s", "s"],
    )
    assert_close(rewards.total, [1.5 - 0.05, -0.1])
    assert_close(rewards.success, [1.0, 0.0])
