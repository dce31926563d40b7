"""Time and peak memory of target log-probabilities: ``python benchmarks/logprobs.py`` from the root of the repository.

Forward and backward together, methods in turn within one run. From logits: all of ``log_softmax`` and a gather,
``F.cross_entropy``, TRL's selective form (sequence by sequence; in bf16 it also computes in bf16), and chunks of
several sizes. From hidden states: the fused head against a linear layer and the fastest of the first three.

``time_ratio`` is to the fastest of the first three, the head's matrix products included for the second kind.
``extra_peak_bytes`` is what was allocated on top of the inputs: above the logits themselves for the first kind; for the
second it is measured with the head's weight frozen, so that its gradient, which any head returns, does not count.
``--quick`` is for a look: under a minute, small sizes.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))  # `dev` is used from the checkout
from benchmarks.memory import peak_bytes, peak_resident_bytes
from dev.chunked_logprobs import chunked_logprobs, fused_logprobs

VOCABULARIES = (49152, 151936)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SEQUENCES = 8
TEMPERATURE = 1.0

LogitsFn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """``fn(*inputs)`` is forward, with gradients to all inputs; to the first alone where memory is measured."""

    method: str
    chunk: int | None
    fn: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    upstream: Tensor

    def run(self) -> tuple[Tensor, ...]:
        logprobs = self.fn(*self.inputs)
        return torch.autograd.grad(logprobs, self.inputs, self.upstream.to(logprobs.dtype))

    def run_frozen(self) -> tuple[Tensor, ...]:
        first, *others = self.inputs
        logprobs = self.fn(first, *(other.detach() for other in others))
        return torch.autograd.grad(logprobs, first, self.upstream.to(logprobs.dtype))


def log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.float().log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -F.cross_entropy(logits.float(), targets, reduction="none")


def selective(logits: Tensor, targets: Tensor) -> Tensor:
    """The form of TRL's ``selective_log_softmax``: one sequence after the other."""
    sequences, ids = logits.view(SEQUENCES, -1, logits.shape[1]), targets.view(SEQUENCES, -1, 1)
    if logits.dtype == torch.float32:
        chosen = sequences.gather(-1, ids).squeeze(-1)
        return (chosen - torch.stack([row.logsumexp(dim=-1) for row in sequences])).flatten()
    rows = [row.log_softmax(dim=-1).gather(-1, row_ids) for row, row_ids in zip(sequences, ids, strict=True)]
    return torch.cat(rows)[:, 0]


FULL: dict[str, LogitsFn] = {"log_softmax": log_softmax, "cross_entropy": cross_entropy, "selective": selective}


def from_logits(logits: Tensor, targets: Tensor, chunks: tuple[int | None, ...]) -> list[Case]:
    upstream = torch.randn(len(targets), device=logits.device)
    make = partial(Case, inputs=(logits,), upstream=upstream)
    full = [make(method=name, chunk=None, fn=partial(fn, targets=targets)) for name, fn in FULL.items()]
    chunked = [partial(chunked_logprobs, targets=targets, temperature=TEMPERATURE, chunk_size=c) for c in chunks]
    return full + [make(method="chunked", chunk=c, fn=fn) for c, fn in zip(chunks, chunked, strict=True)]


def from_hidden(
    hidden: Tensor, weight: Tensor, targets: Tensor, full: str, chunks: tuple[int | None, ...]
) -> list[Case]:
    def unfused(hidden: Tensor, weight: Tensor) -> Tensor:
        return FULL[full](hidden @ weight.T, targets)

    upstream = torch.randn(len(targets), device=hidden.device)
    make = partial(Case, inputs=(hidden, weight), upstream=upstream)
    fused = [partial(fused_logprobs, targets=targets, temperature=TEMPERATURE, chunk_size=c) for c in chunks]
    return [
        make(method=f"linear + {full}", chunk=None, fn=unfused),
        *(make(method="fused", chunk=c, fn=fn) for c, fn in zip(chunks, fused, strict=True)),
    ]


