"""Frozen teachers: checked against the student before anything loads, then run one at a time.

Each teacher is sharded with FSDP2 and stays in CPU memory but for the time in which it scores a rollout, so a device
holds the shard of one teacher at most, and of the student only what lies between two updates.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torchtune.modules import TransformerDecoder

from torchtune_grpo.collectives import any_rank, world_size
from torchtune_grpo.config import ConfigError, instantiate
from torchtune_grpo.data import Tokenizer
from torchtune_grpo.distillation.heads import Lifecycle, TeacherHeads
from torchtune_grpo.distillation.payloads import Payload, check_order
from torchtune_grpo.distillation.projection import TeacherSide
from torchtune_grpo.distillation.routing import (
    Routing,
    TeacherIndex,
    check_resumed_teachers,
    index_teachers,
    rows_by_teacher,
)
from torchtune_grpo.distillation.vocabulary_parallel import HeadGroup
from torchtune_grpo.logprobs import TargetHead
from torchtune_grpo.microbatches import crop_rollout, plan_in_step
from torchtune_grpo.models.weights import check_weights, read_weights
from torchtune_grpo.training.checkpoint_files import read_state, resolve_weights
from torchtune_grpo.training.distributed import Ranks, build_sharded, evaluation_mode
from torchtune_grpo.training.progress import say
from torchtune_grpo.training.setup import DTYPES
from torchtune_grpo.types import LogprobsFn, Rollout


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A frozen model of any width and depth over the student's tokenizer.

    ``model`` is built on meta; ``weights`` as the recipe's key of that name; ``dtype`` is that of storage and compute;
    ``dp_replicate``: copies of the model, each sharded over nproc / dp_replicate ranks (nproc: replicated).
    """

    model: TransformerDecoder
    weights: str
    dtype: Literal["fp32", "bf16"] = "bf16"
    dp_replicate: int = 1


@dataclass(frozen=True, kw_only=True)
class TeacherScores:
    """``logprobs [N, R]`` fp32 of the sampled tokens under each row's teacher, 0 outside the response mask;
    ``payload``: one ``[length, W]`` tensor a row, on CPU."""

    logprobs: Tensor
    payload: list[Tensor]


