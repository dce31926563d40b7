import json

import pytest

from torchtune_grpo.config import ConfigError
from torchtune_grpo.data import gsm8k_dataset

ROWS = [
    {
        "question": "Nora picks 14 plums and eats half. How many are left? ",
        "answer": "She eats 14/2 = <<14/2=7>>7 plums.\nSo 14 - 7 = <<14-7=7>>7 are left.\n#### 7",
    },
    {"question": "A farm sells 1,200 eggs twice.", "answer": "1200*2=$<<1200*2=2400>>2400\n#### 2,400"},
    {"question": "No mark?", "answer": "It is 5."},
    {"question": "No number?", "answer": "It is 5.\n#### "},
    {"question": "Below zero?", "answer": "3-5=<<3-5=-2>>-2\n#### - 2"},
    {"question": "Two marks?", "answer": "#### 4\nNo.\n#### 6"},
]


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return str(file)


def test_gsm8k_dataset_reads_gold_and_cleans_the_working(path):
    dataset = gsm8k_dataset(path=path)
    assert [example.answer for example in dataset.examples] == ["7", "2,400", "-2", "6"]
    first = dataset.examples[0]
    assert first.question == "Nora picks 14 plums and eats half. How many are left?"
    assert first.solution == (" She eats 14/2 = 7 plums.\nSo 14 - 7 = 7 are left. </think> <answer> 7 </answer>")
    assert dataset.examples[1].solution == " 1200*2=$2400 </think> <answer> 2,400 </answer>"
    assert {example.source for example in dataset.examples} == {"gsm8k"}


def test_gsm8k_dataset_counts_rows_without_an_answer(path):
    assert gsm8k_dataset(path=path).dropped == {"answer_missing": 2}


def test_gsm8k_dataset_takes_partition_limit_and_source(path):
    dataset = gsm8k_dataset(path=path, partition="0-0/2", limit=1, source="mine")
    assert [(example.answer, example.source) for example in dataset.examples] == [("7", "mine")]
    assert [e.answer for e in gsm8k_dataset(path=path, partition="0-0/2").examples] == ["7", "-2"]
    assert [e.answer for e in gsm8k_dataset(path=path, partition="1-1/2").examples] == ["2,400", "6"]


def test_gsm8k_dataset_reads_parquet_alike(path, tmp_path):
    pandas = pytest.importorskip("pandas")
    parquet = tmp_path / "rows.parquet"
    pandas.DataFrame(ROWS).to_parquet(parquet)
    assert gsm8k_dataset(path=str(parquet)) == gsm8k_dataset(path=path)


def test_gsm8k_dataset_names_path_for_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="`path`.*no such file"):
        gsm8k_dataset(path=str(tmp_path / "absent.jsonl"))


def test_gsm8k_dataset_names_path_for_a_broken_file(path, tmp_path):
    (tmp_path / "broken.jsonl").write_text("{not json\n")
    with pytest.raises(ConfigError, match="`path`"):
        gsm8k_dataset(path=str(tmp_path / "broken.jsonl"))


@pytest.mark.parametrize(("split", "rows"), [("train", 7473), ("test", 1319)])
def test_gsm8k_dataset_keeps_every_row_of_the_original(shared_dir, tmp_path, monkeypatch, split, rows):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    file = shared_dir / "data" / "gsm8k" / f"{split}.jsonl"
    originals = [json.loads(line) for line in file.read_text().splitlines()]
    dataset = gsm8k_dataset(path=str(file))
    assert len(dataset) == len(originals) == rows
    assert dataset.dropped == {}
    golds = [original["answer"].split("\n#### ")[1].strip() for original in originals]
    assert [example.answer for example in dataset.examples] == golds
    assert not any("<<" in example.solution or "####" in example.solution for example in dataset.examples)


def test_gsm8k_partitions_of_the_original_share_out_its_rows(shared_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    file = str(shared_dir / "data" / "gsm8k" / "train.jsonl")
    tenth, rest = (gsm8k_dataset(path=file, partition=p) for p in ("0-0/10", "1-9/10"))
    assert (len(tenth), len(rest)) == (748, 6725)  # rows 0, 10, ..., 7470 of 7473
    assert not {e.question for e in tenth.examples} & {e.question for e in rest.examples}


def test_gsm8k_counts_rows_that_hold_no_text(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": 5, "answer": 6}\n')
    dataset = gsm8k_dataset(path=str(path))
    assert len(dataset) == 0
    assert dataset.dropped == {"field_not_text": 1}


def test_gsm8k_refuses_an_empty_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("")
    with pytest.raises(ConfigError, match="path"):
        gsm8k_dataset(path=str(path))
