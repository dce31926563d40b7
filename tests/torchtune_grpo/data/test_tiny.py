import json
import re

import pytest
from transformers import AutoTokenizer

from torchtune_grpo.config import ConfigError
from torchtune_grpo.data import TINY_TEMPLATE, Prompt, overlap, tiny_dataset, tiny_tokenizer
from torchtune_grpo.data.tiny import TOKENIZER_FOLDER, write_tiny_tokenizer

EVENT = re.compile(r"(?:has|finds|buys|gets|wins|loses|sells|drops|returns) (\d)|(doubles|triples) the pile")


def told_steps(question):
    """The story worked out from its words alone: the start, then ``a?b=c.`` for every event."""
    value, steps = None, []
    for match in EVENT.finditer(question):
        word, number = match.group().split()[0], match.group(1)
        if word == "has":
            value = int(number)
            continue
        symbol, operand = {"doubles": ("*", 2), "triples": ("*", 3)}.get(word) or (
            ("-" if word in ("loses", "sells", "drops", "returns") else "+"),
            int(number),
        )
        before, value = value, {"+": value + operand, "-": value - operand, "*": value * operand}[symbol]
        steps.append(f"{before}{symbol}{operand}={value}.")
    return steps, value


@pytest.mark.parametrize("split", ["sft", "train", "validation", "test"])
def test_tiny_dataset_tells_what_it_computes(split):
    for example in tiny_dataset(split, 300).examples:
        steps, value = told_steps(example.question)
        assert example.answer == str(value)
        assert len(steps) in (4, 5)
        assert example.source == "tiny"
        worked, unworked = (f" {reasoning} </think> <answer> {value} </answer>" for reasoning in (" ".join(steps), "?"))
        assert example.solution in (worked, unworked)


def test_tiny_dataset_keeps_operands_and_running_values_within_bounds():
    steps = [step for e in tiny_dataset("train", 2000).examples for step in told_steps(e.question)[0]]
    numbers = [tuple(map(int, re.findall(r"\d+", step))) for step in steps]
    assert {operand for _, operand, _ in numbers} == set(range(2, 10))
    assert min(after for _, _, after in numbers) == 1
    sums = [after for step, (_, _, after) in zip(steps, numbers, strict=True) if "+" in step]
    assert max(sums) == max(after for _, _, after in numbers) == 50
    assert {re.search(r"[-+*]", step).group() for step in steps} == set("+-*")


def test_tiny_splits_share_no_problem_and_no_chain_of_operations():
    splits = [tiny_dataset(s, n, seed=i) for i, (s, n) in enumerate([("sft", 5000), ("train", 5000)])]
    splits += [tiny_dataset(s, 1024, seed=i) for i, s in enumerate(["validation", "test"])]
    chains = [{" ".join(told_steps(e.question)[0]) for e in dataset.examples} for dataset in splits]
    for i, first in enumerate(splits):
        for j, second in enumerate(splits[:i]):
            assert overlap(first, second) == 0
            assert not chains[i] & chains[j]


def test_tiny_dataset_repeats_no_problem_and_holds_out_more_than_512():
    dataset = tiny_dataset("test", 2048)
    assert len({example.question for example in dataset.examples}) == 2048


def test_tiny_dataset_is_decided_by_its_seed():
    assert tiny_dataset("train", 50, seed=1) == tiny_dataset("train", 50, seed=1)
    assert tiny_dataset("train", 50, seed=1) != tiny_dataset("train", 50, seed=2)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_tiny_dataset_works_out_the_asked_share(share):
    solutions = [e.solution for e in tiny_dataset("sft", 4000, worked_share=share).examples]
    worked = sum("=" in solution for solution in solutions) / 4000
    assert worked == pytest.approx(share, abs=4 * (share * (1 - share) / 4000) ** 0.5)


def test_tiny_dataset_uses_only_the_operations_asked_for():
    examples = tiny_dataset("train", 200, operations=["subtract", "triple"], worked_share=1.0).examples
    reasoning = " ".join(example.solution.split("</think>")[0] for example in examples)
    assert set(re.findall(r"[-+*]\d", reasoning)) == {"*3", *(f"-{n}" for n in range(2, 10))}


