"""``Generate``: prefill every prompt once, decode its G completions together, drop rows as they end."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torchtune.modules import TransformerDecoder

from torchtune_grpo.collectives import all_reduce
from torchtune_grpo.config import ConfigError
from torchtune_grpo.failures import RunError
from torchtune_grpo.generation.decoding import (
    Completions,
    Decoder,
    EagerStep,
    GraphedStep,
    HeadFn,
    prefill,
)
from torchtune_grpo.generation.kv_cache import LayerCache
from torchtune_grpo.generation.rotary import rotations_shared
from torchtune_grpo.generation.sampling import sample, uniforms
from torchtune_grpo.layout import key_mask, shift_left
from torchtune_grpo.models.internals import attention_swapped
from torchtune_grpo.models.linear import packed_linears
from torchtune_grpo.rollouts import build_rollout
from torchtune_grpo.training.distributed import evaluation_mode, fsdp_modules, parameters_gathered
from torchtune_grpo.types import PromptBatch, Rollout


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Samples ``group_size`` completions of each prompt, at most ``max_new_tokens`` each.

    ``temperature`` 0 is greedy. ``top_k``, ``top_p`` and ``min_p`` truncate the distribution (null = off) and are
    for evaluation only. All randomness comes from ``PromptBatch.seeds``; nothing is kept between calls.

    ``max_total_tokens``: the most that a prompt and its completion may have together (null = no such limit); a long
    prompt then leaves its completions fewer than ``max_new_tokens``.

    ``max_cached_tokens``: keys and values of at most so many tokens are held at once (null = of the whole batch),
    counting each prompt once and ``group_size`` completions at their limit, padding included. A batch that needs more
    is sampled in parts of whole groups, at least one, one part after the other; what is sampled stays the same.

    ``gather_parameters`` true: parameters are gathered once and each rank decodes at its own pace (needs a full
    copy of the weights in memory). False: they stay sharded, every forward gathers them layer by layer, and ranks
    keep in step until the last row of the last rank has ended.

    ``cuda_graphs``: decode by replaying captured CUDA graphs (needs ``device: cuda`` and ``gather_parameters``).

    Collectives: all-gathers of the parameters at entry (gathered); or those of every forward, one all-reduce a token
    and one for the number of parts (sharded). Every rank must call it, with at least one prompt.
    """

    group_size: int
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_total_tokens: int | None = None
    max_cached_tokens: int | None = None
    gather_parameters: bool = True
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        for name, ok in {
            "group_size": self.group_size >= 1,
            "max_new_tokens": self.max_new_tokens >= 1,
            "temperature": self.temperature >= 0,
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": self.top_p is None or 0 < self.top_p <= 1,
            "min_p": self.min_p is None or 0 < self.min_p <= 1,
            "max_total_tokens": self.max_total_tokens is None or self.max_total_tokens >= 2,
            "max_cached_tokens": self.max_cached_tokens is None or self.max_cached_tokens >= 1,
        }.items():
            if not ok:
                raise ConfigError(f"generate.{name}: got {getattr(self, name)}, out of range")
        if self.cuda_graphs and not self.gather_parameters:
            raise ConfigError("generate.cuda_graphs: got true, expected false, or gather_parameters true")

    @property
    def on_policy(self) -> bool:
        """Whether tokens come from the policy's own distribution, as importance ratios assume."""
        return self.temperature > 0 and self.top_k is None and self.top_p is None and self.min_p is None

    def longest(self, max_prompt_tokens: int) -> int:
        """The most tokens that a prompt of up to ``max_prompt_tokens`` and its completion may have.

        Raises:
            ConfigError: ``max_total_tokens`` leaves a prompt no room for a completion.
        """
        if self.max_total_tokens is None:
            return max_prompt_tokens + self.max_new_tokens
        if self.max_total_tokens <= max_prompt_tokens:
            raise ConfigError(
                f"generate.max_total_tokens: got {self.max_total_tokens}, expected more than the "
                f"{max_prompt_tokens} of max_prompt_tokens"
            )
        return min(max_prompt_tokens + self.max_new_tokens, self.max_total_tokens)

    def __call__(self, model: TransformerDecoder, batch: PromptBatch, *, row_limits: Tensor | None = None) -> Rollout:
        """``row_limits [N]`` int64: the most tokens each completion may have, beside the other limits."""
        sharded = bool(fsdp_modules(model))
        in_step = sharded and not self.gather_parameters
        device = next(model.parameters()).device
        if self.cuda_graphs and device.type != "cuda":
            raise ConfigError(f"generate.cuda_graphs: got true on device {device.type}, expected device: cuda")
        limits = self._limits(batch, row_limits)
        parts = self._split(batch, limits)
        count = all_reduce(torch.tensor(len(parts)), torch.distributed.ReduceOp.MAX) if in_step else len(parts)
        idle = int(count) - len(parts)  # a rank with fewer parts samples its last one again, for the others' sake
        gathered = parameters_gathered(model) if sharded and self.gather_parameters else nullcontext()
        # Eager, since shapes change at every token; entered first, for it holds from its construction.
        with torch.compiler.set_stance("force_eager"), evaluation_mode(model), gathered:
            with nullcontext(model.output) if in_step else packed_linears(model) as head:
                sampled = [
                    self._sample(model, head, part, limits.to(device), in_step)
                    for part, limits in parts + [parts[-1]] * idle
                ]
        return self._rollout(batch, sampled[: len(parts)])

    def _limits(self, batch: PromptBatch, row_limits: Tensor | None) -> Tensor:
        """The most tokens of each row, ``[N]`` int64 on CPU."""
        limits = torch.full((len(batch) * self.group_size,), self.max_new_tokens)
        if self.max_total_tokens is not None:
            room = (self.max_total_tokens - batch.lengths.cpu()).repeat_interleave(self.group_size)
            limits = limits.minimum(room)
        if row_limits is not None:
            assert row_limits.shape == limits.shape, f"row_limits: got {tuple(row_limits.shape)}, expected one a row"
            limits = limits.minimum(row_limits.cpu())
        if limits.min() < 1:
            raise ValueError(f"a completion may have {int(limits.min())} tokens, expected at least 1 for every row")
        return limits

    def _split(self, batch: PromptBatch, limits: Tensor) -> list[tuple[PromptBatch, Tensor]]:
        """Whole groups with their limits, in order, as many at once as ``max_cached_tokens`` allows."""
        size = self.group_size
        prompts, longest = batch.lengths.tolist(), limits.view(-1, size).amax(dim=1).tolist()
        bounds = [0]
        for i in range(1, len(batch)) if self.max_cached_tokens is not None else ():
            part = slice(bounds[-1], i + 1)
            held = (i + 1 - bounds[-1]) * (max(prompts[part]) + size * max(longest[part]))  # the caches are rectangles
            if held > self.max_cached_tokens:
                bounds.append(i)
        bounds.append(len(batch))
        return [(batch.rows(a, b), limits[a * size : b * size]) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]

    def _sample(
        self, model: TransformerDecoder, head: HeadFn, batch: PromptBatch, limits: Tensor, in_step: bool
    ) -> Completions:
        device = limits.device
        lengths = batch.lengths.to(device)
        padding = batch.tokens.shape[1] - lengths
        width = int(lengths.max())
        tokens = shift_left(batch.tokens.to(device), padding)[:, :width]
        done = Completions(limits, self.max_new_tokens, pad_id=batch.pad_id)
        inference = nullcontext() if in_step else torch.inference_mode()  # FSDP's own tensors must stay ordinary ones
        with inference, attention_swapped(model, LayerCache) as caches:
            logits = prefill(model, head, tokens, lengths, whole=not in_step)
            decoder = Decoder(
                GraphedStep(model, head) if self.cuda_graphs else EagerStep(model, head, whole=not in_step),
                caches,
                key_mask(width, lengths),
                done,
                noise=uniforms(batch.seeds, self.group_size, self.max_new_tokens).to(device),
                draw=partial(
                    sample, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p
                ),
                stop_ids=torch.tensor(batch.stop_ids, dtype=torch.int64, device=device),
                in_step=in_step,
            )
            with rotations_shared(model):
                decoder.run(logits.repeat_interleave(self.group_size, dim=0))
        if not bool(done.logprobs.isfinite().all()):
            raise RunError(
                "rollout: the policy's logits are not finite: its weights or its dtype overflowed; start another run "
                "from an earlier checkpoint (weights, output_dir) with a lower optimizer.lr, or with dtype=fp32"
            )
        return done

    def _rollout(self, batch: PromptBatch, sampled: list[Completions]) -> Rollout:
        tokens, logprobs, lengths, stopped = (
            torch.cat([getattr(part, name) for part in sampled])
            for name in ("tokens", "logprobs", "lengths", "stopped")
        )
        return build_rollout(
            batch,
            responses=tokens,
            logprobs=logprobs,
            lengths=lengths,
            truncated=~stopped,
            group_size=self.group_size,
            cache_bytes=max(part.cache_bytes for part in sampled),
        )
