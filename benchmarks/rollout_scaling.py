"""How the time of a rollout grows, and how much of it a second rank takes away.

    python benchmarks/rollout_scaling.py
    python benchmarks/rollout_scaling.py --model-dir models/SmolLM2-135M-Instruct
    python benchmarks/rollout_scaling.py --quick      # one timed rollout a case, on a quarter of the tokens

First one process: prompts, group, prompt length, response length and vocabulary doubled one at a time. Then weak
scaling: one rank with one thread against two ranks with one thread each on twice the prompts, with sharded and with
gathered parameters. The last line is one JSON object: seconds by case, and ``efficiency`` = time of one rank / time of
two. Without ``--model-dir`` the model is small and random.
"""

import json
import os
import socket
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.multiprocessing as mp
from inputs import Size, llama_from_folder, make_batch, parser, random_llama

from torchtune_grpo.generation import Generate
from torchtune_grpo.training.distributed import build_sharded, init_ranks, shut_down

BASE = Size(prompts=4, group=4, prompt=128, response=32)
QUICK = Size(prompts=2, group=2, prompt=64, response=16)
REPEATS = 3
VOCABULARY = 8192


def seconds(args, model, size: Size, vocabulary: int, *, gather: bool = True) -> float:
    generate = Generate(group_size=size.group, max_new_tokens=size.response, gather_parameters=gather)
    batch = make_batch(args, size, vocabulary)
    times = []
    for _ in range(1 + (1 if args.quick else REPEATS)):  # the first warms up
        start = time.perf_counter()
        generate(model, batch)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def growth(args, base: Size, folder: Path) -> dict[str, float]:
    cases = {
        "base": (base, VOCABULARY),
        "prompts x2": (replace(base, prompts=2 * base.prompts), VOCABULARY),
        "group x2": (replace(base, group=2 * base.group), VOCABULARY),
        "prompt length x2": (replace(base, prompt=2 * base.prompt), VOCABULARY),
        "response length x2": (replace(base, response=2 * base.response), VOCABULARY),
        "vocabulary x2": (base, 2 * VOCABULARY),
        "vocabulary x8": (base, 8 * VOCABULARY),
    }
    result = {}
    for name, (size, vocabulary) in cases.items():
        if args.model_dir and name.startswith("vocabulary"):
            continue
        model_dir = args.model_dir
        if model_dir is None:
            model_dir = str(folder / str(vocabulary))
            random_llama(Path(model_dir), vocab_size=vocabulary)
        model = llama_from_folder(model_dir, args.device)
        result[name] = seconds(args, model, size, vocabulary)
        print(f"{name:20s}{result[name]:8.3f} s{result[name] / result['base']:8.2f}", flush=True)
    return result


def _rank(rank: int, world_size: int, port: int, args, base: Size, model_dir: str, out: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = init_ranks(args.device, num_threads=1)
    source = llama_from_folder(model_dir, "cpu")
    times = {}
    for gather in (True, False):
        model = build_sharded(lambda: deepcopy(source).to("meta"), source.state_dict, ranks=ranks)
        times["gathered" if gather else "sharded"] = seconds(args, model, base, VOCABULARY, gather=gather)
    if rank == 0:
        Path(out).write_text(json.dumps(times))
    shut_down()


def scaling(args, base: Size, model_dir: str, folder: Path) -> dict[str, dict[str, float]]:
    result = {}
    for world_size in (1, 2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        out = str(folder / f"ranks_{world_size}.json")
        mp.spawn(_rank, (world_size, port, args, base, model_dir, out), nprocs=world_size)
        result[str(world_size)] = json.loads(Path(out).read_text())
    return result


def main() -> None:
    args = parser(__doc__).parse_args()
    base = QUICK if args.quick else BASE
    torch.set_num_threads(args.threads)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        grown = growth(args, base, folder)
        model_dir = args.model_dir or str(folder / str(VOCABULARY))
        ranks = scaling(args, base, model_dir, folder)
    efficiency = {name: ranks["1"][name] / ranks["2"][name] for name in ("gathered", "sharded")}
    for name, value in efficiency.items():
        print(f"{name:20s}1 rank {ranks['1'][name]:.3f} s, 2 ranks {ranks['2'][name]:.3f} s, efficiency {value:.2f}")
    print(json.dumps({"growth": grown, "ranks": ranks, "efficiency": efficiency}))


if __name__ == "__main__":
    main()