def seconds(cases: list[Case], device: str, repeats: int) -> list[float]:
    """The least time of each case, the cases taken in turn."""
    best = [float("inf")] * len(cases)
    for repeat in range(repeats + 1):  # the first is a warm-up
        for i, case in enumerate(cases):
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            case.run()
            if device == "cuda":
                torch.cuda.synchronize()
            if repeat:
                best[i] = min(best[i], time.perf_counter() - start)
    return best


def measure(cases: list[Case], baselines: int, device: str, repeats: int) -> Iterator[dict]:
    """One result a case; ratios are to the fastest of the first ``baselines`` cases."""
    times = seconds(cases, device, repeats)
    baseline = min(times[:baselines])
    for case, spent in zip(cases, times, strict=True):
        yield {
            "method": case.method,
            "chunk": case.chunk,
            "time_ratio": round(spent / baseline, 3),
            "extra_peak_bytes": peak_bytes(case.run_frozen, device),
            "seconds": round(spent, 4),
        }


def measure_size(args: argparse.Namespace, vocab: int, dtype: str) -> Iterator[dict]:
    """All methods for one vocabulary and dtype, from random inputs."""
    torch.manual_seed(0)
    targets = torch.randint(0, vocab, (args.rows,), device=args.device)
    size = {"V": vocab, "dtype": dtype, "rows": args.rows}
    size["logits_bytes"] = args.rows * vocab * DTYPES[dtype].itemsize
    logits = torch.randn(args.rows, vocab, device=args.device).to(DTYPES[dtype]).requires_grad_()
    results = list(measure(from_logits(logits, targets, args.chunk_rows), len(FULL), args.device, args.repeats))
    del logits
    yield from ({**size, **result} for result in results)
    fastest = min(results[: len(FULL)], key=lambda result: result["seconds"])["method"]
    hidden = torch.randn(args.rows, args.dim, device=args.device).to(DTYPES[dtype]).requires_grad_()
    weight = (torch.randn(vocab, args.dim, device=args.device) / args.dim**0.5).to(DTYPES[dtype]).requires_grad_()
    cases = from_hidden(hidden, weight, targets, fastest, args.chunk_columns)
    yield from ({**size, **result} for result in measure(cases, 1, args.device, args.repeats))


def cross_check(args: argparse.Namespace) -> dict:
    """On CPU the largest case by the allocator's record and by the pages that the process came to use."""
    logits = torch.randn(args.rows, max(VOCABULARIES), requires_grad=True)
    case = from_logits(logits, torch.zeros(args.rows, dtype=torch.int64), ())[0]
    return {"recorded": peak_bytes(case.run, "cpu"), "resident": peak_resident_bytes(case.run)}


def row_of_table(result: dict) -> str:
    share = result["extra_peak_bytes"] / result["logits_bytes"]
    sizes = f"{result['V']:>7} {result['dtype']:>5} {result['method']:<22} {result['chunk'] or 'all':>6}"
    return f"{sizes} {result['seconds']:>9.4f} {result['time_ratio']:>6.2f} {share:>11.1%}"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if cuda else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rows", type=int, help="T, a multiple of 8; default 1024 on CPU, 8192 on CUDA, 64 if quick")
    parser.add_argument("--dim", type=int, default=576, help="D, the hidden size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.rows = args.rows or (64 if args.quick else 8192 if args.device == "cuda" else 1024)
    args.chunk_rows = (16,) if args.quick else (4, 16, 64, 256)
    args.chunk_columns = (512,) if args.quick else (256, 512, 2048)
    return args


def main() -> None:
    args = parse()
    if args.device == "cpu":
        print(
            "CUDA did not run: these are times of a CPU." if torch.cuda.is_available() else "No CUDA device: CPU only."
        )
    print(f"T = {args.rows}, D = {args.dim}; extra memory as a share of [T, V] in the model's dtype")
    print(f"{'V':>7} {'dtype':>5} {'method':<22} {'chunk':>6} {'seconds':>9} {'ratio':>6} {'extra':>11}")
    cases = []
    for vocab in VOCABULARIES:
        for dtype in DTYPES:
            for result in measure_size(args, vocab, dtype):
                cases.append(result)
                print(row_of_table(result), flush=True)
    summary = {"device": args.device, "cases": cases}
    if args.device == "cpu":
        summary["cross_check"] = cross_check(args)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
