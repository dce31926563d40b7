"""Folders of weights and of tokenizers with every fault; all are found before a tensor is read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.bad_input.entry import run_recipe
from torchtune_grpo.data.tiny import TOKENIZER_FOLDER
from torchtune_grpo.training.checkpoint_files import resolve_weights

SAFETENSORS = "model.safetensors"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def config(**changes: Any) -> Callable[[Path], None]:
    """Keys of config.json set, or taken out where they are None."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))

    return change


def written(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content)


def removed(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names]


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        found = load_file(folder / SAFETENSORS)
        change(found)
        save_file(found, folder / SAFETENSORS, metadata={"format": "pt"})

    return apply


def cut(share: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = (folder / SAFETENSORS).read_bytes()
        (folder / SAFETENSORS).write_bytes(content[: int(len(content) * share)])

    return apply


def pickled(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        torch.save({Q_PROJ: torch.zeros(2)}, folder / name)
        (folder / SAFETENSORS).unlink()

    return apply


def in_shards(folder: Path) -> None:
    """Two shards by their index, of which one is there."""
    found = load_file(folder / SAFETENSORS)
    shards = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(found))}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    first = {name: tensor for name, tensor in found.items() if shards[name].startswith("model-00001")}
    save_file(first, folder / "model-00001-of-00002.safetensors")
    (folder / SAFETENSORS).unlink()


def qwen3(folder: Path) -> None:
    norms = {f"model.layers.{i}.self_attn.{x}_norm.weight": torch.ones(8) for i in range(2) for x in "qk"}
    tensors(lambda found: found.update(norms))(folder)
    config(model_type="qwen3")(folder)


def linked_to_itself(folder: Path) -> None:
    (folder / SAFETENSORS).unlink()
    (folder / SAFETENSORS).symlink_to(folder / SAFETENSORS)


def a_folder(folder: Path) -> None:
    (folder / SAFETENSORS).unlink()
    (folder / SAFETENSORS).mkdir()


