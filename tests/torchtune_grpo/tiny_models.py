"""Small random models, prompts for them, and their forward written out from scratch in float64."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from torchtune.modules import TransformerDecoder

from torchtune_grpo.models import qwen3
from torchtune_grpo.types import PromptBatch, Rollout

VOCAB = 23
KINDS = ["mha", "gqa", "qwen2", "qwen3"]
NO_STOP = (VOCAB + 7,)  # an id that no row can sample


def make_model(kind: str, *, seed: int = 0, tied: bool = True, max_seq_len: int = 32) -> TransformerDecoder:
    """Every parameter random, norms and biases included, so that none can be left out unnoticed."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4 if kind == "mha" else 2,
        "embed_dim": 32,
        "intermediate_dim": 40,
        "max_seq_len": max_seq_len,
        "rope_base": 500,
        "tie_word_embeddings": tied,
    }
    if kind == "qwen3":
        model = qwen3(**sizes, head_dim=12, norm_eps=1e-5)
    else:
        model = qwen2(**sizes) if kind == "qwen2" else llama3_2(**sizes, scale_factor=1)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.2)
        else:
            nn.init.uniform_(parameter, 0.4, 1.6)
    return model


def dense_logits(model: TransformerDecoder, ids: Sequence[int]) -> Tensor:
    """Logits ``[len(ids), V]`` in float64, from the weights alone: no module of torchtune runs."""
    w = {name: tensor.double() for name, tensor in model.state_dict().items()}
    attention = model.layers[0].attn
    heads, kv_heads, width = attention.num_heads, attention.num_kv_heads, attention.head_dim
    base = attention.pos_embeddings.base
    h = w["tok_embeddings.weight"][torch.tensor(ids)]
    n = len(ids)
    causal = torch.ones(n, n, dtype=torch.bool).tril()
    halves = "layers.0.attn.q_proj.bias" in w or "layers.0.attn.q_proj.norm.scale" in w  # Qwen's rotary layout
    for i in range(len(model.layers)):
        at = f"layers.{i}."

        def project(name: str, count: int, x: Tensor, at: str = at) -> Tensor:
            y = x @ w[f"{at}attn.{name}.weight"].T + w.get(f"{at}attn.{name}.bias", 0.0)
            heads = y.view(n, count, width).transpose(0, 1)
            scale = w.get(f"{at}attn.{name}.norm.scale")  # Qwen3's queries and keys
            return heads if scale is None else _rms_norm(heads, scale)

        x = _rms_norm(h, w[f"{at}sa_norm.scale"])
        q = _rotate(project("q_proj", heads, x), base, halves)
        k = _rotate(project("k_proj", kv_heads, x), base, halves).repeat_interleave(heads // kv_heads, dim=0)
        v = project("v_proj", kv_heads, x).repeat_interleave(heads // kv_heads, dim=0)
        scores = (q @ k.transpose(1, 2) / math.sqrt(width)).masked_fill(~causal, -torch.inf)
        mixed = (scores.softmax(dim=-1) @ v).transpose(0, 1).reshape(n, -1)
        h = h + mixed @ w[f"{at}attn.output_proj.weight"].T
        x = _rms_norm(h, w[f"{at}mlp_norm.scale"])
        gate = nn.functional.silu(x @ w[f"{at}mlp.w1.weight"].T)
        h = h + (gate * (x @ w[f"{at}mlp.w3.weight"].T)) @ w[f"{at}mlp.w2.weight"].T
    head = w.get("output.weight", w["tok_embeddings.weight"])
    return _rms_norm(h, w["norm.scale"]) @ head.T


def dense_logprobs(model: TransformerDecoder, rollout: Rollout, temperature: float) -> Tensor:
    """Log-probabilities ``[N, R]`` of the responses by ``dense_logits``, row by row without padding."""
    out = torch.zeros(rollout.response_mask.shape, dtype=torch.float64)
    for row, (tokens, prompt, response) in enumerate(
        zip(rollout.tokens, rollout.prompt_lengths.tolist(), rollout.response_lengths.tolist(), strict=True)
    ):
        start = rollout.prompt_width - prompt
        ids = tokens[start : start + prompt + response].tolist()
        logprobs = (dense_logits(model, ids) / temperature).log_softmax(dim=-1)
        for i in range(response):
            out[row, i] = logprobs[prompt - 1 + i, ids[prompt + i]]
    return out


def dense_greedy(
    model: TransformerDecoder, prompt: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]
) -> list[int]:
    """The likeliest token again and again, everything computed anew for each."""
    ids = list(prompt)
    for _ in range(max_new_tokens):
        ids.append(int(dense_logits(model, ids)[-1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def make_prompts(
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int] | None = None,
    pad_id: int = 0,
    stop_ids: tuple[int, ...] = NO_STOP,
) -> PromptBatch:
    width = max(map(len, prompts))
    return PromptBatch(
        tokens=torch.tensor([[pad_id] * (width - len(ids)) + list(ids) for ids in prompts]),
        lengths=torch.tensor([len(ids) for ids in prompts]),
        seeds=torch.tensor(range(len(prompts)) if seeds is None else seeds),
        pad_id=pad_id,
        stop_ids=stop_ids,
        answers=[f"answer {i}" for i in range(len(prompts))],
        solutions=[[]] * len(prompts),
        source=[f"source {i}" for i in range(len(prompts))],
    )


def responses(rollout: Rollout) -> list[list[int]]:
    """Each row's response, stop token included, padding left out."""
    return [
        row[:length] for row, length in zip(rollout.responses.tolist(), rollout.response_lengths.tolist(), strict=True)
    ]


def _rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + 1e-5) * scale


def _rotate(x: Tensor, base: float, halves: bool) -> Tensor:
    """Rotary embedding of ``x [heads, n, h]``, of pairs (i, i + h/2) if ``halves``, else (2i, 2i + 1)."""
    half = x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * rates
    a, b = (x[..., :half], x[..., half:]) if halves else (x[..., ::2], x[..., 1::2])
    turned = a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()
    return torch.cat(turned, dim=-1) if halves else torch.stack(turned, dim=-1).flatten(-2)
