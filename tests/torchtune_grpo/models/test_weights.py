"""Weights in and out of Hugging Face folders, with transformers as the other side."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torchtune.models.llama3_2 import llama3_2
from torchtune.models.qwen2 import qwen2
from torchtune.modules import TransformerDecoder
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from tests.torchtune_grpo.tiny_models import make_model
from torchtune_grpo.config import ConfigError
from torchtune_grpo.models import qwen3, tiny_llama, weights
from torchtune_grpo.models.weights import check_weights, read_lm_head, read_weights, scratch_hf_config, write_hf_folder

TOKENS = torch.tensor([[1, 5, 9, 2, 2, 17, 0, 30], [3, 3, 8, 1, 29, 4, 6, 7]])
VOCAB = 31
FOLDERS = {  # model_type, key-value heads of 4, tied
    "llama": ("llama", 4, False),
    "llama_tied": ("llama", 4, True),
    "llama_gqa": ("llama", 2, False),
    "llama_gqa_tied": ("llama", 1, True),
    "qwen2": ("qwen2", 2, False),
    "qwen2_tied": ("qwen2", 2, True),
    "qwen3": ("qwen3", 2, False),
    "qwen3_tied": ("qwen3", 2, True),
}
HEAD_DIM = 12  # of Qwen3, where it is a size of its own; 32 / 4 elsewhere


def _hf_model(name: str) -> PreTrainedModel:
    model_type, kv_heads, tied = FOLDERS[name]
    config_class = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[model_type]
    config = config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 700.0},
        tie_word_embeddings=tied,
        **({"head_dim": HEAD_DIM} if model_type == "qwen3" else {}),
    )
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return _randomized(model)


def _randomized(model: torch.nn.Module) -> Any:
    """The model with every parameter random, norms around 1."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.3)
    return model


def _tune_model(name: str, **changes: int) -> TransformerDecoder:
    model_type, kv_heads, tied = FOLDERS[name]
    sizes = {
        "vocab_size": VOCAB,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": kv_heads,
        "embed_dim": 32,
        "intermediate_dim": 40,
        "max_seq_len": 64,
        "rope_base": 700,
        "tie_word_embeddings": tied,
    } | changes
    if model_type == "qwen3":
        return qwen3(**({"head_dim": HEAD_DIM, "norm_eps": 1e-5} | sizes))
    return qwen2(**sizes) if model_type == "qwen2" else llama3_2(**sizes, scale_factor=1)


def _save(name: str, folder: Path) -> Path:
    _hf_model(name).save_pretrained(folder)
    return folder


@torch.no_grad()
def _difference(tune: TransformerDecoder, hf: PreTrainedModel) -> float:
    """Largest difference of the logits, as a share of the largest logit."""
    ours, theirs = tune.eval()(TOKENS % VOCAB), hf.eval()(TOKENS % VOCAB).logits.float()
    assert theirs.std() > 0.1
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_of_transformers_loads_with_equal_logits(name: str, tmp_path: Path) -> None:
    model = _tune_model(name)
    check_weights(_save(name, tmp_path), model)
    model.load_state_dict(read_weights(tmp_path))
    assert _difference(model, _hf_model(name)) < 1e-5


@pytest.mark.parametrize("name", FOLDERS)
def test_read_lm_head_gives_the_rows_that_make_the_logits(name: str, tmp_path: Path) -> None:
    hf = _hf_model(name)
    hf.save_pretrained(tmp_path)
    assert torch.equal(read_lm_head(tmp_path, 5, 9), hf.lm_head.weight.detach()[5:9])


