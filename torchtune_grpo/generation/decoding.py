"""The loop over tokens: sample, note, drop what ended, run the model on what goes on."""

from collections.abc import Callable

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_grpo.collectives import any_rank
from torchtune_grpo.generation.kv_cache import DecodingLayout, LayerCache
from torchtune_grpo.models.internals import unembed_swapped
from torchtune_grpo.training.progress import progress_bar

COMPACT_BELOW = 0.875  # rows still alive, as a share of those computed, at which ended rows are dropped
GROWTH = 64  # response positions allocated at a time


DrawFn = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits ``[n, V]`` and uniform numbers ``[n]`` -> token ids and their log-probabilities ``[n]``: see ``sample``."""


class Completions:
    """What has been sampled so far, for all rows.

    ``tokens [N, steps]`` int64, ``logprobs [N, steps]`` fp32, ``lengths [N]`` int64, ``stopped [N]`` bool: True = by a
    stop token; ``limits [N]`` int64: the most tokens that each row may have; ``cache_bytes``: the most that keys and
    values have taken.
    """

    def __init__(self, limits: Tensor, steps: int, *, pad_id: int) -> None:
        num_rows, device = len(limits), limits.device
        self.limits = limits
        self.cache_bytes = 0
        self.tokens = torch.full((num_rows, steps), pad_id, device=device)
        self.logprobs = torch.zeros(num_rows, steps, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(num_rows, dtype=torch.bool, device=device)

    def goes_on(self, rows: Tensor) -> Tensor:
        """Whether each of the rows ``[n]`` may still grow, bool ``[n]``."""
        return ~self.stopped[rows] & (self.lengths[rows] < self.limits[rows])

    def add(self, rows: Tensor, step: int, ids: Tensor, logprobs: Tensor, stop_ids: Tensor) -> None:
        self.tokens[rows, step] = ids
        self.logprobs[rows, step] = logprobs
        self.lengths[rows] = step + 1
        self.stopped[rows] = torch.isin(ids, stop_ids)


HeadFn = Callable[[Tensor], Tensor]
"""The LM head: hidden states ``[n, D]``, normalised -> logits ``[n, V]``."""


def next_logits(
    model: TransformerDecoder,
    head: HeadFn,
    tokens: Tensor,
    positions: Tensor,
    last: Callable[[Tensor], Tensor],
    *,
    whole: bool,
) -> Tensor:
    """Logits ``[n, V]`` after the places of ``tokens``, ``positions [n, s]`` that ``last`` picks.

    ``last``: hidden states ``[n, s, D] -> [n, D]``.
    ``whole``: parameters lie whole on every rank; FSDP's hooks, which would have nothing to do, are passed by.
    Collectives: those of FSDP, none if ``whole``.
    """
    with unembed_swapped(model, lambda hidden: head(model.norm(last(hidden)))):
        if not whole:
            return model(tokens, mask=tokens, input_pos=positions)
        hidden = model.tok_embeddings(tokens)
        for layer in model.layers:
            inner = getattr(layer, "_checkpoint_wrapped_module", layer)  # checkpointing reads the generator's state
            hidden = inner.forward(hidden, mask=tokens, input_pos=positions)
        return model.unembed(hidden)


class EagerStep:
    """Logits ``[n, V]`` after one more token a row, ``ids [n]`` at ``positions [n]``."""

    fixed_shapes = False

    def __init__(self, model: TransformerDecoder, head: HeadFn, *, whole: bool) -> None:
        self._model, self._head, self._whole = model, head, whole

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        tokens, positions = ids[:, None], positions[:, None]
        return next_logits(self._model, self._head, tokens, positions, lambda h: h[:, -1], whole=self._whole)

    def shapes_changed(self) -> None:
        """Rows were dropped or caches moved."""


class GraphedStep:
    """``EagerStep`` as a CUDA graph: captured at the first token, and anew when rows are dropped or caches moved.

    Needs whole parameters. The graph is replayed, so Python runs once a capture instead of once a token.
    """

    fixed_shapes = True

    def __init__(self, model: TransformerDecoder, head: HeadFn) -> None:
        self._eager = EagerStep(model, head, whole=True)
        self._graph: torch.cuda.CUDAGraph | None = None

    def shapes_changed(self) -> None:
        self._graph = None

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        if self._graph is None:
            self._capture(ids, positions)
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        self._graph.replay()
        return self._logits

    def _capture(self, ids: Tensor, positions: Tensor) -> None:
        self._ids, self._positions = ids.clone(), positions.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # once outside the capture, for what libraries allocate at their first use
            self._eager(self._ids, self._positions)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._eager(self._ids, self._positions)


def prefill(model: TransformerDecoder, head: HeadFn, tokens: Tensor, lengths: Tensor, *, whole: bool) -> Tensor:
    """Fills the caches with the prompts' keys; logits ``[B, V]`` after each prompt's last token.

    ``tokens [B, P]`` start at position 0; ``lengths [B]`` are real.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)

    places = torch.arange(len(lengths), device=tokens.device), lengths - 1
    return next_logits(model, head, tokens, positions, lambda hidden: hidden[places], whole=whole)


