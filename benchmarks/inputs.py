"""What the benchmarks run on: a model and prompts from local files, or small random ones."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from forced_length import NO_STOP
from torch import nn
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules import TransformerDecoder

from torchtune_grpo.data import Prompt, Tokenizer
from torchtune_grpo.models.weights import read_hf_config, read_weights, scratch_hf_config, write_hf_folder
from torchtune_grpo.types import PromptBatch


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much to generate: prompts of ``prompt`` tokens, ``group`` completions each of ``response`` tokens."""

    prompts: int
    group: int
    prompt: int
    response: int


def parser(description: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=description.splitlines()[0])
    result.add_argument("--model-dir", help="Hugging Face folder of a llama (SmolLM2-135M-Instruct in the tables)")
    result.add_argument("--data", help="GSM8K's train.jsonl; random tokens without it")
    result.add_argument("--quick", action="store_true", help="a small random model, within a minute")
    result.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    result.add_argument("--threads", type=int, default=torch.get_num_threads())
    return result


def check(args: argparse.Namespace) -> None:
    if not args.quick and args.model_dir is None:
        raise SystemExit("--model-dir: got none, expected a Hugging Face folder, or --quick for a small random model")


def llama_from_folder(folder: str, device: str) -> TransformerDecoder:
    """Any llama with plain RoPE, fp32."""
    config = read_hf_config(folder)
    model = llama3_2(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        embed_dim=config["hidden_size"],
        intermediate_dim=config["intermediate_size"],
        max_seq_len=config["max_position_embeddings"],
        rope_base=int(config["rope_theta"]),
        norm_eps=config["rms_norm_eps"],
        scale_factor=1,
    )
    model.load_state_dict(read_weights(folder))
    return model.to(device)


def random_llama(folder: Path, *, vocab_size: int = 4096, num_layers: int = 4, embed_dim: int = 256) -> None:
    """A small random llama, written where every engine can load it from."""
    torch.manual_seed(0)
    model = llama3_2(
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_heads=8,
        num_kv_heads=2,
        embed_dim=embed_dim,
        intermediate_dim=3 * embed_dim,
        max_seq_len=4096,
        rope_base=10_000,
        scale_factor=1,
    )
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
    hf_config = scratch_hf_config(model, bos_id=None, eos_id=1, pad_id=0)
    write_hf_folder(folder, model.state_dict(), hf_config, torch.float32)


def make_batch(args: argparse.Namespace, size: Size, vocab_size: int) -> PromptBatch:
    """Prompts of exactly ``size.prompt`` tokens: questions in the R1 template, followed by as much of the next ones
    as it takes, so that every engine does the same work."""
    if args.data is None or args.quick:
        tokens = torch.randint(5, vocab_size, (size.prompts, size.prompt), generator=torch.Generator().manual_seed(0))
    else:
        tokenizer, prompt = Tokenizer(path=args.model_dir), Prompt()
        lines = Path(args.data).read_text().splitlines()[: 8 * size.prompts]
        encoded = [prompt.encode(tokenizer, json.loads(line)["question"]) for line in lines]
        rows = [(sum(encoded[i:] + encoded[:i], []) * 8)[-size.prompt :] for i in range(size.prompts)]
        tokens = torch.tensor(rows)
    return PromptBatch(
        tokens=tokens,
        lengths=torch.full((size.prompts,), size.prompt),
        seeds=torch.arange(size.prompts),
        pad_id=0,
        stop_ids=(NO_STOP,),
        answers=[""] * size.prompts,
        solutions=[[]] * size.prompts,
        source=[""] * size.prompts,
    )