@pytest.mark.parametrize("name", FOLDERS)
def test_written_folder_opens_in_transformers_with_equal_logits(name: str, tmp_path: Path) -> None:
    config = json.loads((_save(name, tmp_path / "in") / "config.json").read_text())
    torch.manual_seed(2)
    model = _randomized(_tune_model(name))
    state = model.state_dict()
    write_hf_folder(tmp_path / "out", state, config, torch.float32)
    assert _difference(model, AutoModelForCausalLM.from_pretrained(tmp_path / "out")) < 1e-5
    back = read_weights(tmp_path / "out")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_model_built_from_scratch_exports_with_equal_logits(kv_heads: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _randomized(tiny_llama(vocab_size=VOCAB, num_kv_heads=kv_heads, embed_dim=32, intermediate_dim=40))
    config = scratch_hf_config(model, bos_id=None, eos_id=1, pad_id=0)
    write_hf_folder(tmp_path, model.state_dict(), config, torch.float32)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert _difference(model, hf) < 1e-5
    assert (hf.config.eos_token_id, hf.config.pad_token_id, hf.config.bos_token_id) == (1, 0, None)
    assert hf.config.max_position_embeddings == 256


@pytest.mark.parametrize("name", ["qwen3", "qwen3_tied"])
def test_qwen3_built_from_scratch_exports_with_equal_logits(name: str, tmp_path: Path) -> None:
    model = _randomized(_tune_model(name))
    config = scratch_hf_config(model, bos_id=None, eos_id=1, pad_id=0)
    write_hf_folder(tmp_path, model.state_dict(), config, torch.float32)
    check_weights(tmp_path, model)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(hf).__name__ == "Qwen3ForCausalLM" and hf.config.tie_word_embeddings == (name == "qwen3_tied")
    assert _difference(model, hf) < 1e-5


@pytest.mark.parametrize("scale_factor", [1, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_scratch_hf_config_keeps_rotary_base_scaling_and_tying(scale_factor: int, tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 32, "intermediate_dim": 40}
    model = llama3_2(
        vocab_size=VOCAB,
        max_seq_len=16384,
        rope_base=40_000,
        norm_eps=1e-3,
        scale_factor=scale_factor,
        tie_word_embeddings=tied,
        **sizes,
    )
    config = scratch_hf_config(model, bos_id=2, eos_id=1, pad_id=0)
    write_hf_folder(tmp_path, model.state_dict(), config, torch.float32)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert hf.config.tie_word_embeddings == tied
    frequencies = hf.model.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, model.layers[0].attn.pos_embeddings.theta)
    assert _difference(model, hf) < 1e-5


def test_scratch_hf_config_refuses_a_model_with_biases() -> None:
    with pytest.raises(ConfigError, match="model: .*bias"):
        scratch_hf_config(make_model("qwen2"), bos_id=None, eos_id=1, pad_id=0)


def test_write_hf_folder_stores_the_dtype_asked_for(tmp_path: Path) -> None:
    model = _tune_model("llama")
    config = scratch_hf_config(model, bos_id=None, eos_id=1, pad_id=0) | {"torch_dtype": "float64"}
    write_hf_folder(tmp_path, model.state_dict(), config, torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == "bfloat16" and "torch_dtype" not in written
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert {t.dtype for t in read_weights(tmp_path).values()} == {torch.bfloat16}


@pytest.mark.parametrize("limit", [20_000, 1])
def test_large_models_are_written_in_shards(limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_SHARD_BYTES", limit)
    model = _tune_model("llama_gqa")
    config = scratch_hf_config(model, bos_id=None, eos_id=1, pad_id=0)
    write_hf_folder(tmp_path, model.state_dict(), config, torch.float32)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(load_file(file) for file in files)  # none is empty
    assert sum(t.nbytes for f in files for t in load_file(f).values()) == 4 * sum(p.numel() for p in model.parameters())
    assert _difference(model, AutoModelForCausalLM.from_pretrained(tmp_path)) < 1e-5
    check_weights(tmp_path, model)
    assert read_weights(tmp_path).keys() == model.state_dict().keys()


def test_head_saved_beside_tied_embeddings_is_passed_over(tmp_path: Path) -> None:
    _save("llama_tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    check_weights(tmp_path, _tune_model("llama_tied"))
    assert "output.weight" not in read_weights(tmp_path)


@pytest.mark.parametrize(
    ("saved", "model", "names"),
    [
        ("llama", _tune_model("llama", vocab_size=32), "tok_embeddings.weight.*31.*32"),
        ("llama", _tune_model("llama", num_layers=3), "layers.2.*None"),
        ("llama", _tune_model("llama", num_layers=1), "layers.1.*None"),
        ("llama", _tune_model("llama", intermediate_dim=48), "mlp.w1.weight.*40.*48"),
        ("llama", _tune_model("llama_gqa"), "k_proj.weight.*32.*16"),
        ("llama", _tune_model("llama_tied"), "output.weight"),
        ("llama_tied", _tune_model("llama"), "output.weight"),
        ("qwen2", _tune_model("llama_gqa"), "q_proj.bias"),
        ("llama_gqa", _tune_model("qwen2"), "q_proj.bias"),
        ("llama_gqa", _tune_model("qwen3"), "q_proj.norm.scale.*None"),
        ("qwen3", _tune_model("qwen2"), "q_proj.bias.*None"),
        ("qwen3", _tune_model("qwen3", head_dim=8), r"k_proj.norm.scale.*\(12,\).*\(8,\)"),
        ("qwen3", _tune_model("qwen3_tied"), "output.weight.*None"),
    ],
)
def test_check_weights_names_what_differs(saved: str, model: TransformerDecoder, names: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"(?s)weights: got .*{names}.*Change `model` or `weights`"):
        check_weights(_save(saved, tmp_path), model)


def test_check_weights_works_on_a_meta_model(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = _tune_model("qwen2_tied")
    check_weights(_save("qwen2_tied", tmp_path), model)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rms_norm_eps", 1e-6),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 10_000.0}),
        ("use_sliding_window", True),
    ],
)
def test_check_weights_compares_what_shapes_do_not_show(key: str, value: object, tmp_path: Path) -> None:
    path = _save("llama", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match="rope_theta|rms_norm_eps|use_sliding_window"):
        check_weights(tmp_path, _tune_model("llama"))


def test_check_weights_refuses_other_heads_of_the_same_shapes(tmp_path: Path) -> None:
    path = _save("llama", tmp_path) / "config.json"
    config = json.loads(path.read_text())
    halved = {key: config[key] // 2 for key in ("num_attention_heads", "num_key_value_heads")}
    path.write_text(json.dumps(config | halved | {"head_dim": 2 * config["head_dim"]}))
    with pytest.raises(ConfigError, match="num_attention_heads: weights 2.0, model 4.0"):
        check_weights(tmp_path, _tune_model("llama"))


def test_unsupported_and_incomplete_folders_are_refused(tmp_path: Path) -> None:
    model = _tune_model("llama")
    with pytest.raises(ConfigError, match="config.json"):
        check_weights(tmp_path, model)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="gpt2.*llama.*qwen2.*qwen3"):
        check_weights(tmp_path, model)
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ConfigError, match="config.json"):
        check_weights(tmp_path, model)


def test_folder_without_or_with_broken_tensors_is_refused(tmp_path: Path) -> None:
    model = _tune_model("llama")
    path = _save("llama", tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])  # an interrupted download
    with pytest.raises(ConfigError, match="weights: .*model.safetensors"):
        check_weights(tmp_path, model)
    path.unlink()
    with pytest.raises(ConfigError, match="weights: .*safetensors"):
        check_weights(tmp_path, model)


def test_tensors_that_contradict_their_config_are_refused(tmp_path: Path) -> None:
    path = _save("llama", tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_attention_heads": 3, "head_dim": None}))
    with pytest.raises(ConfigError, match="contradict"):
        check_weights(tmp_path, _tune_model("llama"))


def test_tensors_of_unknown_name_are_refused(tmp_path: Path) -> None:
    path = _save("llama", tmp_path) / "model.safetensors"
    tensors = load_file(path) | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="q_norm"):
        check_weights(tmp_path, _tune_model("llama"))
