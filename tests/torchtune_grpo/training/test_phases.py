"""Seconds of phases, and peak memory."""

import resource
import time

import pytest
import torch

from torchtune_grpo.training.phases import PhaseTimer, peak_memory_gib


def test_timer_adds_up_phases_and_starts_afresh(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 23.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = PhaseTimer(torch.device("cpu"))
    for phase in ("rollout", "update", "rollout"):
        with timer(phase):
            pass
    assert timer.pop() == {"seconds/rollout": 5.0, "seconds/update": 1.0}
    assert timer.pop() == {}


def test_timer_counts_a_phase_that_raised(monkeypatch):
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = PhaseTimer(torch.device("cpu"))
    with pytest.raises(KeyError) as caught, timer("rollout"):
        raise KeyError
    assert caught.value.__notes__ == ["phase rollout"]
    assert timer.pop() == {"seconds/rollout": 2.0}


def test_peak_memory_is_in_gib(monkeypatch):
    usage = type("Usage", (), {"ru_maxrss": 3 * 2**20})  # KiB on Linux
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    assert peak_memory_gib(torch.device("cpu")) == 3.0
