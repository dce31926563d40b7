"""Folders in the manner of four published models, with transformers as the oracle for what is encoded."""

import json

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from torchtune_grpo.config import ConfigError
from torchtune_grpo.data import Tokenizer

TEXT = 'Él paid $12.50, "twice"\n<|im_end|> <think>'


def write_folder(folder, specials, *, words=(), bos_rule=None, **files):
    """A byte-level tokenizer without merges: 256 bytes, then the special tokens, then ``words`` of one id each."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in words])
    if bos_rule:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos_rule} $A", special_tokens=[(bos_rule, tokenizer.token_to_id(bos_rule))]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def llama3_instruct(tmp_path):
    return write_folder(
        tmp_path,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>"],
        bos_rule="<|begin_of_text|>",
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
        },
        config={"bos_token_id": 256, "eos_token_id": [257, 258, 259]},
        generation_config={"bos_token_id": 256, "eos_token_id": [257, 258, 259]},
    )


@pytest.fixture
def qwen2_5_instruct(tmp_path):
    return write_folder(
        tmp_path,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": {"content": "<|im_end|>", "special": True, "__type": "AddedToken"},
            "pad_token": "<|endoftext|>",
        },
        config={"bos_token_id": 256, "eos_token_id": 258},
        generation_config={"bos_token_id": 256, "pad_token_id": 256, "eos_token_id": [258, 256]},
    )


@pytest.fixture
def qwen3_base(tmp_path):
    """Its end token is the padding token; <think> and </think> are tokens, but no special ones."""
    return write_folder(
        tmp_path,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        words=["<think>", "</think>"],
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
        },
        config={"bos_token_id": 256, "eos_token_id": 256},
        generation_config={"bos_token_id": 256, "do_sample": False, "eos_token_id": 256, "max_new_tokens": 2048},
    )


@pytest.fixture
def smollm2_instruct(tmp_path):
    return write_folder(
        tmp_path,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
        },
        config={"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 258},
    )


@pytest.mark.parametrize(
    ("name", "bos_id", "stop_ids", "pad_id", "vocab_size"),
    [
        ("llama3_instruct", 256, (259, 257, 258), 259, 261),
        ("qwen2_5_instruct", None, (258, 256), 256, 259),
        ("qwen3_base", None, (256,), 256, 261),
        ("smollm2_instruct", 257, (258,), 258, 259),
    ],
)
def test_tokenizer_finds_special_ids(request, name, bos_id, stop_ids, pad_id, vocab_size):
    tokenizer = Tokenizer(path=str(request.getfixturevalue(name)))
    assert tokenizer.bos_id == bos_id
    assert tokenizer.stop_ids == stop_ids
    assert tokenizer.eos_id == stop_ids[0]
    assert tokenizer.pad_id == pad_id
    assert tokenizer.vocab_size == vocab_size


@pytest.mark.parametrize("name", ["llama3_instruct", "qwen2_5_instruct", "qwen3_base", "smollm2_instruct"])
def test_tokenizer_encodes_and_decodes_as_transformers_does(request, name):
    folder = request.getfixturevalue(name)
    tokenizer, oracle = Tokenizer(path=str(folder)), AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode_prompt(TEXT) == oracle(TEXT).input_ids
    assert tokenizer.encode(TEXT) == oracle(TEXT, add_special_tokens=False).input_ids
    ids = [*oracle(TEXT).input_ids, tokenizer.eos_id]
    for skip in (False, True):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip)


def test_think_tags_of_qwen3_are_single_ids_and_stay_in_the_text(qwen3_base):
    tokenizer = Tokenizer(path=str(qwen3_base))
    assert tokenizer.encode("<think>4</think>") == [259, *tokenizer.encode("4"), 260]
    assert tokenizer.decode([259, 260, 256], skip_special_tokens=True) == "<think></think>"


def test_encode_prompt_has_exactly_one_bos_also_when_the_text_brings_its_own(llama3_instruct):
    tokenizer = Tokenizer(path=str(llama3_instruct))
    assert tokenizer.encode_prompt("<|begin_of_text|>hi") == tokenizer.encode_prompt("hi")
    assert tokenizer.encode_prompt("hi").count(256) == 1


def test_tokenizer_switches_off_padding_and_truncation_left_in_the_file(smollm2_instruct):
    path = str(smollm2_instruct / "tokenizer.json")
    saved = tokenizers.Tokenizer.from_file(path)
    saved.enable_truncation(4)
    saved.enable_padding(length=16)
    saved.save(path)
    tokenizer = Tokenizer(path=str(smollm2_instruct))
    assert len(tokenizer.encode("ab")) == 2
    assert len(tokenizer.encode("abcdefgh")) == 8


def test_tokenizer_adds_stop_tokens_named_in_the_config(smollm2_instruct):
    tokenizer = Tokenizer(path=str(smollm2_instruct), stop_tokens=["<|endoftext|>", "<|im_end|>"])
    assert tokenizer.eos_id == 258
    assert tokenizer.stop_ids == (258, 256)


def test_tokenizer_refuses_an_unknown_stop_token(smollm2_instruct):
    with pytest.raises(ConfigError, match=r"tokenizer.stop_tokens.*<\|stop\|>"):
        Tokenizer(path=str(smollm2_instruct), stop_tokens=["<|stop|>"])


def test_tokenizer_takes_end_token_from_config_json_where_no_other_file_names_one(tmp_path):
    folder = write_folder(tmp_path, ["<s>", "</s>"], config={"bos_token_id": 256, "eos_token_id": 257})
    tokenizer = Tokenizer(path=str(folder))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (256, 257, 257)


def test_tokenizer_ignores_ids_that_the_vocabulary_lacks(tmp_path):
    folder = write_folder(tmp_path, ["</s>"], config={"bos_token_id": -1, "eos_token_id": [256, 999]})
    tokenizer = Tokenizer(path=str(folder))
    assert tokenizer.bos_id is None
    assert tokenizer.stop_ids == (256,)


def test_decode_gives_nothing_for_ids_of_a_padded_embedding(smollm2_instruct):
    tokenizer = Tokenizer(path=str(smollm2_instruct))
    assert tokenizer.decode([*tokenizer.encode("18"), 300]) == "18"


def test_tokenizer_lists_the_files_to_export(llama3_instruct):
    (llama3_instruct / "model.safetensors").touch()
    names = {path.name for path in Tokenizer(path=str(llama3_instruct)).files}
    assert names == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_tokenizer_refuses_a_folder_without_a_readable_tokenizer_json(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match="tokenizer.path"):
        Tokenizer(path=str(tmp_path))


def test_tokenizer_refuses_a_folder_that_names_no_end_token(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer.path.*eos_token"):
        Tokenizer(path=str(write_folder(tmp_path, ["</s>"])))


def test_tokenizer_refuses_broken_json_beside_it(smollm2_instruct):
    (smollm2_instruct / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer.path.*generation_config.json"):
        Tokenizer(path=str(smollm2_instruct))
