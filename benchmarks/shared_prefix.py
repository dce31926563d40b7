"""Training forward and backward with a shared prefix, over dense: time, memory, and how much of the gain is kept.

    python benchmarks/shared_prefix.py --model-dir models/SmolLM2-135M-Instruct --data train.jsonl
    python benchmarks/shared_prefix.py --quick          # a small random llama, under a minute

One group of G completions of R tokens to a prompt of P tokens, no padding in either arm, the head at the positions that
predict a response token in both, its log-probabilities in chunks (``--head full``: the stable one). ``token_ratio`` and
``flop_ratio`` are dense over compact; the latter counts the matrices of the layers at all tokens and the head at the
predicting ones. ``quotient`` is speed-up / FLOP ratio: what is left of the saving in matrix products after all that
does not shrink with it. Each arm runs in a process of its own, whose peak memory counts from after a small first step;
the time is that of the fastest pass. JSON on the last line.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from inputs import llama_from_folder
from memory import peak_bytes, peak_resident_bytes
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TransformerDecoder

sys.path.insert(0, str(Path(__file__).parents[1]))  # `dev` is used from the checkout
from dev.chunked_logprobs import ChunkedHead
from dev.shared_prefix import FlexBackend, SDPABackend, SharedPrefixLogprobs, VarlenBackend
from torchtune_grpo.data import Tokenizer
from torchtune_grpo.logprobs import DenseLogprobs, FullSoftmaxHead
from torchtune_grpo.types import Rollout

CASES = [(180, 64, 8), (180, 200, 16), (512, 128, 16), (1024, 128, 8)]
BACKENDS = {"sdpa": SDPABackend, "varlen": VarlenBackend, "flex": FlexBackend}
HEADS = {"chunked": ChunkedHead, "full": FullSoftmaxHead}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = 2
TOLERANCE = 0.01  # relative: bf16 rounds every activation to 8 bits; fp32 stays below 1e-5


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One arm of one case. ``loss`` and ``gradient_norm`` are for comparing the arms."""

    seconds: float
    peak_bytes: int
    loss: float
    gradient_norm: float
    layer_parameters: int
    head_parameters: int


