import pytest

from torchtune_grpo.config import ConfigError
from torchtune_grpo.rewards import LengthPenalty, SoftOverlongPenalty


def penalties(judge, lengths):
    return judge([""] * len(lengths), [""] * len(lengths), response_lengths=lengths)


def test_soft_overlong_penalty_follows_dapo_eq_13():
    judge = SoftOverlongPenalty(max_response_tokens=20, buffer_tokens=4)
    assert penalties(judge, [0, 16, 17, 18, 20, 21]) == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]


def test_soft_overlong_penalty_without_a_free_part_is_linear():
    assert penalties(SoftOverlongPenalty(max_response_tokens=4, buffer_tokens=4), [0, 1, 4]) == [
        0.0,
        -0.25,
        -1.0,
    ]


def test_length_penalty_is_the_share_of_the_limit():
    assert penalties(LengthPenalty(max_response_tokens=8), [0, 2, 8, 9]) == [0.0, -0.25, -1.0, -1.0]


@pytest.mark.parametrize("buffer_tokens", [0, -1, 21])
def test_soft_overlong_penalty_refuses_a_buffer_outside_the_limit(buffer_tokens):
    with pytest.raises(ConfigError, match="buffer_tokens"):
        SoftOverlongPenalty(max_response_tokens=20, buffer_tokens=buffer_tokens)


def test_penalties_refuse_an_empty_limit():
    with pytest.raises(ConfigError, match="max_response_tokens"):
        LengthPenalty(max_response_tokens=0)
    with pytest.raises(ConfigError, match="max_response_tokens"):
        SoftOverlongPenalty(max_response_tokens=0, buffer_tokens=0)
