"""The pool of teachers: refused at set-up where they do not fit, run one at a time, each on its own rows."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.torchtune_grpo.builders import make_rollout
from tests.torchtune_grpo.distillation.small_models import (
    VOCAB,
    WIDER,
    make_small,
    node,
    response_logits,
    response_states,
    save_small,
    two_teachers,
)
from tests.torchtune_grpo.distributed_helpers import run_ranks
from torchtune_grpo.config import ConfigError
from torchtune_grpo.data import tiny_tokenizer
from torchtune_grpo.distillation import HiddenStates, Logits, Routing, TeacherPool
from torchtune_grpo.distillation.payloads import NoPayload, Payload
from torchtune_grpo.distillation.vocabulary_parallel import HeadGroup
from torchtune_grpo.logprobs import DenseLogprobs
from torchtune_grpo.training.distributed import Ranks
from torchtune_grpo.types import Rollout

HIDDEN = HiddenStates(dtype="fp32")


def _pool(nodes: dict[str, dict], *, payload: Payload = HIDDEN, longest: int = 64, **routing: Any) -> TeacherPool:
    return TeacherPool(
        nodes,
        Routing(**routing) if routing else None,
        sources=["x", "y"],
        tokenizer=tiny_tokenizer(),
        payload=payload,
        vocabulary=HeadGroup(start=0, stop=VOCAB, group=None),
        longest=longest,
    )


def _retokenized(folder: Path, change: Callable[[dict[str, int]], dict[str, int]]) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"] = change(tokenizer["model"]["vocab"])
    path.write_text(json.dumps(tokenizer))


def test_teacher_of_another_vocabulary_is_refused_with_both_sides_named(tmp_path: Path) -> None:
    folder = save_small(tmp_path / "teacher", make_small(1))
    _pool({"a": node(folder)})
    _retokenized(folder, lambda vocab: vocab | {"apples": vocab["coins"], "coins": vocab["apples"]})
    with pytest.raises(ConfigError) as error:
        _pool({"a": node(folder)})
    message = str(error.value)
    assert message.startswith("teachers.a: the vocabulary of") and str(folder) in message
    assert str(tiny_tokenizer().files[0].parent) in message
    ids = tiny_tokenizer().vocabulary
    assert f"'apples' {ids['coins']} and {ids['apples']}" in message and "2 tokens differ" in message


def test_teacher_with_fewer_tokens_or_no_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = save_small(tmp_path / "teacher", make_small(1))
    _retokenized(folder, lambda vocab: {k: v for k, v in vocab.items() if k != "Eva"})
    with pytest.raises(ConfigError, match="'Eva' None and"):
        _pool({"a": node(folder)})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="^teachers.a: .*tokenizer.json"):
        _pool({"a": node(folder)})


def test_teacher_with_a_head_smaller_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = save_small(tmp_path / "teacher", make_small(1, vocab_size=58))
    with pytest.raises(ConfigError, match="teachers.a: got a head of 58 rows, expected at least the tokenizer's 59"):
        _pool({"a": node(folder, vocab_size=58)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 24}, "teachers.a: weights: .*differ"),
        ({"num_layers": 2}, "teachers.a: weights: .*differ"),
        ({"max_seq_len": 63}, "teachers.a.model.max_seq_len: got 63, expected at least 64"),
        ({"dtype": "bf16"}, "teachers.a.dtype: got bf16, but objective.payload.dtype is float32"),
        ({"dp_replicate": 2}, r"teachers.a.dp_replicate: got 2, expected a divisor .*\(1\)"),
        ({"weights": "nowhere"}, "teachers.a.weights: got 'nowhere'"),
    ],
)
def test_teacher_that_does_not_fit_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_small(tmp_path / "teacher", make_small(1))
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        _pool({"a": node(folder, **changes)})


def test_sampled_tokens_take_a_teacher_of_any_dtype(tmp_path: Path) -> None:
    folder = save_small(tmp_path / "teacher", make_small(1))
    assert len(_pool({"a": node(folder, dtype="bf16")}, payload=NoPayload()).index) == 1


def _rollout(sources: str) -> Rollout:
    """Two rows a group, one letter of ``sources`` a group."""
    lengths = [3, 1, 5, 2, 4, 4][: 2 * len(sources)]
    rollout = make_rollout(lengths, prompt_lengths=[2, 2, 4, 4, 3, 3][: len(lengths)], group_size=2, seed=len(sources))
    return replace(rollout, source=[s for s in sources for _ in range(2)])


def _score_on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 has no row of ``x``; the last round has none of ``y`` on any rank."""
    ranks = Ranks(device=torch.device("cpu"), rank=rank, world_size=2)
    rounds = [["xyx", "y"][rank], ["x", "xx"][rank]]
    nodes = {"b": node(folder / "0"), "a": node(folder / "1", dp_replicate=2, **WIDER), "b2": node(folder / "0")}
    results: dict[str, Any] = {}
    for name, payload in {"hidden": HIDDEN, "logits": Logits(dtype="fp32"), "none": NoPayload()}.items():
        pool = _pool(nodes, payload=payload, sources={"x": "b2", "y": "a"})
        pool.load(ranks, heads="offload")
        loaded, moves = list(pool._models), []
        _spy_on_moves(loaded, moves)
        scored = [pool.score(_rollout(sources), DenseLogprobs(), max_tokens=12) for sources in rounds]
        results[name] = [(scores.logprobs, scores.payload) for scores in scored]
        results[f"{name} moves"] = moves
        pool.release_heads()
    results["names"] = pool.index.names
    results["frozen"] = not any(p.requires_grad for model in loaded for p in model.parameters())
    return results


