"""Time and memory of full-vocabulary distillation losses: ``python benchmarks/distillation.py [--quick]``.

Reverse KL of T tokens, forward and backward, from the hidden states of student and teacher (both of size D) to the
gradients of the student's hidden states and head, four matrix products in all:

plain    both heads, two ``log_softmax``, ``(p * (log p - log q)).sum()``, by PyTorch's autograd
logits   ``divergence_from_logits``: both heads by PyTorch; the teacher's logits are the payload
hidden   ``divergence_from_hidden``: the student's head by PyTorch, the payload is the teacher's hidden states
fused    ``divergence_fused``

Every measurement runs in a process of its own, after a warm-up on a tiny problem. Peak memory is that of the process
(on CUDA, of PyTorch's allocator) above what it was with the inputs in place, less the gradients (fp32 sums included),
which every method has; as a share of the student's logits ``[T, V]`` in the dtype of the model. ``extra`` leaves out
the logits that a method is given (its student's, and the payload). One measurement is repeated under PyTorch's profiler
to check the process's number against the allocator's. The last line is JSON. Runs on the GPU if there is one.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtune_grpo.distillation import ReverseKL, divergence_from_hidden, divergence_from_logits, divergence_fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GIVEN = {"plain": 0, "logits": 2, "hidden": 1, "fused": 0}  # logits [T, V] that exist before the loss


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement. ``chunk`` 0 stands for the default."""

    method: str
    rows: int
    vocabulary: int
    width: int
    dtype: str = "fp32"
    chunk: int = 0
    repeats: int = 1
    profiled: bool = False

    @property
    def logits_bytes(self) -> int:
        return self.rows * self.vocabulary * DTYPES[self.dtype].itemsize

    @property
    def gradient_bytes(self) -> int:
        """Of hidden states and head; the fused form's sums in fp32 and what they are cast to."""
        itemsize = DTYPES[self.dtype].itemsize
        summed = 4 if self.method == "fused" and self.dtype != "fp32" else 0
        return (self.rows + self.vocabulary) * self.width * (itemsize + summed)


def cases(quick: bool) -> list[Case]:
    """Sizes of SmolLM2-135M, SmolLM2-1.7B, Qwen2.5-0.5B and (half the tokens: plain needs 4 GiB beside heads of 4 GiB)
    of a 2048-wide model with Qwen's vocabulary. bf16 matrix products are slow on a CPU: fewer tokens there."""
    full = [("plain", 0), ("logits", 0), ("hidden", 0), ("hidden", 256), ("fused", 0), ("fused", 128), ("fused", 512)]
    short = [("plain", 0), ("logits", 0), ("hidden", 0), ("fused", 0)]
    few = 2048 if DEVICE == "cuda" else 256
    sizes = [(2048, 49_152, 576, "fp32", 1, short)] if quick else [
        (2048, 49_152, 576, "fp32", 2, full),
        (2048, 49_152, 2048, "fp32", 1, [("plain", 0), ("hidden", 0), ("fused", 0), ("fused", 128)]),
        (2048, 151_936, 896, "fp32", 1, short + [("fused", 128)]),
        (1024, 151_936, 2048, "fp32", 1, [("plain", 0), ("fused", 20), ("fused", 128)]),
        (few, 49_152, 576, "bf16", 1, short + [("fused", 128)]),
    ]  # fmt: skip
    return [
        Case(method=method, rows=rows, vocabulary=vocabulary, width=width, dtype=dtype, chunk=chunk, repeats=repeats)
        for rows, vocabulary, width, dtype, repeats, methods in sizes
        for method, chunk in methods
    ]


def loss(case: Case, tensors: tuple[Tensor, ...], weights: Tensor) -> Tensor:
    """The weighted sum of one method, from hidden states and heads."""
    hidden, head, teacher_hidden, teacher_head = tensors
    chunk = case.chunk or None
    if case.method == "fused":
        return divergence_fused(ReverseKL(), *tensors, weights, chunk_size=chunk)[0]
    logits = hidden @ head.T
    if case.method == "hidden":
        teacher = (teacher_hidden, teacher_head)
        return divergence_from_hidden(ReverseKL(), logits, *teacher, weights, chunk_size=chunk)[0]
    teacher_logits = teacher_hidden @ teacher_head.T
    if case.method == "logits":
        return divergence_from_logits(ReverseKL(), logits, teacher_logits, weights, chunk_size=chunk)[0]
    student, teacher = logits.float().log_softmax(dim=-1), teacher_logits.float().log_softmax(dim=-1)
    del logits, teacher_logits
    return (weights * (student.exp() * (student - teacher)).sum(dim=-1)).sum()


