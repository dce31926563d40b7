"""Loaders whose order is a pure function of (seed, step): a run resumes from the step number alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtune_grpo.config import ConfigError
from torchtune_grpo.data.dataset import Dataset, Example
from torchtune_grpo.data.prompts import Prompt
from torchtune_grpo.data.tokenizer import Tokenizer
from torchtune_grpo.seeds import mix_seed
from torchtune_grpo.types import PromptBatch

DUMMY_ROW = -1
"""Row index of a prompt that only fills up a rank's batch; what comes of it is not counted."""


@dataclass(frozen=True, kw_only=True)
class SFTBatch:
    """Examples of one rank to imitate.

    ``tokens [B, S]`` int64, right padded: prompt, completion, end token; ``lengths [B]`` int64, real tokens;
    ``loss_mask [B, S]`` bool: True = a target to be learnt (completion and end token; not prompt, not
    padding).
    """

    tokens: Tensor
    lengths: Tensor
    loss_mask: Tensor


@dataclass(frozen=True, kw_only=True)
class _Row:
    """An encoded prompt and the example it came from; ``index`` is the example's place in its data set."""

    index: int
    ids: list[int]
    example: Example


class _EpochOrder:
    """Deals rows to ranks in global batches: a new permutation each epoch, whose remainder is left out."""

    def __init__(
        self, rows: int, dropped: Mapping[str, int], *, batch_size: int, rank: int, world_size: int, seed: int
    ) -> None:
        self.global_batch = batch_size * world_size
        if rows < self.global_batch:
            raise ConfigError(
                f"dataset: {rows} rows are usable (dropped: {_listed(dropped)}), expected at least the "
                f"{self.global_batch} of one step; lower prompts_per_step or examples_per_step, or raise "
                "max_prompt_tokens or max_tokens"
            )
        self.steps_per_epoch = rows // self.global_batch
        self._rows, self._seed = rows, seed
        self._slice = slice(rank * batch_size, (rank + 1) * batch_size)

    def rows_of(self, step: int) -> list[int]:
        """This rank's rows of global batch ``step``."""
        epoch, position = divmod(step, self.steps_per_epoch)
        generator = torch.Generator().manual_seed(mix_seed(self._seed, epoch))
        order = torch.randperm(self._rows, generator=generator)
        return order[position * self.global_batch :][self._slice].tolist()


class PromptLoader:
    """Prompts to sample completions for.

    Global batch ``step`` is the same set of rows for any number of ranks (given ``batch_size * world_size``),
    and each rank takes its slice. An epoch's last, incomplete batch is left out; the next epoch shuffles
    anew. A prompt longer than ``max_prompt_tokens`` is left out, the same for sampling and scoring, and
    counted in ``dropped``. No collectives.

    Args:
        batch_size: prompts per rank and step.
        seed: decides the order, and with the step and the place in the *global* batch the sampling seed of each
            prompt: the same prompt at two places gets different noise, and how many ranks share the batch has no say.

    Raises:
        ConfigError: fewer usable rows than ``batch_size * world_size``.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        prompt: Prompt,
        *,
        batch_size: int,
        max_prompt_tokens: int,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        self._rows, self.dropped = _encode_prompts(dataset, tokenizer, prompt, max_prompt_tokens)
        dropped = {**dataset.dropped, **self.dropped}
        self._order = _EpochOrder(
            len(self._rows), dropped, batch_size=batch_size, rank=rank, world_size=world_size, seed=seed
        )
        self._tokenizer, self._first_place, self._seed = tokenizer, rank * batch_size, seed
        self.sources = sorted({row.example.source for row in self._rows})
        self.steps_per_epoch = self._order.steps_per_epoch

    def batch(self, step: int) -> PromptBatch:
        """This rank's prompts of global batch ``step``: 0, 1, ..., on through the epochs without end."""
        rows = [self._rows[i] for i in self._order.rows_of(step)]
        seeds = [mix_seed(self._seed, step, self._first_place + i) for i in range(len(rows))]
        return _prompt_batch(rows, seeds, self._tokenizer)


