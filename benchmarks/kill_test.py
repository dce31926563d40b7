"""Kills a small GRPO run at random moments, starts it again, and holds the outcome against an undisturbed run.

    python -m benchmarks.kill_test --kills 50

Two ranks, each a process of its own as under srun, with several updates a rollout, dynamic sampling, evaluations and a
save in the background every two steps. At a random moment one rank or both get SIGKILL, SIGTERM, SIGINT or SIGUSR1;
the same command then continues, until the run is done. Its metric lines (clocks aside), samples, last checkpoint and
exported weights must be those of the undisturbed run, byte for byte. A kill during the imports is not among the moments
(``benchmarks.forked_ranks``). The last line of output is JSON.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.forked_ranks import FORK, import_recipe, launch, outcome, output, small_grpo, wait
from torchtune_grpo.training.checkpoints import CheckpointManager
from torchtune_grpo.training.preemption import PREEMPTED, Preemption
from torchtune_grpo.training.reporting import Reporter

RECIPE = "grpo_full_finetune"
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ASKED_S, KILLED_S = 60.0, 3.0  # after these a launcher would end the ranks that are left
CHANGES = {
    "model": {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "embed_dim": 16, "intermediate_dim": 32},
    "dataset": {"size": 64},
    "prompts_per_step": 8,
    "generate": {"group_size": 3, "max_new_tokens": 8},
    "max_sampling_rounds": 2,
    "epochs_per_rollout": 2,
    "minibatches_per_epoch": 2,
    "evaluation": {"heldout": {"dataset": {"size": 24}, "batch_size": 3, "generate": {"max_new_tokens": 6}}},
    "evaluate_every_n_steps": 5,
    "checkpoints": {"every_n_steps": 2, "keep_last": 2, "keep_best": 1, "asynchronous": True},
    "log_samples_every_n_steps": 8,
}


class Trace:
    """What rank 0 is doing, in memory that this process shares with the ranks."""

    def __init__(self) -> None:
        self._phase = FORK.RawArray(ctypes.c_char, 40)
        self._saving = FORK.RawValue(ctypes.c_bool, False)

    def __str__(self) -> str:
        return self._phase.value.decode() + (" while a save is under way" if self._saving.value else "")

    def reset(self) -> None:
        self._phase.value, self._saving.value = b"set-up", False

    def install(self) -> None:
        """In rank 0: notes the begin of training, every phase, evaluations, and the writing of checkpoints."""
        phase, evaluate, write, defer = Reporter.phase, Reporter.evaluate, CheckpointManager._write, Preemption.defer

        @contextmanager
        def noted(name: str, inner: AbstractContextManager[None]) -> Any:
            before, self._phase.value = self._phase.value, name.encode()
            with inner:
                yield
            self._phase.value = before

        def saving(manager: CheckpointManager, snapshot: Any) -> None:
            self._saving.value = True
            write(manager, snapshot)
            self._saving.value = False

        def evaluating(report: Reporter, *args: Any, **kwargs: Any) -> bool:
            with noted("evaluation", nullcontext()):
                return evaluate(report, *args, **kwargs)

        def deferred(preemption: Preemption) -> None:
            defer(preemption)
            self._phase.value = b"between phases"

        Reporter.phase = lambda report, name, tokens=0: noted(name, phase(report, name, tokens))
        Reporter.evaluate, CheckpointManager._write, Preemption.defer = evaluating, saving, deferred


def disturbed(config: Path, kills: int, duration: float, rng: random.Random, trace: Trace) -> list[dict[str, Any]]:
    """A run that is killed up to ``kills`` times, and an entry a kill."""
    entries: list[dict[str, Any]] = []
    while True:
        trace.reset()
        processes = launch(RECIPE, config, in_rank_0=trace.install)
        last = len(entries) == kills
        codes = wait(processes, 120.0 if last else rng.uniform(0.0, duration))
        if None not in codes:
            if codes != [0, 0]:
                raise RuntimeError(f"undisturbed ranks ended with {codes}:\n{output(config)[-3000:]}")
            return entries
        number, targets = rng.choice(SIGNALS), rng.choice(((0,), (1,), (0, 1)))
        phase, before = str(trace), time.monotonic()
        for rank in targets:
            if processes[rank].is_alive():
                os.kill(processes[rank].pid, number)
        asked = number in (signal.SIGTERM, signal.SIGUSR1) and not phase.startswith("set-up")
        codes = wait(processes, ASKED_S if asked else KILLED_S)
        # 0: the last step was done. What is left of a run that was killed is the launcher's to end.
        ok = not asked or codes in ([PREEMPTED, PREEMPTED], [0, 0])
        entry = {"signal": number.name, "ranks": targets, "phase": phase, "codes": codes, "ok": ok}
        entries.append(entry | {"seconds": time.monotonic() - before})
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
        print(json.dumps(entries[-1]), flush=True)


def counted(entries: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> dict[str, int]:
    return dict(sorted(Counter(map(key, entries)).items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kills-per-run", type=int, default=6)
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of a run, a multiple of 4")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    import_recipe(RECIPE)
    rng, trace = random.Random(args.seed), Trace()
    entries: list[dict[str, Any]] = []
    differences: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        before = time.monotonic()
        config, runs = small_grpo(Path(name) / "undisturbed", args.steps, CHANGES), 0
        disturbed(config, 0, 0.0, rng, trace)
        duration, expected = time.monotonic() - before, outcome(config.with_name("run"))
        while len(entries) < args.kills:
            runs += 1
            kills = min(args.kills - len(entries), args.kills_per_run)
            config = small_grpo(Path(name) / f"disturbed{runs}", args.steps, CHANGES)
            entries += disturbed(config, kills, duration, rng, trace)
            got = outcome(config.with_name("run"))
            differences += [f"run {runs}: {key}" for key in expected if got[key] != expected[key]]
    asked = [e for e in entries if e["codes"] == [PREEMPTED] * 2 and not e["phase"].startswith("set-up")]
    times = [e["seconds"] for e in asked] or [0.0]
    bad = [e for e in entries if not e["ok"]]
    summary = {
        "kills": len(entries),
        "runs": runs,
        "seconds_of_a_run": round(duration, 2),
        "signals": counted(entries, lambda e: f"{e['signal']} to {'one rank' if len(e['ranks']) == 1 else 'both'}"),
        "phases": counted(entries, lambda e: e["phase"]),
        "left_in_good_order": len(asked),
        "left_to_the_launcher": sum(None in e["codes"] for e in entries),
        "seconds_from_signal_to_exit": {"median": round(median(times), 3), "max": round(max(times), 3)},
        "unexpected_ends": bad,
        "differences": differences,
    }
    print(json.dumps(summary))
    raise SystemExit(bool(bad or differences))


if __name__ == "__main__":
    main()