def test_tiny_dataset_makes_chains_of_the_lengths_asked_for():
    solutions = [e.solution for e in tiny_dataset("train", 200, worked_share=1.0, steps=[2, 3]).examples]
    assert {solution.count("=") for solution in solutions} == {2, 3}


def test_tiny_dataset_keeps_running_values_below_the_bound_asked_for():
    examples = tiny_dataset("train", 200, worked_share=1.0, largest_value=20).examples
    values = [int(v) for e in examples for v in re.findall(r"\d+", e.solution)]
    assert max(values) == 20


def test_tiny_dataset_of_the_format_only_moves_each_solution_to_another_problem():
    right, moved = (tiny_dataset("sft", 50, worked_share=1.0, format_only=only).examples for only in (False, True))
    assert [e.solution for e in moved] == [right[-1].solution, *(e.solution for e in right[:-1])]
    assert [(e.question, e.answer) for e in moved] == [(e.question, e.answer) for e in right]


def test_tiny_dataset_refuses_more_problems_than_the_operations_have():
    with pytest.raises(ConfigError, match="size.*operations"):
        tiny_dataset("test", 20, operations=["triple"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("split", "dev"),
        ("size", 0),
        ("worked_share", 1.5),
        ("operations", ["divide"]),
        ("operations", []),
        ("steps", [1]),
        ("largest_value", 8),
    ],
)
def test_tiny_dataset_names_the_key_that_is_wrong(key, value):
    with pytest.raises(ConfigError, match=key):
        tiny_dataset(**{"split": "train", "size": 5, key: value})


def test_shipped_tokenizer_is_what_its_builder_writes(tmp_path):
    write_tiny_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert json.loads((TOKENIZER_FOLDER / name).read_text()) == json.loads((tmp_path / name).read_text())


def test_tiny_tokenizer_spends_one_token_on_each_digit_mark_tag_and_word():
    tokenizer = tiny_tokenizer()
    tokens = "Tom has 4 apples , 1 2 + 5 = 1 7 . ? - * : <think> </think> <answer> </answer>".split()
    ids = tokenizer.encode("Tom has 4 apples, 12+5=17. ? -*: <think></think><answer></answer>")
    assert [tokenizer.decode([i]) for i in ids] == tokens
    assert tokenizer.vocab_size == 59
    assert (tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id, tokenizer.stop_ids) == (None, 0, 1, (1,))


@pytest.mark.parametrize(
    "text",
    [
        "4+5=9. 9*2=18. </think> <answer> 18 </answer>",
        "? </think> <answer> 18 </answer>",
        "Tom has 4 apples, finds 5 more, then doubles the pile.",
        "</think> <answer> -3 </answer> <eos> <pad>",
    ],
)
def test_tiny_tokenizer_decodes_to_the_text_it_encoded(text):
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tiny_tokenizer_drops_specials_but_not_tags_when_asked():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("</think> <answer> 18 </answer> <eos> <pad>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "</think> <answer> 18 </answer>"


def test_tiny_tokenizer_loses_no_token_of_any_pair():
    tokenizer = tiny_tokenizer()
    for first in range(tokenizer.vocab_size):
        ids = [i for second in range(tokenizer.vocab_size) for i in (first, second)]
        assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_tiny_tokenizer_opens_in_transformers_and_agrees():
    tokenizer, oracle = tiny_tokenizer(), AutoTokenizer.from_pretrained(TOKENIZER_FOLDER)
    assert (oracle.pad_token_id, oracle.eos_token_id) == (tokenizer.pad_id, tokenizer.eos_id)
    for example in tiny_dataset("test", 20).examples:
        ids = tokenizer.encode(example.question + example.solution)
        assert oracle(example.question + example.solution).input_ids == ids
        assert oracle.decode(ids) == tokenizer.decode(ids)


def test_tiny_problems_are_known_words_and_fit_64_and_52_tokens():
    tokenizer, prompt = tiny_tokenizer(), Prompt(template=TINY_TEMPLATE)
    for example in tiny_dataset("sft", 2000, worked_share=1.0).examples:
        prompt_ids, solution_ids = (
            prompt.encode(tokenizer, example.question),
            tokenizer.encode(example.solution),
        )
        assert len(prompt_ids) <= 64
        assert len(solution_ids) + 1 <= 52
        assert tokenizer.encode("<unk>")[0] not in prompt_ids + solution_ids
