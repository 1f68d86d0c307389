"""Which tokens train: the most uncertain fraction of the whole batch.

80/20 rule (2506.01939): the policy term acts only on the share rho of tokens with the highest entropy. With n
counted tokens on all ranks, the threshold is the ceil(rho n)-th largest entropy and every token at or above
it is kept, so ties at the threshold stay in together: a batch whose entropies are all equal keeps everything.

The threshold is exact. On one rank it is read off the sorted entropies. Over several, entropies are not gathered: the
bits of non-negative float32 numbers sort like the numbers, so the threshold's bits are found eight at a time, each time
from how many entropies, summed over ranks, are at or above each of 256 candidates. Four short all-reduces whatever the
batch. Nothing is read back to the host.

There is one implementation, in torch: 12,288 tokens are 48 KB, and nothing here is worth a kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_lit.errors import UserError


def entropy_mask(
    entropy: Tensor,
    completion_mask: Tensor,
    *,
    keep: float = 0.2,
    min_tokens: int = 0,
    all_reduce: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Mask of the top share of counted tokens by entropy, at least a few in every row.

    Args:
        entropy: (N, T) nats per token; no gradient flows.
        completion_mask: (N, T) bool, True where the token counts.
        keep: share of the counted tokens to keep, in (0, 1].
        min_tokens: a row with fewer kept tokens keeps its own most uncertain ones instead, up to this many
            (or all it has).
        all_reduce: sums an int64 tensor over all ranks in place (``torch.distributed.all_reduce`` fits), so
            that the threshold is that of the global batch; None for a single process.

    Returns:
        (N, T) bool, True where the token is kept; never outside ``completion_mask``. Of a fully masked
        batch, all False.

    Raises:
        UserError: for a share out of range, a negative minimum, or shapes that differ.
    """
    if entropy.shape != completion_mask.shape or entropy.dim() != 2:
        shapes = (tuple(entropy.shape), tuple(completion_mask.shape))
        raise UserError("entropy, completion_mask", shapes, "the same (N, T)")
    if not 0 < keep <= 1:
        raise UserError("keep", keep, "in (0, 1]")
    if min_tokens < 0:
        raise UserError("min_tokens", min_tokens, ">= 0")
    mask = completion_mask.bool()
    if keep == 1:
        return mask.clone()
    # -0.0, the tiny negatives of rounding and NaN count as 0; tokens that don't count sort below that
    values = torch.where(entropy > 0, entropy.detach().float(), 0.0).masked_fill(~mask, -1.0)
    kept = mask & (values >= _threshold(values, keep, all_reduce))
    best_count = min(min_tokens, entropy.shape[1])
    if best_count:
        best = values.topk(best_count, dim=1).indices
        own = torch.zeros_like(mask).scatter_(1, best, True) & mask
        kept = torch.where(kept.sum(1, keepdim=True) < min_tokens, own, kept)
    return kept


def _threshold(values: Tensor, keep: float, all_reduce: Callable[[Tensor], object] | None) -> Tensor:
    """The ceil(keep n)-th largest of the n values from 0 up over all ranks, float32; any number if n = 0."""
    ordered = values.flatten().sort().values
    if all_reduce is None:
        place = len(ordered) - _rank((ordered >= 0).sum(), keep)
        return ordered.gather(0, place[None]) if len(ordered) else values.new_zeros(1)
    keys = ordered.view(torch.int32)  # in the same order: the sign is the highest bit
    steps = torch.arange(256, dtype=torch.int32, device=keys.device)
    found, rank = torch.zeros(1, dtype=torch.int32, device=keys.device), None
    for shift in (23, 15, 7, 0):  # 31 bits in all; the last digit's 256 candidates go beyond what is left, and above it
        candidates = found + (steps << shift)
        counts = len(keys) - torch.searchsorted(keys, candidates)  # at or above each; falling
        all_reduce(counts)
        if rank is None:
            rank = _rank(counts[0], keep)
        digit = (counts >= rank).sum().sub(1).clamp(min=0)  # the largest that enough entropies reach
        found = candidates.gather(0, digit[None])
    return found.view(torch.float32)


def _rank(count: Tensor, keep: float) -> Tensor:
    """How many of ``count`` tokens to keep, one at least; a round share's count is not one too many by rounding."""
    return (count.double() * keep - 1e-9).ceil().long().clamp(min=1)


def keep_row_weight(weights: Tensor, kept: Tensor) -> Tensor:
    """Weights with the dropped tokens at 0 and the rest scaled up, so that every row keeps its total weight.

    Args:
        weights: (N, T) token weights, 0 where a token doesn't count.
        kept: (N, T) bool from ``entropy_mask``.
    """
    dropped = torch.where(kept, weights, 0)
    left = dropped.sum(1, keepdim=True)
    return torch.where(left != 0, dropped * (weights.sum(1, keepdim=True) / left), 0)
