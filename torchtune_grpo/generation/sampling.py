"""One token a row from logits, by inverse transform: a single uniform number a row and step."""

import torch
from torch import Tensor

BLOCK = 256  # tokens of the vocabulary whose probabilities are summed before any is looked at singly
BELOW_ONE = 1 - 2**-53


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
    if temperature == 0.0:
        ids = logits.argmax(dim=-1)
        return ids, _chosen(torch.softmax(logits, dim=-1, dtype=torch.float32), ids).log()
    if temperature != 1.0:
        logits = logits.float() / temperature
    probs = torch.softmax(logits, dim=-1, dtype=torch.float32)
    kept = probs
    if top_k is not None or top_p is not None or min_p is not None:
        kept = truncate(probs, top_k=top_k, top_p=top_p, min_p=min_p)
    ids = inverse_transform(kept, uniform)
    return ids, _chosen(probs, ids).log()


def inverse_transform(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token of each row at which the cumulated ``weights [n, V]`` exceed ``uniform [n]`` of their sum.

    Weights are >= 0 and need not sum to 1; a token of weight 0 is never drawn. Two steps, so that the vocabulary is
    read once and only one block of it is cumulated: the block, then the token inside it. Cumulated in float64, where
    rounding gives mass to no token that has none.
    """
    n, vocabulary = weights.shape
    whole = vocabulary // BLOCK * BLOCK
    blocks = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(dim=-1)
    if whole < vocabulary:
        blocks = torch.cat([blocks, weights[:, whole:].sum(dim=-1, keepdim=True)], dim=1)
    block, rest = _search(blocks, uniform.double())
    places = block[:, None] * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, places.clamp(max=vocabulary - 1)).masked_fill_(places >= vocabulary, 0.0)
    return (block * BLOCK + _search(inside, rest)[0]).clamp(max=vocabulary - 1)


def _search(weights: Tensor, fraction: Tensor) -> tuple[Tensor, Tensor]:
    """Where ``fraction [n]`` (< 1) of each row's sum falls, and which fraction of that entry's weight lies before."""
    cdf = weights.cumsum(dim=-1, dtype=torch.float64)
    target = fraction * cdf[:, -1]  # below the sum: a fraction of at most 1 - 2**-53 rounds down
    # Clamped for sums that are NaN: the caller sees a log-probability that is not finite.
    index = torch.searchsorted(cdf, target[:, None], right=True).clamp(max=weights.shape[1] - 1)
    mass = weights.gather(1, index).double()
    before = cdf.gather(1, index) - mass
    rest = ((target[:, None] - before) / mass).clamp(0.0, BELOW_ONE)
    return index.squeeze(1), rest.squeeze(1)


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


def _chosen(values: Tensor, ids: Tensor) -> Tensor:
    return values.gather(-1, ids[:, None]).squeeze(-1)
