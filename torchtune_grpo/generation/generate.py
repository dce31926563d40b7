"""``Generate``: prefill every prompt once, decode its G completions together, drop rows as they end."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_grpo.collectives import any_rank
from torchtune_grpo.config import ConfigError
from torchtune_grpo.generation.kv_cache import DecodingLayout, LayerCache
from torchtune_grpo.generation.sampling import sample, uniforms
from torchtune_grpo.layout import shift_left
from torchtune_grpo.models.internals import attention_swapped, unembed_swapped
from torchtune_grpo.training.distributed import evaluation_mode, fsdp_modules, parameters_gathered
from torchtune_grpo.training.progress import progress_bar
from torchtune_grpo.types import PromptBatch, Rollout

COMPACT_BELOW = 0.875  # rows still alive, as a share of those computed, at which ended rows are dropped


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Samples ``group_size`` completions of each prompt, at most ``max_new_tokens`` each.

    ``temperature`` 0 is greedy. ``top_k``, ``top_p`` and ``min_p`` truncate the distribution (null = off) and are
    for evaluation only. All randomness comes from ``PromptBatch.seeds``; nothing is kept between calls.

    ``gather_parameters`` true: parameters are gathered once and each rank decodes at its own pace (needs a full
    copy of the weights in memory). False: they stay sharded, every forward gathers them layer by layer, and ranks
    keep in step until the last row of the last rank has ended.

    Collectives: all-gathers of the parameters at entry (gathered), or those of every forward and one all-reduce a
    token (sharded). Every rank must call it, with at least one prompt.
    """

    group_size: int
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    gather_parameters: bool = True

    def __post_init__(self) -> None:
        for name, ok in {
            "group_size": self.group_size >= 1,
            "max_new_tokens": self.max_new_tokens >= 1,
            "temperature": self.temperature >= 0,
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": self.top_p is None or 0 < self.top_p <= 1,
            "min_p": self.min_p is None or 0 < self.min_p <= 1,
        }.items():
            if not ok:
                raise ConfigError(f"generate.{name}: got {getattr(self, name)}, out of range")

    @property
    def on_policy(self) -> bool:
        """Whether tokens come from the policy's own distribution, as importance ratios assume."""
        return self.temperature > 0 and self.top_k is None and self.top_p is None and self.min_p is None

    def __call__(self, model: TransformerDecoder, batch: PromptBatch) -> Rollout:
        sharded = bool(fsdp_modules(model))
        gathered = parameters_gathered(model) if sharded and self.gather_parameters else nullcontext()
        in_step = sharded and not self.gather_parameters
        eager = torch.compiler.set_stance("force_eager")  # shapes change at every token
        with evaluation_mode(model), gathered, eager, attention_swapped(model, self._layer_cache) as caches:
            tokens, logprobs, lengths, truncated = self._decode(model, batch, caches, in_step)
        return self._rollout(batch, tokens, logprobs, lengths, truncated)

    def _layer_cache(self) -> LayerCache:
        return LayerCache(self.max_new_tokens)

    def _decode(
        self, model: TransformerDecoder, batch: PromptBatch, caches: list[LayerCache], in_step: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens and logprobs ``[N, max_new_tokens]``, lengths ``[N]``, truncated ``[N]``, on the model's device."""
        device = next(model.parameters()).device
        num_rows, steps = len(batch) * self.group_size, self.max_new_tokens
        stop_ids = torch.tensor(batch.stop_ids, device=device)
        noise = uniforms(batch.seeds, self.group_size, steps).to(device)
        tokens = torch.full((num_rows, steps), batch.pad_id, device=device)
        logprobs = torch.zeros(num_rows, steps, device=device)
        lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        ended = torch.zeros(num_rows, dtype=torch.bool, device=device)

        prompt_lengths = batch.lengths.to(device)
        logits = self._prefill(model, batch.tokens.to(device), prompt_lengths)
        layout = DecodingLayout.full(_key_mask(batch.tokens.shape[1], prompt_lengths), self.group_size)
        for cache in caches:
            cache.layout = layout
        rows = torch.arange(num_rows, device=device)  # the row that each computed one stands for
        logits = logits.repeat_interleave(self.group_size, dim=0)
        for step in progress_bar(range(steps), "rollout"):
            ids, chosen = sample(
                logits,
                noise[rows, step],
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
            )
            alive = ~ended[rows]
            live_rows = rows[alive]
            tokens[live_rows, step] = ids[alive]
            logprobs[live_rows, step] = chosen[alive]
            lengths[live_rows] = step + 1
            ended[live_rows] = torch.isin(ids[alive], stop_ids)
            alive = ~ended[rows]
            num_alive = int(alive.sum())
            more = step + 1 < steps and num_alive > 0
            # Ranks in step go on while any has rows to extend; one that has none recomputes a row that ended.
            if not (any_rank(more) if in_step else more):
                break
            if num_alive < COMPACT_BELOW * len(rows) and len(rows) > 1:
                kept = alive.nonzero().squeeze(-1) if num_alive else torch.zeros(1, dtype=torch.int64, device=device)
                rows, ids = rows[kept], ids[kept]
                layout.keep(kept)
                for cache in caches:
                    cache.keep(kept)
            logits = _forward_one(model, ids, prompt_lengths[layout.prompt_of_row] + step)
        return tokens, logprobs, lengths, ~ended

    def _prefill(self, model: TransformerDecoder, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Fills the caches with the prompts' keys; logits ``[B, V]`` after each prompt's last token."""
        tokens = shift_left(tokens, tokens.shape[1] - lengths)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)

        def unembed(hidden: Tensor) -> Tensor:
            last = hidden[torch.arange(len(lengths), device=hidden.device), lengths - 1]
            return model.output(model.norm(last)).float()

        with unembed_swapped(model, unembed):
            return model(tokens, mask=tokens, input_pos=positions)

    def _rollout(
        self, batch: PromptBatch, tokens: Tensor, logprobs: Tensor, lengths: Tensor, truncated: Tensor
    ) -> Rollout:
        width = int(lengths.max())
        prompt_width = batch.tokens.shape[1]
        prompts = batch.tokens.to(tokens.device).repeat_interleave(self.group_size, dim=0)
        padding = (prompt_width - batch.lengths.to(tokens.device)).repeat_interleave(self.group_size, dim=0)
        positions = torch.arange(prompt_width + width, device=tokens.device) - padding[:, None]
        groups = torch.arange(len(batch), device=tokens.device).repeat_interleave(self.group_size)
        return Rollout(
            tokens=torch.cat([prompts, tokens[:, :width]], dim=1),
            positions=positions.clamp(min=0),
            response_mask=_key_mask(width, lengths),
            old_logprobs=logprobs[:, :width],
            truncated=truncated,
            groups=groups,
            answers=[a for a in batch.answers for _ in range(self.group_size)],
            source=[s for s in batch.source for _ in range(self.group_size)],
            group_size=self.group_size,
        )


def _forward_one(model: TransformerDecoder, ids: Tensor, positions: Tensor) -> Tensor:
    """Logits ``[n, V]`` fp32 after one more token ``ids [n]`` a row, at ``positions [n]``."""
    tokens = ids[:, None]
    return model(tokens, mask=tokens, input_pos=positions[:, None])[:, -1]


def _key_mask(width: int, lengths: Tensor) -> Tensor:
    """``[n, width]`` bool, True for the first ``lengths[n]`` positions."""
    return torch.arange(width, device=lengths.device) < lengths[:, None]