FOLDERS: dict[str, tuple[Any, ...]] = {
    "empty": (shutil.rmtree, "which is no folder"),
    "no_config": (removed("config.json"), "expected a folder with config.json and *.safetensors"),
    "no_tensors": (removed(SAFETENSORS), "expected a folder with config.json and *.safetensors"),
    "config_no_json": (written("config.json", b"{"), "cannot read", "config.json"),
    "config_list": (written("config.json", b"[]"), "got a list in", "config.json"),
    "config_binary": (written("config.json", b"\xff\xfe\x00"), "cannot read", "config.json"),
    "config_empty": (written("config.json", b""), "cannot read", "config.json"),
    "other_family": (config(model_type="gpt2"), "got model_type 'gpt2'"),
    "no_family": (config(model_type=None), "got model_type None"),
    "family_a_list": (config(model_type=["llama"]), "got model_type ['llama']"),
    "no_heads": (config(num_attention_heads=None), "num_attention_heads: got null", "config.json"),
    "heads_text": (config(num_attention_heads="2"), "num_attention_heads: got the string '2'", "config.json"),
    "no_heads_at_all": (config(num_attention_heads=0), "num_attention_heads: got the int 0", "config.json"),
    "no_width": (config(hidden_size=None), "hidden_size: got null", "config.json"),
    "kv_heads_text": (config(num_key_value_heads="one"), "num_key_value_heads: got the string", "config.json"),
    "eps_text": (config(rms_norm_eps="small"), "rms_norm_eps: got the string 'small'", "config.json"),
    "rope_list": (config(rope_scaling=[1]), "rope_scaling: got the list [1]", "config.json"),
    "theta_text": (config(rope_theta="big"), "rope_theta: got the string 'big'", "config.json"),
    "other_heads": (config(num_attention_heads=4), "contradict its config.json"),
    "other_theta": (config(rope_theta=5e5), "expected weights of the model that `model` builds"),
    "qwen3": (qwen3, "expected weights of the model that `model` builds"),
    "cut_data": (cut(0.7), "cannot read", SAFETENSORS, "incomplete"),
    "cut_header": (cut(0.01), "cannot read", SAFETENSORS),
    "no_bytes": (written(SAFETENSORS, b""), "cannot read", SAFETENSORS),
    "garbage": (written(SAFETENSORS, b"\x10" + bytes(7) + b"{not a header..}"), "cannot read", SAFETENSORS),
    "huge_header": (written(SAFETENSORS, b"\xff" * 64), "cannot read", SAFETENSORS),
    "lfs_pointer": (written(SAFETENSORS, b"version https://git-lfs.github.com/spec/v1\n"), "cannot read", SAFETENSORS),
    "folder": (a_folder, "cannot read", SAFETENSORS),
    "loop": (linked_to_itself, SAFETENSORS),
    "lacking": (tensors(lambda t: t.pop(Q_PROJ)), "expected weights of the model that `model` builds"),
    "extra": (tensors(lambda t: t.update(extra=torch.zeros(2))), "contradict its config.json", "extra"),
    "other_shape": (tensors(lambda t: t.update({Q_PROJ: torch.zeros(3, 3)})), "contradict its config.json"),
    "scalar": (tensors(lambda t: t.update({Q_PROJ: torch.tensor(1.0)})), "weights: "),
    "integers": (tensors(lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.int64)})), Q_PROJ, "I64", "F32"),
    "booleans": (tensors(lambda t: t.update({Q_PROJ: t[Q_PROJ] > 0})), Q_PROJ, "BOOL", "F32"),
    "missing_shard": (in_shards, "model-00002-of-00002.safetensors", "incomplete"),
    "bad_index": (written("model.safetensors.index.json", b"{"), "cannot read", "model.safetensors.index.json"),
    "list_index": (written("model.safetensors.index.json", b"[]"), "model.safetensors.index.json", "weight_map"),
    "pickle_bin": (pickled("pytorch_model.bin"), "pytorch_model.bin", "never opened"),
    "pickle_pt": (pickled("model.pt"), "model.pt", "never opened"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_weights_folder_is_refused(configs: Path, trained: Path, tmp_path: Path, name: str) -> None:
    spoil, *expected = FOLDERS[name]
    folder = tmp_path / name
    shutil.copytree(resolve_weights(str(trained)), folder)
    spoil(folder)
    run_recipe("evaluate", configs / "evaluate.yaml", f"weights={folder}").assert_refused("weights", *expected)


@pytest.mark.parametrize("path", ["nowhere", "''", "{tmp}/file", "{tmp}/loop", "{tmp}", f"{'a' * 300}", '"a\\0b"'])
def test_path_of_weights_is_refused(configs: Path, tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    override = f"weights={path.replace('{tmp}', str(tmp_path))}"
    run_recipe("grpo", configs / "grpo.yaml", override).assert_refused("weights: got ")


def test_teacher_over_another_tokenizer_is_refused(configs: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(resolve_weights(str(trained)), tmp_path / "teacher")
    path = tmp_path / "teacher/tokenizer.json"
    path.write_text(path.read_text().replace('"apples"', '"pears"'))
    outcome = run_recipe("opd", configs / "opd.yaml", f"teachers.growth.weights={tmp_path / 'teacher'}")
    outcome.assert_refused("teachers.growth: the vocabulary of", "is not the student's", "'pears'")


def test_several_teachers_without_routing_are_refused(configs: Path, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(resolve_weights(str(trained)), tmp_path / "teacher")
    config = (configs / "opd.yaml").read_text()
    start, end = config.index("routing:"), config.index("teacher_heads:")
    (tmp_path / "config.yaml").write_text(config[:start] + "routing: null\n" + config[end:])
    outcome = run_recipe("opd", tmp_path / "config.yaml", f"teachers.growth.weights={tmp_path / 'teacher'}")
    outcome.assert_refused("routing: got null, expected a Routing that says which of the 2 teachers")


def tokenizer_json(**changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return apply


def settings(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "tokenizer_config.json").write_text(json.dumps(changes))


BPE = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "c"]], "unk_token": None}
TOKENIZERS: dict[str, tuple[Any, ...]] = {
    "absent": (removed("tokenizer.json"), "expected a folder that holds tokenizer.json"),
    "no_json": (written("tokenizer.json", b"{"), "cannot read", "tokenizer.json"),
    "binary": (written("tokenizer.json", bytes(range(256))), "cannot read", "tokenizer.json"),
    "a_list": (written("tokenizer.json", b"[]"), "cannot read", "tokenizer.json"),
    "no_model": (tokenizer_json(model=None), "cannot read", "tokenizer.json"),
    "bad_merges": (tokenizer_json(model=BPE), "cannot read", "tokenizer.json"),
    "no_vocabulary": (
        tokenizer_json(model={"type": "WordLevel", "vocab": {}, "unk_token": "x"}, added_tokens=[]),
        "tokenizer.json",
        "no token",
    ),
    "no_settings": (removed("tokenizer_config.json"), "names an end token of the vocabulary"),
    "settings_no_json": (written("tokenizer_config.json", b"{"), "tokenizer_config.json is not valid JSON"),
    "settings_list": (written("tokenizer_config.json", b"[]"), "tokenizer_config.json holds a list"),
    "settings_binary": (written("tokenizer_config.json", b"\xff"), "tokenizer_config.json is not valid JSON"),
    "no_end": (settings(pad_token="<pad>"), "names an end token of the vocabulary"),
    "end_unknown": (settings(eos_token="</s>"), "names an end token of the vocabulary"),
    "end_a_list": (settings(eos_token=["<eos>"]), "got the special token ['<eos>']"),
    "end_without_content": (settings(eos_token={"text": "<eos>"}), "got the special token {'text': '<eos>'}"),
    "end_out_of_range": (written("generation_config.json", b'{"eos_token_id": 1000}'), "tokenizer.stop_tokens"),
    "larger_than_model": (
        tokenizer_json(
            added_tokens=[
                {
                    "id": 59,
                    "content": "<new>",
                    "special": True,
                    "single_word": False,
                    "lstrip": False,
                    "rstrip": False,
                    "normalized": False,
                }
            ]
        ),
        "model: got a vocabulary of 59, expected at least the tokenizer's 60",
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_is_refused(configs: Path, tmp_path: Path, name: str) -> None:
    spoil, *expected = TOKENIZERS[name]
    folder = tmp_path / "tokenizer"
    shutil.copytree(TOKENIZER_FOLDER, folder)
    spoil(folder)
    overrides = [f"tokenizer.path={folder}"]
    if name == "end_out_of_range":
        overrides.append("tokenizer.stop_tokens=[</s>]")
    run_recipe("evaluate", configs / "tokenizer.yaml", *overrides).assert_refused(*expected)
