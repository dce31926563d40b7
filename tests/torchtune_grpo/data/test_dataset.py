from collections import Counter
from dataclasses import replace

import pytest

from torchtune_grpo.config import ConfigError
from torchtune_grpo.data import Dataset, Example, mixed_dataset, overlap
from torchtune_grpo.data.dataset import collect, parse_partition


def examples(source, count):
    return [Example(question=f"{source} {i}", answer=str(i), solution="", source=source) for i in range(count)]


def numbered(source, count, **dropped):
    return Dataset(examples=examples(source, count), dropped=dropped)


def test_fingerprint_tells_any_other_row_or_order():
    dataset = numbered("a", 3)
    assert dataset.fingerprint() == numbered("a", 3, too_long=2).fingerprint()
    assert dataset.fingerprint().startswith("3 rows, BLAKE2 ")
    first, second, third = dataset.examples
    others = [
        [first, second],
        [second, first, third],
        *([first, second, replace(third, **{name: "x"})] for name in ("question", "answer", "solution", "source")),
    ]
    prints = {Dataset(examples=rows).fingerprint() for rows in others}
    assert len(prints) == 6 and dataset.fingerprint() not in prints


def kept(text, rows=40):
    member = parse_partition(text)
    return {i for i in range(rows) if member(i)}


def test_partition_deals_rows_out_in_turn():
    assert kept("0-0/10") == {0, 10, 20, 30}
    assert kept("1-2/4", rows=8) == {1, 2, 5, 6}
    assert kept("0-0/1") == set(range(40))


def test_partitions_are_disjoint_and_exhaustive():
    assert kept("0-0/10") | kept("1-9/10") == set(range(40))
    assert not kept("0-0/10") & kept("1-9/10")


@pytest.mark.parametrize("text", ["", "0/10", "0-10/10", "3-2/10", "0-0/0", "-1-2/10", "0-0/10x", "a-b/c", 3])
def test_partition_refuses_other_forms(text):
    with pytest.raises(ConfigError, match="`partition`.*first-last/n"):
        parse_partition(text)


def parsed(row):
    return row["reason"] or Example(question=row["q"], answer=row["a"], solution="", source="here")


def collected(rows, *, partition="0-0/1", limit=None, **options):
    filled = [{"q": "?", "a": "1", "reason": "", **row} for row in rows]
    placed = [(f"rows.jsonl:{number}", row) for number, row in enumerate(filled, start=1)]
    return collect(placed, parsed, fields=("q", "a"), partition=partition, limit=limit, **options)


def test_collect_counts_what_it_drops_by_reason():
    rows = [{}, {"reason": "odd"}, {"reason": "odd"}, {"a": None}, {"q": ""}, {"a": r"\frac{"}, {"a": "2"}]
    dataset = collected(rows)
    assert [example.answer for example in dataset.examples] == ["1", "2"]
    assert dataset.dropped == {"odd": 2, "field_empty": 2, "answer_not_gradable": 1}


def test_collect_limits_usable_rows():
    dataset = collected([{"reason": "odd"}, {"a": "5"}, {"a": "6"}, {"a": "7"}], limit=2)
    assert [example.answer for example in dataset.examples] == ["5", "6"]
    with pytest.raises(ConfigError, match="`limit`"):
        collected([{}], limit=0)


def test_collect_partitions_rows_before_any_is_dropped_or_chosen():
    rows = [{"a": str(i), "reason": "odd" if i % 3 == 0 else ""} for i in range(12)]
    dataset = collected(rows, partition="1-1/2", chosen=lambda row: row["a"] != "5")
    assert [example.answer for example in dataset.examples] == ["1", "7", "11"]
    assert dataset.dropped == {"odd": 2}


def test_collect_refuses_rows_of_another_format():
    with pytest.raises(ConfigError, match=r"`path`: rows.jsonl:7: .*\['other'\].*\['a', 'q'\]"):
        collect([("rows.jsonl:7", {"other": 1})], parsed, fields=("q", "a"), partition="0-0/1", limit=None)


def test_mixed_dataset_draws_in_proportion_and_keeps_sources():
    mixed = mixed_dataset([numbered("a", 100), numbered("b", 100)], weights=[3, 1], size=40)
    assert Counter(example.source for example in mixed.examples) == {"a": 30, "b": 10}
    assert len({example.question for example in mixed.examples}) == 40
    sources = [example.source for example in mixed.examples]
    assert sources not in (sorted(sources), sorted(sources, reverse=True))


@pytest.mark.parametrize(("weights", "counts"), [([1, 1, 1], (4, 3, 3)), ([0.5, 0.3, 0.2], (5, 3, 2))])
def test_mixed_dataset_has_exactly_its_size(weights, counts):
    mixed = mixed_dataset([numbered(name, 50) for name in "abc"], weights=weights, size=10)
    assert Counter(e.source for e in mixed.examples) == dict(zip("abc", counts, strict=True))


@pytest.mark.parametrize(("rows", "weights", "counts"), [((100, 7), (0.3, 0.1), (21, 7)), ((3, 9), (0.7, 1.4), (3, 6))])
def test_mixed_dataset_without_size_is_the_largest_that_repeats_no_row(rows, weights, counts):
    mixed = mixed_dataset([numbered("a", rows[0]), numbered("b", rows[1])], weights=list(weights))
    assert Counter(example.source for example in mixed.examples) == dict(zip("ab", counts, strict=True))


def test_mixed_dataset_gives_each_row_once_before_any_twice():
    mixed = mixed_dataset([numbered("a", 4), numbered("b", 100)], weights=[1, 1], size=20)
    repeats = Counter(example.question for example in mixed.examples if example.source == "a")
    assert sorted(repeats.values()) == [2, 2, 3, 3]


def test_mixed_dataset_is_decided_by_its_seed():
    parts = [numbered("a", 30), numbered("b", 30)]
    first, again, other = (mixed_dataset(parts, weights=[1, 2], size=20, seed=s) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_mixed_dataset_adds_up_what_its_parts_dropped():
    parts = [numbered("a", 3, odd=1, long=2), numbered("b", 3, odd=4)]
    assert mixed_dataset(parts, weights=[1, 1]).dropped == {"odd": 5, "long": 2}


@pytest.mark.parametrize(
    ("key", "parts", "options"),
    [
        ("weights", [3, 3], {"weights": [1]}),
        ("weights", [3, 3], {"weights": [1, 0]}),
        ("weights", [], {"weights": []}),
        ("datasets", [3, 0], {"weights": [1, 1]}),
        ("size", [3, 3], {"weights": [1, 1], "size": 0}),
    ],
)
def test_mixed_dataset_names_the_key_that_is_wrong(key, parts, options):
    with pytest.raises(ConfigError, match=f"`{key}`"):
        mixed_dataset([numbered("a", n) for n in parts], **options)


def test_overlap_counts_evaluation_questions_whatever_their_case_and_spaces():
    def asking(*questions):
        return Dataset(examples=[Example(question=q, answer="1", solution="", source="x") for q in questions])

    train = asking("How many  apples?", "What is 1+1?")
    evaluation = asking("how many apples? ", "How many\napples?", "What is 1-1?", "Why?")
    assert overlap(train, evaluation) == 2
    assert overlap(evaluation, train) == 1
