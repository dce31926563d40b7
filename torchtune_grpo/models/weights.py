"""Weights in and out of Hugging Face folders: safetensors only, both name schemes, checked before anything loads.

The family is read from the folder's ``config.json`` (``model_type``), so no config key can contradict it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torchtune.models.convert_weights import hf_to_tune, tune_to_hf
from torchtune.models.qwen2 import qwen2_hf_to_tune, qwen2_tune_to_hf
from torchtune.modules import RMSNorm, TransformerDecoder

from torchtune_grpo.config import ConfigError
from torchtune_grpo.config_values import describe, fits, options, show
from torchtune_grpo.models.qwen3 import NormedHeadsLinear, qwen3_hf_to_tune, qwen3_tune_to_hf

TIED_HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_FLOATS = ("BF16", "F16", "F32", "F64")
MAX_SHARD_BYTES = 5 * 2**30


@dataclass(frozen=True)
class Family:
    """How one ``model_type`` maps between Hugging Face and torchtune names."""

    from_hf: Callable[..., dict[str, Tensor]]
    to_hf: Callable[..., dict[str, Tensor]]


FAMILIES = {
    "llama": Family(hf_to_tune, tune_to_hf),
    "qwen2": Family(qwen2_hf_to_tune, qwen2_tune_to_hf),
    "qwen3": Family(qwen3_hf_to_tune, qwen3_tune_to_hf),
}

_CONFIG_KEYS = {
    "num_attention_heads": int,
    "hidden_size": int,
    "num_key_value_heads": int | None,
    "head_dim": int | None,
    "rms_norm_eps": float | None,
    "rope_theta": float | None,
    "rope_scaling": dict | None,
    "rope_parameters": dict | None,
}
"""What is read of a config.json, beside its ``model_type``."""


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """``config.json`` of a Hugging Face folder. Raises ConfigError: missing, unreadable, or another family."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"weights: got {folder}, expected a Hugging Face folder with config.json and *.safetensors")
    try:
        config = json.loads(path.read_text())
    except ValueError as e:
        raise ConfigError(f"weights: cannot read {path}: {e}") from e
    if not isinstance(config, dict):
        raise ConfigError(f"weights: got a {type(config).__name__} in {path}, expected a JSON object")
    if config.get("model_type") not in list(FAMILIES):
        raise ConfigError(
            f"weights: got model_type {config.get('model_type')!r} in {path}, expected {sorted(FAMILIES)}"
        )
    for key, option in _CONFIG_KEYS.items():
        if not any(fits(config.get(key), kind) for kind in options(option)) or config.get(key) == 0:
            raise ConfigError(f"weights: {key}: got {show(config.get(key))} in {path}, expected {describe(option)}")
    return config


