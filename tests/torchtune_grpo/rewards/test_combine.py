import math

import pytest
import torch

from torchtune_grpo.config import ConfigError, instantiate
from torchtune_grpo.rewards import RewardSum

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


@pytest.mark.parametrize("missing", [None, NAN])
def test_reward_sum_leaves_out_only_the_row_that_cannot_be_judged(missing):
    fns = {"format": returns(1.0, missing), "answer": returns(1.0, 1.0)}
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
    ("values", "message"),
    [
        ((1.0,), "1 rewards"),
        ((1.0, "2"), "'2'"),
        ((1.0, math.inf), "infinite"),
        ((-1e39, 0.0), "infinite"),
        ((1j, 0), "1j"),
    ],
)
def test_reward_sum_names_the_judge_that_misbehaves(values, message):
    reward = RewardSum(fns={"bad": returns(*values)}, weights={"bad": 1.0}, verifier="bad")
    with pytest.raises(ValueError, match=f"'bad'.*{message}"):
        score(reward)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fns": {}}, "fns"),
        ({"weights": {}}, "weights: .*'answer'"),
        ({"weights": {"answer": 1.0, "anwser": 1.0}}, "weights.anwser: .*did you mean 'answer'"),
        ({"weights": {"answer": math.inf}}, "weights.answer"),
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