class EvalLoader:
    """Every prompt exactly once over all ranks, as ``(PromptBatch, row indices)``; no collectives.

    Rank r takes rows r, r + world_size, ... Every rank gets the same number of batches of the same size: a
    rank that is short of rows gets a real prompt again, with index ``DUMMY_ROW``, not to be counted. A row's
    sampling seed depends on ``seed`` and its index in the data set alone, so the number of ranks and the
    batch size do not change what is sampled. Prompts longer than ``max_prompt_tokens`` are left out and
    counted in ``dropped``.

    Raises:
        ConfigError: no usable row, or ``batch_size`` below 1.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        prompt: Prompt,
        *,
        batch_size: int,
        max_prompt_tokens: int,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        rows, self.dropped = _encode_prompts(dataset, tokenizer, prompt, max_prompt_tokens)
        if not rows or batch_size < 1:
            raise ConfigError(
                f"got {len(rows)} usable rows (dropped: {_listed({**dataset.dropped, **self.dropped})}) and "
                f"batch_size {batch_size}, expected both > 0; max_prompt_tokens may be too low"
            )
        self.num_rows = len(rows)
        mine = [(row.index, row) for row in rows[rank::world_size]]
        missing = -(-len(rows) // world_size) - len(mine)
        self._mine = mine + [(DUMMY_ROW, rows[0])] * missing
        self._batch_size, self._seed, self._tokenizer = batch_size, seed, tokenizer

    def __len__(self) -> int:
        """Batches, the same on every rank."""
        return -(-len(self._mine) // self._batch_size)

    def __iter__(self) -> Iterator[tuple[PromptBatch, list[int]]]:
        for start in range(0, len(self._mine), self._batch_size):
            indices, rows = zip(*self._mine[start : start + self._batch_size], strict=True)
            seeds = [mix_seed(self._seed, index) for index in indices]
            yield _prompt_batch(rows, seeds, self._tokenizer), list(indices)


class SFTLoader:
    """Examples to imitate: the prompt's ids, the completion's ids, the end token.

    Prompt and completion are encoded apart, so that an RL prompt is a prefix of its SFT example. An example
    longer than ``max_tokens`` is left out and counted in ``dropped``, never cut: what is learnt always ends
    with the end token. Order and epochs as in ``PromptLoader``. No collectives.

    Raises:
        ConfigError: fewer usable rows than ``batch_size * world_size``.
    """

    def __init__(
        self,
        dataset: Dataset,
        tokenizer: Tokenizer,
        prompt: Prompt,
        *,
        batch_size: int,
        max_tokens: int,
        rank: int,
        world_size: int,
        seed: int,
    ) -> None:
        encoded = [_encode_example(example, tokenizer, prompt) for example in dataset.examples]
        self._rows = [row for row in encoded if len(row[0]) <= max_tokens]
        self.dropped = _counted("example_too_long", len(encoded) - len(self._rows))
        dropped = {**dataset.dropped, **self.dropped}
        self._order = _EpochOrder(
            len(self._rows), dropped, batch_size=batch_size, rank=rank, world_size=world_size, seed=seed
        )
        self._pad_id = tokenizer.pad_id
        self.steps_per_epoch = self._order.steps_per_epoch

    def batch(self, step: int) -> SFTBatch:
        """This rank's examples of global batch ``step``: 0, 1, ..., on through the epochs without end."""
        rows = [self._rows[i] for i in self._order.rows_of(step)]
        tokens, lengths = _pad([ids for ids, _ in rows], self._pad_id, left=False)
        place = torch.arange(tokens.shape[1])
        prompt_lengths = torch.tensor([prompt_length for _, prompt_length in rows])
        loss_mask = (place >= prompt_lengths[:, None]) & (place < lengths[:, None])
        return SFTBatch(tokens=tokens, lengths=lengths, loss_mask=loss_mask)


def left_pad(ids: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Rows of ids -> ``tokens [B, P]`` int64 with the padding in front, and their ``lengths [B]`` int64."""
    return _pad(ids, pad_id, left=True)


def _pad(ids: Sequence[Sequence[int]], pad_id: int, *, left: bool) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in ids])
    width = int(lengths.max())
    padding = [[pad_id] * (width - len(row)) for row in ids]
    rows = [[*pad, *row] if left else [*row, *pad] for row, pad in zip(ids, padding, strict=True)]
    return torch.tensor(rows, dtype=torch.int64), lengths


def _encode_prompts(
    dataset: Dataset, tokenizer: Tokenizer, prompt: Prompt, max_prompt_tokens: int
) -> tuple[list[_Row], dict[str, int]]:
    encoded = [
        _Row(index=i, ids=prompt.encode(tokenizer, example.question), example=example)
        for i, example in enumerate(dataset.examples)
    ]
    rows = [row for row in encoded if len(row.ids) <= max_prompt_tokens]
    return rows, _counted("prompt_too_long", len(encoded) - len(rows))


def _encode_example(example: Example, tokenizer: Tokenizer, prompt: Prompt) -> tuple[list[int], int]:
    """The ids to learn from, and how many of them are prompt."""
    prompt_ids = prompt.encode(tokenizer, example.question)
    return [*prompt_ids, *tokenizer.encode(example.solution), tokenizer.eos_id], len(prompt_ids)


def _listed(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in dropped.items()) or "none"


def _counted(reason: str, count: int) -> dict[str, int]:
    return {reason: count} if count else {}


def _prompt_batch(rows: Sequence[_Row], seeds: Sequence[int], tokenizer: Tokenizer) -> PromptBatch:
    tokens, lengths = left_pad([row.ids for row in rows], tokenizer.pad_id)
    return PromptBatch(
        tokens=tokens,
        lengths=lengths,
        seeds=torch.tensor(seeds, dtype=torch.int64),
        pad_id=tokenizer.pad_id,
        stop_ids=tokenizer.stop_ids,
        answers=[row.example.answer for row in rows],
        solutions=[[*tokenizer.encode(row.example.solution), tokenizer.eos_id] for row in rows],
        source=[row.example.source for row in rows],
    )