def check_weights(folder: str | Path, model: TransformerDecoder) -> None:
    """Compares a folder with ``model`` (which may be on meta) from its config and its tensors' headers alone.

    Raises ConfigError that names the first differences: another vocabulary, width, depth or family, or another
    number of heads, norm epsilon or rotary embedding or a sliding window, which no shape would show.
    """
    config = read_hf_config(folder)
    shapes: dict[str, Tensor] = {}
    for path in _safetensors(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
                    header = file.get_slice(name)
                    if header.get_dtype() not in _FLOATS:
                        raise ConfigError(
                            f"weights: {name}: got dtype {header.get_dtype()} in {path}, expected one of {_FLOATS}"
                        )
                    shapes[name] = torch.empty(header.get_shape(), device="meta")
        except (SafetensorError, OSError) as e:
            raise ConfigError(f"weights: cannot read {path}, perhaps an incomplete download: {e}") from e
    try:
        converted = _convert(FAMILIES[config["model_type"]].from_hf, shapes, config)
    except Exception as e:  # torchtune raises bare Exception for a name it does not know
        raise ConfigError(f"weights: the tensors in {folder} contradict its config.json: {e}") from e
    found: dict[str, Any] = {k: tuple(v.shape) for k, v in converted.items()}
    wanted: dict[str, Any] = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    for name, (theirs, ours) in _constants(config, model).items():
        found[name], wanted[name] = theirs, ours
    differing = [k for k in sorted(found.keys() | wanted.keys()) if found.get(k) != wanted.get(k)]
    if differing:
        shown = [f"  {k}: weights {found.get(k)}, model {wanted.get(k)}" for k in differing[:6]]
        more = [f"  ... {len(differing) - 6} more"] if len(differing) > 6 else []
        raise ConfigError(
            f"weights: got {folder}, expected weights of the model that `model` builds; they differ (None = absent):\n"
            + "\n".join(shown + more)
            + "\nChange `model` or `weights`."
        )


def _constants(config: Mapping[str, Any], model: TransformerDecoder) -> dict[str, tuple[float, float]]:
    """What logits depend on beside the tensors: name -> (the folder's value, the model's)."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    attention = model.layers[0].attn
    embedding = attention.pos_embeddings
    found = {
        "num_attention_heads": (config.get("num_attention_heads"), attention.num_heads),
        "num_key_value_heads": (config.get("num_key_value_heads"), attention.num_kv_heads),
        "rms_norm_eps": (config.get("rms_norm_eps"), model.norm.eps),
        "rope_theta": (rope.get("rope_theta", config.get("rope_theta")), embedding.base),
        "rope_scaling.factor": (rope.get("factor", 1.0), getattr(embedding, "scale_factor", 1.0)),
        "use_sliding_window": (config.get("use_sliding_window"), False),
    }
    return {name: (float(a), float(b)) for name, (a, b) in found.items() if a is not None}


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """The folder's tensors under torchtune's names, on CPU, in the stored dtype."""
    config = read_hf_config(folder)
    tensors: dict[str, Tensor] = {}
    for path in _safetensors(folder):
        with safe_open(path, framework="pt") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return _convert(FAMILIES[config["model_type"]].from_hf, tensors, config)


def read_lm_head(folder: str | Path, start: int, stop: int) -> Tensor:
    """Rows ``start`` to ``stop`` of the LM head ``[V, D]``, on CPU, in the stored dtype; nothing else is read."""
    name = EMBEDDING if read_hf_config(folder).get("tie_word_embeddings") else TIED_HEAD
    for path in _safetensors(folder):
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_slice(name)[start:stop]
    raise ConfigError(f"weights: got {folder} without {name}, expected the weight of its LM head")


def write_hf_folder(
    folder: str | Path, state_dict: Mapping[str, Tensor], hf_config: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Writes ``config.json`` and safetensors shards (at most 5 GiB each) that transformers opens.

    ``state_dict``: full CPU tensors under torchtune's names. Local; only rank 0 calls it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(hf_config) | {"dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = _convert(FAMILIES[config["model_type"]].to_hf, dict(state_dict), config)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    shards = _shards(tensors)
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    index: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    total = sum(t.nbytes for t in tensors.values())
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=1)
    (folder / "model.safetensors.index.json").write_text(text)


def scratch_hf_config(model: TransformerDecoder, *, bos_id: int | None, eos_id: int, pad_id: int) -> dict[str, Any]:
    """``config.json`` of a llama or Qwen3 that was built here from scratch and has no folder to copy it from.

    Raises ConfigError for a model with biases (the Qwen2 family), which neither config can describe.
    """
    if any(name.endswith(".bias") for name, _ in model.named_parameters()):
        raise ConfigError(
            "model: got one with biases and no `weights`; only llama and Qwen3 models can be trained from scratch"
        )
    attention = model.layers[0].attn
    is_qwen3 = isinstance(attention.q_proj, NormedHeadsLinear)
    assert isinstance(model.norm, RMSNorm)
    return {
        "architectures": ["Qwen3ForCausalLM" if is_qwen3 else "LlamaForCausalLM"],
        "model_type": "qwen3" if is_qwen3 else "llama",
        "hidden_size": attention.embed_dim,
        "intermediate_size": model.layers[0].mlp.w1.out_features,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": model.tok_embeddings.num_embeddings,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm.eps,
        "rope_theta": float(attention.pos_embeddings.base),
        "rope_scaling": _rope_scaling(attention.pos_embeddings),
        "hidden_act": "silu",
        "tie_word_embeddings": not isinstance(model.output, nn.Module),
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
    }


def _rope_scaling(embedding: nn.Module) -> dict[str, Any] | None:
    """Llama 3.1's stretched frequencies, None where they are not stretched."""
    if getattr(embedding, "scale_factor", 1) == 1:
        return None
    return {
        "rope_type": "llama3",
        "factor": float(embedding.scale_factor),
        "low_freq_factor": float(embedding.low_freq_factor),
        "high_freq_factor": float(embedding.high_freq_factor),
        "original_max_position_embeddings": embedding.old_context_len,
    }


def _convert(fn: Callable[..., dict[str, Tensor]], tensors: dict[str, Tensor], config: Mapping[str, Any]) -> dict:
    heads, dim = config["num_attention_heads"], config["hidden_size"]
    if config.get("tie_word_embeddings"):
        tensors.pop(TIED_HEAD, None)
    return fn(
        tensors,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads", heads),
        dim=dim,
        head_dim=config.get("head_dim") or dim // heads,
    )


def _safetensors(folder: str | Path) -> list[Path]:
    """The folder's shards: those of its index if it has one, else all. Raises ConfigError: none, or one is missing."""
    index = Path(folder) / "model.safetensors.index.json"
    if index.is_file():
        try:
            paths = [Path(folder) / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError(f"weights: cannot read {index}, expected a JSON object with weight_map: {e!r}") from e
    else:
        paths = sorted(Path(folder).glob("*.safetensors"))
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise ConfigError(f"weights: {folder} lacks {missing}, perhaps an incomplete download")
    if not paths:
        raise ConfigError(f"weights: got {folder} without any *.safetensors, expected a Hugging Face folder")
    return paths


def _shards(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > MAX_SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards
