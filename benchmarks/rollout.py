"""Tokens per second of a rollout: ours, torchtune's ``generate``, transformers' ``generate``, and the floor.

    python benchmarks/rollout.py --model-dir models/SmolLM2-135M-Instruct --data gsm8k/train.jsonl
    python benchmarks/rollout.py --quick

All arms sample the same number of tokens from the same prompts and weights at temperature 1, one after the other in
turns, and the fastest turn of each counts; the peers, which take minutes, have two turns. The *floor* is the time of
the model's linear layers alone: every prompt once, then one token a row until all are sampled. ``spread``: lengths
spread so that their mean is a quarter of the maximum, useful tokens counted; its floor pays for the prompts once and
for every useful token as much as a full batch does. The last line is one JSON object. A peer that is not installed is
said to be missing.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from inputs import Size, check, llama_from_folder, make_batch, parser, random_llama
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder

from torchtune_grpo.generation import Generate
from torchtune_grpo.types import PromptBatch

PEERS = ("torchtune", "transformers")
PEER_TURNS = 2
FULL = Size(prompts=8, group=8, prompt=179, response=64)
QUICK = Size(prompts=2, group=4, prompt=40, response=24)


def ours(model: TransformerDecoder, batch: PromptBatch, size: Size, graphs: bool) -> Callable[[], object]:
    generate = Generate(group_size=size.group, max_new_tokens=size.response, cuda_graphs=graphs)
    return lambda: generate(model, batch)


def spread_limits(size: Size) -> Tensor:
    """Lengths of 1 to ``size.response``, exponential with a mean of a quarter of that, shuffled over the rows."""
    rows = size.prompts * size.group
    u = (torch.arange(rows) + 0.5) / rows
    limits = (-size.response / 4 * torch.log1p(-u)).ceil().long().clamp(1, size.response)
    return limits[torch.randperm(rows, generator=torch.Generator().manual_seed(0))]


def spread(model: TransformerDecoder, batch: PromptBatch, size: Size, graphs: bool) -> Callable[[], object]:
    generate = Generate(group_size=size.group, max_new_tokens=size.response, cuda_graphs=graphs)
    limits = spread_limits(size)
    return lambda: generate(model, batch, row_limits=limits)


def torchtune_peer(model: TransformerDecoder, batch: PromptBatch, size: Size) -> Callable[[], object]:
    """torchtune 0.6.1: every row has its own prompt and a static cache."""
    from torchtune.generation import generate

    rows = batch.tokens.repeat_interleave(size.group, dim=0)
    device = rows.device
    with device:
        model.setup_caches(len(rows), torch.float32, decoder_max_seq_len=size.prompt + size.response)

    def run() -> None:
        model.reset_caches()
        generate(model, rows, max_generated_tokens=size.response, pad_id=0, temperature=1.0, top_k=None)

    return run


def transformers_peer(folder: str, batch: PromptBatch, size: Size) -> Callable[[], object]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(batch.tokens.device).eval()

    def run() -> None:
        with torch.no_grad():
            model.generate(
                batch.tokens,
                attention_mask=torch.ones_like(batch.tokens),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                num_return_sequences=size.group,
                min_new_tokens=size.response,
                max_new_tokens=size.response,
                pad_token_id=0,
            )

    return run


class Floor:
    """Seconds that the linear layers need, on inputs of the right shapes."""

    def __init__(self, model: TransformerDecoder, size: Size) -> None:
        linears = [m for m in model.layers.modules() if isinstance(m, nn.Linear)]
        weights = [m.weight.detach() for m in linears]
        head = model.state_dict().get("output.weight", model.tok_embeddings.weight).detach()
        device = head.device
        rows, prompt_tokens = size.prompts * size.group, size.prompts * size.prompt
        self._alive = [int((spread_limits(size) > step).sum()) for step in range(1, size.response)]
        one = {w.shape[1]: torch.randn(rows, w.shape[1], device=device) for w in [*weights, head]}
        all_prompts = {n: torch.randn(prompt_tokens, n, device=device) for n in one}
        self._decode = [(one[w.shape[1]], w) for w in [*weights, head]]
        self._prefill = [(all_prompts[w.shape[1]], w) for w in weights] + [(one[head.shape[1]][: size.prompts], head)]
        self.steps, self.rows = size.response - 1, rows

    def prefill(self) -> None:
        for x, weight in self._prefill:
            nn.functional.linear(x, weight)

    def decode(self) -> None:
        for _ in range(self.steps):
            for x, weight in self._decode:
                nn.functional.linear(x, weight)

    def decode_alive(self) -> None:
        """On as many rows as ``spread`` has left at each token."""
        for rows in filter(None, self._alive):
            for x, weight in self._decode:
                nn.functional.linear(x[:rows], weight)


def seconds(run: Callable[[], object], device: str) -> float:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


def build_arms(args, folder: str, size: Size) -> tuple[dict[str, Callable[[], object]], list[str]]:
    """Arms by name, and what to say about those that cannot run."""
    model = llama_from_folder(folder, args.device)
    vocab_size = model.tok_embeddings.num_embeddings
    batch = make_batch(args, size, vocab_size)
    batch = batch.__class__(**{**vars(batch), "tokens": batch.tokens.to(args.device)})
    floor = Floor(model, size)
    arms: dict[str, Callable[[], object]] = {
        "ours": ours(model, batch, size, args.cuda_graphs),
        "spread": spread(model, batch, size, args.cuda_graphs),
        "floor_prefill": floor.prefill,
        "floor_decode": floor.decode,
        "floor_alive": floor.decode_alive,
    }
    missing = []
    for name, make in {
        "torchtune": lambda: torchtune_peer(llama_from_folder(folder, args.device), batch, size),
        "transformers": lambda: transformers_peer(folder, batch, size),
    }.items():
        if args.no_peers:
            missing.append(f"{name}: not measured, --no-peers")
            continue
        try:
            arms[name] = make()
        except ImportError as error:
            missing.append(f"{name}: not measured, {error}")
    return arms, missing


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=4)
    options.add_argument("--no-peers", action="store_true")
    options.add_argument("--cuda-graphs", action="store_true")
    args = options.parse_args()
    check(args)
    torch.set_num_threads(args.threads)
    size = QUICK if args.quick else FULL
    with TemporaryDirectory() as scratch:
        folder = args.model_dir
        if args.quick:
            folder = scratch
            random_llama(Path(scratch))
        arms, missing = build_arms(args, folder, size)
        times: dict[str, list[float]] = {name: [] for name in arms}
        with torch.no_grad():
            for turn in range(args.repeats):
                for name, run in arms.items():
                    if turn < PEER_TURNS or name not in PEERS:
                        times[name].append(seconds(run, args.device))
    report(size, {name: min(values) for name, values in times.items()}, missing, args)


def report(size: Size, best: dict[str, float], missing: list[str], args) -> None:
    tokens = size.prompts * size.group * size.response
    useful = int(spread_limits(size).sum())
    a_token = best["floor_decode"] / (size.prompts * size.group * (size.response - 1))
    rate = {name: tokens / best[name] for name in ("ours", *PEERS) if name in best}
    rate["floor"] = tokens / (best["floor_prefill"] + best["floor_decode"])
    rate["spread"] = useful / best["spread"]
    spread_floor = useful / (best["floor_prefill"] + a_token * (useful - size.prompts * size.group))
    print(f"{size}, {args.threads} threads, device {args.device}; fastest of {args.repeats} turns")
    for name, value in rate.items():
        print(f"{name:14s}{value:10.1f} tokens/s")
    print(f"{'spread floor':14s}{spread_floor:10.1f} tokens/s")
    alive = useful / (best["floor_prefill"] + best["floor_alive"])
    print(f"{'alive floor':14s}{alive:10.1f} tokens/s: spread, the linear layers alone on the rows left at each token")
    for line in missing:
        print(line)
    if args.device == "cpu":
        print("CUDA and CUDA graphs: not run (--device cuda --cuda-graphs on a machine with a GPU)")
    result: dict[str, float | None] = {n: rate.get(n) for n in ("ours", *PEERS, "floor")}
    for peer in ("floor", *PEERS):
        result[f"ours_over_{peer}"] = rate["ours"] / rate[peer] if peer in rate else None
    result["spread_over_floor"] = rate["spread"] / spread_floor
    print(json.dumps(result))


if __name__ == "__main__":
    main()