def make_inputs(case: Case) -> tuple[tuple[Tensor, ...], Tensor]:
    """Made in place: nothing is freed, so the process's peak so far is what it holds."""
    torch.manual_seed(0)
    options = {"dtype": DTYPES[case.dtype], "device": DEVICE}
    shapes = 2 * [(case.rows, case.width), (case.vocabulary, case.width)]
    tensors = [torch.empty(shape, **options).normal_(std=shape[1] ** -0.25) for shape in shapes]
    student = [tensor.requires_grad_() for tensor in tensors[:2]]
    return (*student, *tensors[2:]), torch.full((case.rows,), 1 / case.rows, device=DEVICE)


def run_once(case: Case, tensors: tuple[Tensor, ...], weights: Tensor) -> float:
    """Seconds of one forward and backward pass."""
    tensors[0].grad = tensors[1].grad = None
    synchronize()
    start = time.perf_counter()
    loss(case, tensors, weights).backward()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_bytes() -> int:
    """Most memory so far: of the process, or of PyTorch on the GPU."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def profiled_peak(call: Callable[[], Any]) -> int:
    """Most bytes that PyTorch's CPU allocator held at once during ``call``, above what it held before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event.get("name") == "[memory]")


def measure(case: Case) -> dict[str, float]:
    """In a fresh process: best seconds, and peak bytes above the inputs."""
    tiny = Case(method=case.method, rows=64, vocabulary=4096, width=64, dtype=case.dtype)
    run_once(tiny, *make_inputs(tiny))
    inputs = make_inputs(case)
    if case.profiled:
        return {"seconds": 0.0, "peak_bytes": profiled_peak(lambda: run_once(case, *inputs))}
    baseline = peak_bytes()
    seconds = [run_once(case, *inputs) for _ in range(case.repeats)]
    return {"seconds": min(seconds), "peak_bytes": peak_bytes() - baseline}


def in_fresh_process(case: Case) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", json.dumps(asdict(case))]
    completed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    measured = json.loads(completed.stdout.splitlines()[-1])
    beyond = measured["peak_bytes"] - case.gradient_bytes
    share = beyond / case.logits_bytes
    return asdict(case) | measured | {"peak_share": share, "extra_share": share - GIVEN[case.method]}


def print_row(result: dict[str, Any]) -> None:
    chunk = "" if result["method"] in ("plain", "logits") else result["chunk"] or "default"
    print(
        f"{result['rows']:>5} {result['vocabulary']:>7} {result['width']:>5} {result['dtype']} {result['method']:<7}"
        f" {chunk:>7} {result['seconds']:>8.2f} {result['time_ratio']:>9.2f}"
        f" {result['peak_bytes'] / 2**30:>9.2f} {result['peak_share']:>11.3f} {result['extra_share']:>7.3f}",
        flush=True,
    )


def payload_bytes(vocabulary: int, width: int) -> dict[str, int]:
    """Bytes a token in bf16 of either payload."""
    return {"vocabulary": vocabulary, "width": width, "logits": 2 * vocabulary, "hidden_states": 2 * width}


def main(quick: bool) -> None:
    if DEVICE == "cpu":
        print("No CUDA device: nothing ran on a GPU, these are numbers of the CPU.")
    print(f"{DEVICE}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("    T       V     D dtype method    chunk  seconds  vs plain  peak GiB  peak/[T,V]   extra")
    results: list[dict[str, Any]] = []
    for case in cases(quick):
        results.append(in_fresh_process(case))
        plain = next(result for result in reversed(results) if result["method"] == "plain")
        results[-1]["time_ratio"] = results[-1]["seconds"] / plain["seconds"]
        print_row(results[-1])
    payloads = [payload_bytes(v, d) for v, d in sorted({(r["vocabulary"], r["width"]) for r in results})]
    for payload in payloads:
        print("payload, bytes a token: V {vocabulary}, D {width}: logits {logits}, hidden_states {hidden_states}"
              .format(**payload))  # fmt: skip
    output = {"device": DEVICE, "threads": torch.get_num_threads(), "results": results, "payload_bytes": payloads}
    if DEVICE == "cpu":
        check = [
            in_fresh_process(Case(method="hidden", rows=512, vocabulary=49_152, width=64, profiled=profiled))
            for profiled in (False, True)
        ]
        output["peak_check"] = {"process": check[0]["peak_bytes"], "allocator": check[1]["peak_bytes"]}
        print("peak bytes of one measurement (hidden, T 512): process {process}, allocator {allocator}"
              .format(**output["peak_check"]))  # fmt: skip
    print(json.dumps(output))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one size, within a minute")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(Case(**json.loads(arguments.measure)))))
    else:
        main(arguments.quick)