@dataclass
class _TeacherHead:
    """The usual head, and on the way the payload of the same tokens is kept."""

    head: TargetHead
    payload: Payload
    rollout: Rollout
    vocab_size: int
    taken: list[Tensor] = field(default_factory=list)

    def __call__(self, model: nn.Module, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
        check_order(targets, self.rollout)
        self.taken.append(self.payload(model, hidden, self.vocab_size).cpu())
        return self.head(model, hidden, targets, temperature)


class TeacherPool:
    """The teachers of a run. Building it checks everything that can be checked without loading; ``load`` loads.

    Args:
        teachers: alias -> config node of a ``Teacher``.
        sources: those of the training data.
        vocabulary: this rank's slice of every LM head.
        longest: tokens of the longest prompt + completion.

    Raises:
        ConfigError: what ``index_teachers`` and ``check_teacher`` refuse.
    """

    def __init__(
        self,
        teachers: Mapping[str, Mapping],
        routing: Routing | None,
        *,
        sources: Collection[str],
        tokenizer: Tokenizer,
        payload: Payload,
        vocabulary: HeadGroup,
        longest: int,
    ) -> None:
        with torch.device("meta"):
            built: dict[str, Teacher] = {alias: instantiate(node) for alias, node in teachers.items()}
        folders = {a: resolve_weights(t.weights, key=f"teachers.{a}.weights").resolve() for a, t in built.items()}
        self.index: TeacherIndex = index_teachers(folders, routing, sources)
        for alias, teacher in built.items():
            check_teacher(alias, teacher, folders[alias], tokenizer=tokenizer, payload=payload, longest=longest)
        by_checkpoint = {str(folders[alias]): built[alias] for alias in sorted(built, reverse=True)}
        self.teachers = [by_checkpoint[checkpoint] for checkpoint in self.index.checkpoints]
        self._payload, self._vocabulary, self._vocab_size = payload, vocabulary, tokenizer.vocab_size
        self._models: list[TransformerDecoder] = []

    def check_resumed(self, checkpoint: Path) -> None:
        """Raises ConfigError unless ``checkpoint`` belongs to a run with these teachers: ``check_resumed_teachers``."""
        check_resumed_teachers(read_state(checkpoint)["extra"].get("teachers"), self.index.state(), checkpoint)

    def load(self, ranks: Ranks, *, heads: Lifecycle) -> None:
        """Shards and loads every teacher in turn, and leaves it in CPU memory; then the student's ``side``.

        Collective: a broadcast a tensor.
        """
        self._device = ranks.device
        for teacher, checkpoint, name in zip(self.teachers, self.index.checkpoints, self.index.names, strict=True):
            if ranks.is_main:
                say(f"teacher {name} from {checkpoint}")
            model = build_sharded(
                lambda model=teacher.model: model,
                lambda folder=checkpoint: read_weights(folder),
                ranks=ranks,
                dp_replicate=teacher.dp_replicate,
                compute_dtype=DTYPES[teacher.dtype],
                trainable=False,
            )
            self._models.append(model.cpu())
        self.side = self._side(ranks, heads)

    def _side(self, ranks: Ranks, lifecycle: Lifecycle) -> TeacherSide:
        widths = [self._payload.width(teacher.model, self._vocab_size) for teacher in self.teachers]
        dtype = self._payload.torch_dtype or torch.float32
        heads = None
        if self._payload.needs_head:
            heads = TeacherHeads(
                self.index.checkpoints,
                widths,
                dtype=dtype,
                start=self._vocabulary.start,
                stop=self._vocabulary.stop,
                device=ranks.device,
                lifecycle=lifecycle,
            )
        return TeacherSide(names=self.index.names, widths=widths, dtype=dtype, heads=heads, vocabulary=self._vocabulary)

    def release_heads(self) -> None:
        """Frees the device as ``heads`` says; call it when the updates on a rollout are done."""
        if self.side.heads is not None:
            self.side.heads.release()

    def score(self, rollout: Rollout, logprobs_fn: LogprobsFn, *, max_tokens: int) -> TeacherScores:
        """What each row's teacher says of it, without gradient, in micro-batches of at most ``max_tokens``.

        Collectives: for each teacher in the order of the index one all_reduce; if any rank has a row of it, another
        one and then equally many forwards on every rank: a rank without such a row forwards one of another teacher and
        discards the result.
        """
        scores = TeacherScores(logprobs=torch.zeros_like(rollout.old_logprobs), payload=[torch.empty(0)] * len(rollout))
        column = self.index.column(rollout.source)
        for number, rows in enumerate(rows_by_teacher(column, len(rollout), len(self.index))):
            if any_rank(len(rows) > 0):
                with self._on_device(number) as model, evaluation_mode(model):
                    self._score_rows(model, rollout, rows, scores, logprobs_fn, max_tokens)
        return scores

    def _score_rows(
        self,
        model: TransformerDecoder,
        rollout: Rollout,
        rows: Tensor,
        scores: TeacherScores,
        logprobs_fn: LogprobsFn,
        max_tokens: int,
    ) -> None:
        present = rows if len(rows) else torch.arange(rollout.group_size)
        chosen = rollout.rows(present)
        for part in plan_in_step(chosen, logprobs_fn, max_tokens):
            cropped = crop_rollout(chosen.rows(part))
            head = _TeacherHead(logprobs_fn.head, self._payload, cropped, self._vocab_size)
            logprobs = replace(logprobs_fn, head=head)(model, cropped)
            if len(rows) == 0:
                continue
            target = rows[part]
            scores.logprobs[target.to(logprobs.device), : logprobs.shape[1]] = logprobs
            payloads = head.taken[0].split(cropped.response_lengths.tolist())
            for row, payload in zip(target.tolist(), payloads, strict=True):
                scores.payload[row] = payload

    @contextmanager
    def _on_device(self, number: int) -> Iterator[TransformerDecoder]:
        model = self._models[number].to(self._device)
        try:
            yield model
        finally:
            model.cpu()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # what the teacher held is the update's from here on


def check_teacher(
    alias: str, teacher: Teacher, folder: Path, *, tokenizer: Tokenizer, payload: Payload, longest: int
) -> None:
    """Holds a teacher against its weights, the student's vocabulary, the payload and the longest sequence.

    Raises:
        ConfigError: weights that are not those of its ``model``; another vocabulary than the student's; another dtype
            than the payload's; sequences longer than it allows; ranks that its copies do not divide.
    """
    key = f"teachers.{alias}"
    if teacher.dp_replicate < 1 or world_size() % teacher.dp_replicate:
        raise ConfigError(
            f"{key}.dp_replicate: got {teacher.dp_replicate}, expected a divisor of the number of ranks "
            f"({world_size()})"
        )
    try:
        check_weights(folder, teacher.model)
        theirs = Tokenizer(path=str(folder))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    if theirs.vocabulary != tokenizer.vocabulary:
        a, b = theirs.vocabulary, tokenizer.vocabulary
        differing = sorted(token for token in a.keys() | b.keys() if a.get(token) != b.get(token))
        shown = ", ".join(f"{token!r} {a.get(token)} and {b.get(token)}" for token in differing[:4])
        raise ConfigError(
            f"{key}: the vocabulary of {folder} ({len(a)} tokens) is not the student's, {tokenizer.files[0].parent} "
            f"({len(b)} tokens); {len(differing)} tokens differ (teacher's id and student's, None = absent): {shown}"
        )
    if theirs.vocab_size > (rows := teacher.model.tok_embeddings.num_embeddings):
        raise ConfigError(f"{key}: got a head of {rows} rows, expected at least the tokenizer's {theirs.vocab_size}")
    if payload.torch_dtype not in (None, DTYPES[teacher.dtype]):
        raise ConfigError(
            f"{key}.dtype: got {teacher.dtype}, but objective.payload.dtype is "
            f"{str(payload.torch_dtype).removeprefix('torch.')}; set both alike"
        )
    if longest > teacher.model.max_seq_len:
        raise ConfigError(
            f"{key}.model.max_seq_len: got {teacher.model.max_seq_len}, expected at least {longest}, "
            "the longest prompt + completion"
        )