def main() -> None:
    options = parse_arguments()
    if options.measure:
        arm, case = options.measure[0], tuple(map(int, options.measure[1:]))
        print(json.dumps(vars(measure(arm, case, options))))
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        print("Did not run: this machine has no CUDA device.")
        print(json.dumps({"ran": False, "cases": []}))
        return
    cases = []
    for case in CASES if options.case is None else [tuple(options.case)]:
        rounds = [(measure_apart("dense", case), measure_apart("compact", case)) for _ in range(options.rounds)]
        dense, compact = (min(of_arm, key=lambda measured: measured.seconds) for of_arm in zip(*rounds, strict=True))
        cases.append(compare(case, dense, compact))
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in cases[-1].items()})
    setting = {name: getattr(options, name) for name in ("quick", "device", "dtype", "backend", "head", "vocab_size")}
    print(json.dumps({"ran": True, **setting, "cases": cases}))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, help="Hugging Face folder of a llama; default: random weights")
    parser.add_argument("--data", type=Path, help="JSONL with question and answer; default: random tokens")
    parser.add_argument("--quick", action="store_true", help="a small random model")
    parser.add_argument("--vocab-size", type=int, default=49_152, help="of a random model")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--backend", choices=list(BACKENDS), default="sdpa")
    parser.add_argument("--head", choices=list(HEADS), default="chunked")
    parser.add_argument("--rounds", type=int, default=1, help="how often the arms take turns")
    parser.add_argument("--case", type=int, nargs=3, metavar=("P", "R", "G"), help="default: the four of CASES")
    parser.add_argument("--measure", nargs=4, metavar=("ARM", "P", "R", "G"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick and not options.model_dir:
        options.vocab_size = min(options.vocab_size, 4096)
    return options


def compare(case: tuple[int, int, int], dense: Measured, compact: Measured) -> dict[str, float | int]:
    """One entry of the result. Raises RuntimeError if the arms did not compute the same."""
    for name in ("loss", "gradient_norm"):
        expected, found = getattr(dense, name), getattr(compact, name)
        if abs(found - expected) > TOLERANCE * abs(expected):
            raise RuntimeError(f"{case}: the arms differ: {name} {expected} dense, {found} compact")
    prompt, response, group = case
    tokens = group * (prompt + response), prompt + group * response
    head = group * response * dense.head_parameters
    flop_ratio = (tokens[0] * dense.layer_parameters + head) / (tokens[1] * dense.layer_parameters + head)
    speedup = dense.seconds / compact.seconds
    return {
        "P": prompt,
        "R": response,
        "G": group,
        "token_ratio": tokens[0] / tokens[1],
        "flop_ratio": flop_ratio,
        "speedup": speedup,
        "quotient": speedup / flop_ratio,
        "peak_dense_bytes": dense.peak_bytes,
        "peak_compact_bytes": compact.peak_bytes,
        "seconds_dense": dense.seconds,
        "seconds_compact": compact.seconds,
    }


def measure_apart(arm: str, case: tuple[int, int, int]) -> Measured:
    """``measure`` in a fresh process, so that no memory that another arm left behind is reused."""
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", arm, *map(str, case)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def measure(arm: str, case: tuple[int, int, int], options: argparse.Namespace) -> Measured:
    """Forward and backward of one arm."""
    torch.manual_seed(0)
    torch.set_flush_denormal(True)
    model = load_model(options).to(options.device, DTYPES[options.dtype]).train()
    head = HEADS[options.head]()
    dense = DenseLogprobs(head=head)
    logprobs_fn = dense if arm == "dense" else SharedPrefixLogprobs(backend=BACKENDS[options.backend](), head=head)
    rollout = one_group(case, model, options)
    passes: list[tuple[float, float]] = []  # seconds and loss

    def one_pass(rollout: Rollout) -> None:
        model.zero_grad(set_to_none=False)
        start = time.perf_counter()
        loss = (logprobs_fn(model, rollout) * rollout.old_logprobs).sum()
        loss.backward()
        value = float(loss.detach())  # waits for the device
        passes.append((time.perf_counter() - start, value))

    one_pass(one_group((8, 2, 2), model, options))  # allocates the gradients
    passes.clear()
    peak = peak_of(lambda: one_pass(rollout), options.device)
    for _ in range(PASSES - 1):
        one_pass(rollout)
    return Measured(
        seconds=min(seconds for seconds, _ in passes),
        peak_bytes=peak,
        loss=passes[0][1],
        gradient_norm=float(torch.stack([p.grad.float().norm() for p in model.parameters()]).norm()),
        layer_parameters=sum(p.numel() for p in model.layers.parameters() if p.ndim == 2),
        head_parameters=model.tok_embeddings.weight.numel(),
    )


def peak_of(call: Callable[[], None], device: str) -> int:
    """Bytes beyond those in use before: of the allocator on CUDA, of the process on CPU (0 where it cannot be had)."""
    return peak_bytes(call, device) if device == "cuda" else peak_resident_bytes(call) or 0


def load_model(options: argparse.Namespace) -> TransformerDecoder:
    if options.model_dir is None:
        sizes = (
            {"num_layers": 2, "num_heads": 8, "num_kv_heads": 2, "embed_dim": 512, "intermediate_dim": 1024}
            if options.quick
            else {"num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "embed_dim": 576, "intermediate_dim": 1536}
        )
        return llama3_2(vocab_size=options.vocab_size, max_seq_len=8192, rope_base=100_000, scale_factor=1, **sizes)
    return llama_from_folder(str(options.model_dir), "cpu")


def one_group(case: tuple[int, int, int], model: TransformerDecoder, options: argparse.Namespace) -> Rollout:
    """A group without padding: real questions run on to P tokens and real answers to G * R, or random tokens.

    ``old_logprobs`` hold random coefficients for the loss.
    """
    prompt, response, group = case
    if options.data is None or options.model_dir is None:
        ids = torch.randint(model.tok_embeddings.num_embeddings, (prompt + group * response,))
        question, answers = ids[:prompt], ids[prompt:]
    else:
        rows = [json.loads(line) for line in options.data.read_text().splitlines()]
        tokenizer = Tokenizer(path=str(options.model_dir))
        question = run_on([row["question"] for row in rows], tokenizer, prompt)
        answers = run_on([row["answer"] for row in rows], tokenizer, group * response)
    tokens = torch.cat([question.expand(group, -1), answers.view(group, -1)], dim=1)
    rollout = Rollout(
        tokens=tokens,
        positions=torch.arange(prompt + response).expand(group, -1),
        response_mask=torch.ones(group, response, dtype=torch.bool),
        old_logprobs=torch.rand(group, response),
        truncated=torch.zeros(group, dtype=torch.bool),
        groups=torch.zeros(group, dtype=torch.int64),
        answers=[""] * group,
        source=[""] * group,
        group_size=group,
        cache_bytes=0,
    )
    moved = {name: value.to(options.device) for name, value in vars(rollout).items() if isinstance(value, torch.Tensor)}
    return Rollout(**{**vars(rollout), **moved})


def run_on(texts: list[str], tokenizer: Tokenizer, length: int) -> torch.Tensor:
    """The first ``length`` tokens of the texts, one after the other."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(text)
        if len(ids) >= length:
            return torch.tensor(ids[:length])
    raise ValueError(f"--data: got {len(ids)} tokens in all, expected at least {length}")


if __name__ == "__main__":
    main()
