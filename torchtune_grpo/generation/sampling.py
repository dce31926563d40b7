"""One token a row from logits, by inverse transform: a single uniform number a row and step."""

import torch
from torch import Tensor


def uniforms(seeds: Tensor, group_size: int, steps: int) -> Tensor:
    """Uniform numbers in [0, 1), ``[B * group_size, steps]`` fp32 on CPU, from one seed a prompt (``seeds [B]``).

    Drawn on CPU whatever the device, so that a seed means the same completions everywhere up to rounding.
    """
    rows = [
        torch.rand(group_size, steps, generator=torch.Generator().manual_seed(int(seed))) for seed in seeds.tolist()
    ]
    return torch.cat(rows)


def sample(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Token ids ``[n]`` and their log-probabilities ``[n]`` fp32 for ``logits [n, V]``, ``uniform [n]`` in [0, 1).

    Log-probabilities are in nats, at the sampling temperature (1 for greedy), over the *whole* vocabulary: with
    top-k, top-p or min-p they are not those of the distribution sampled from, which is why training refuses these.
    """
    logits = logits.float()
    if temperature == 0.0:
        ids = logits.argmax(dim=-1)
        return ids, _chosen(logits, ids) - torch.logsumexp(logits, dim=-1)
    logits = logits / temperature
    normalizer = torch.logsumexp(logits, dim=-1)
    probs = torch.exp(logits - normalizer[:, None])
    if top_k is not None or top_p is not None or min_p is not None:
        probs = truncate(probs, top_k=top_k, top_p=top_p, min_p=min_p)
    # float64: a parallel scan need not be monotone, and rounding must not give mass to a token that has none.
    cdf = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform.double() * cdf[:, -1]  # uniform <= 1 - 2**-24, so the product is below the total
    ids = torch.searchsorted(cdf, target[:, None], right=True).squeeze(-1)
    return ids, _chosen(logits, ids) - normalizer


def truncate(probs: Tensor, *, top_k: int | None, top_p: float | None, min_p: float | None) -> Tensor:
    """``probs [n, V]`` with the excluded tokens at 0 (not renormalised).

    min-p keeps p >= min_p * max p; then the ``top_k`` likeliest; then the smallest set of likeliest tokens whose
    share of what is left reaches ``top_p`` (nucleus, Holtzman et al. 2020). At least the likeliest token stays.
    """
    if min_p is not None:
        probs = torch.where(probs >= min_p * probs.amax(dim=-1, keepdim=True), probs, 0.0)
    if top_k is None and top_p is None:
        return probs
    ordered, index = probs.sort(dim=-1, descending=True)
    if top_k is not None:
        ordered[:, top_k:] = 0.0
    if top_p is not None:
        before = ordered.cumsum(dim=-1) - ordered
        ordered = torch.where(before < top_p * ordered.sum(dim=-1, keepdim=True), ordered, 0.0)
    return torch.zeros_like(probs).scatter(-1, index, ordered)


def _chosen(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids[:, None]).squeeze(-1)