def _spy_on_moves(models: list[nn.Module], moves: list[tuple[int, str]]) -> None:
    for number, model in enumerate(models):
        to, cpu = model.to, model.cpu
        model.to = lambda *args, number=number, to=to: moves.append((number, "device")) or to(*args)
        model.cpu = lambda number=number, cpu=cpu: moves.append((number, "cpu")) or cpu()


def test_each_row_is_scored_by_its_own_teacher_on_ranks_that_share_them_unevenly(tmp_path: Path) -> None:
    teachers = two_teachers(tmp_path)
    of_source = {"x": teachers[0], "y": teachers[1]}
    ranks = run_ranks(_score_on_rank, tmp_path)
    for rank, rounds in enumerate([("xyx", "x"), ("y", "xx")]):
        assert ranks[rank]["names"] == ("b+b2", "a") and ranks[rank]["frozen"]
        for i, sources in enumerate(rounds):
            rollout = _rollout(sources)
            for row, source in enumerate(rollout.source):
                length = int(rollout.response_lengths[row])
                logits = response_logits(of_source[source], rollout, row)
                ids = rollout.responses[row, :length]
                expected = logits.log_softmax(-1).gather(1, ids[:, None]).squeeze(1).float()
                scores = {name: ranks[rank][name][i] for name in ("hidden", "logits", "none")}
                for logprobs, _ in scores.values():
                    torch.testing.assert_close(logprobs[row, :length], expected, atol=1e-4, rtol=0)
                    assert not logprobs[row, length:].any()
                states = response_states(of_source[source], rollout, row)
                torch.testing.assert_close(scores["hidden"][1][row], states, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(scores["logits"][1][row], logits.float(), atol=1e-4, rtol=1e-4)
                assert scores["none"][1][row].shape == (length, 0)


def test_one_teacher_is_on_the_device_at_a_time(tmp_path: Path) -> None:
    two_teachers(tmp_path)
    for rank in run_ranks(_score_on_rank, tmp_path):
        # Both teachers in the first round; in the second no rank has a row of the other one, which stays where it is.
        assert rank["hidden moves"] == [(0, "device"), (0, "cpu"), (1, "device"), (1, "cpu"), (0, "device"), (0, "cpu")]


def test_aliases_of_one_checkpoint_load_once(tmp_path: Path) -> None:
    folder = save_small(tmp_path / "teacher", make_small(1))
    shutil.copytree(folder, tmp_path / "copy")
    pool = _pool({"a": node(folder), "b": node(folder)}, sources={"x": "a", "y": "b"})
    assert len(pool.teachers) == 1 and pool.index.column(["x", "y"]).tolist() == [0, 0]
    two = _pool({"a": node(folder), "b": node(tmp_path / "copy")}, sources={"x": "a", "y": "b"})
    assert len(two.teachers) == 2  # a copy is another checkpoint