class Decoder:
    """Samples completions of some prompts whose keys ``caches`` already hold.

    Args:
        step: the model's forward for one more token a row.
        prompt_mask: ``[B, P]``, True = real prompt key.
        done: empty, to be filled.
        noise: ``[N, max_new_tokens]``, uniform numbers.
        in_step: ranks go on together until the last row of the last rank has ended.
    """

    def __init__(
        self,
        step: EagerStep | GraphedStep,
        caches: list[LayerCache],
        prompt_mask: Tensor,
        done: Completions,
        *,
        noise: Tensor,
        draw: DrawFn,
        stop_ids: Tensor,
        in_step: bool,
    ) -> None:
        self._step, self._caches, self._draw = step, caches, draw
        self._done, self._noise, self._stop_ids, self._in_step = done, noise, stop_ids, in_step
        self._layout = DecodingLayout.full(
            prompt_mask, len(done.limits) // len(prompt_mask), fixed_shapes=step.fixed_shapes
        )
        self._positions = prompt_mask.sum(dim=1)[self._layout.prompt_of_row]  # of each computed row's first token
        self._rows = torch.arange(len(done.limits), device=prompt_mask.device)  # which row each computed one is
        self._longest = int(done.limits.max())
        self._capacity = 0
        for cache in caches:
            cache.start_decoding(self._layout)
        self._note_memory()

    def run(self, logits: Tensor) -> None:
        """Samples until all rows have ended, from the ``logits [N, V]`` that follow the prompts.

        Collectives: one all-reduce a token if ``in_step``. A rank whose rows have all ended then computes one of them
        again and again, at the same place, for as long as another rank has rows to extend.
        """
        busy = True
        for step in progress_bar(range(self._noise.shape[1]), "rollout"):
            if busy:
                ids = self._sample(logits, step)
                alive = self._done.goes_on(self._rows)
                num_alive = int(alive.sum())
                busy = num_alive > 0
            if not (any_rank(busy) if self._in_step else busy):
                return
            if num_alive < COMPACT_BELOW * len(self._rows) and len(self._rows) > 1:
                ids = self._drop_ended(ids, alive if busy else torch.arange(len(alive), device=alive.device) == 0)
            self._reserve()
            logits = self._step(ids, self._positions + self._layout.length)
            if busy:
                self._layout.advance()

    def _sample(self, logits: Tensor, step: int) -> Tensor:
        ids, logprobs = self._draw(logits, self._noise[self._rows, step])
        alive = self._done.goes_on(self._rows)
        self._done.add(self._rows[alive], step, ids[alive], logprobs[alive], self._stop_ids)
        return ids

    def _drop_ended(self, ids: Tensor, alive: Tensor) -> Tensor:
        kept = alive.nonzero().squeeze(-1)
        self._rows, self._positions = self._rows[kept], self._positions[kept]
        slots = self._layout.keep(kept)
        for cache in self._caches:
            cache.keep(slots)
        self._step.shapes_changed()
        return ids[kept]

    def _reserve(self) -> None:
        if self._layout.length == self._capacity:
            self._capacity = min(self._capacity + GROWTH, self._longest)
            for cache in self._caches:
                cache.reserve(self._capacity)
            self._step.shapes_changed()
            self._note_memory()

    def _note_memory(self) -> None:
        self._done.cache_bytes = max(self._done.cache_bytes, sum(cache.nbytes for cache in self._caches))
