"""Which tokens train: the most uncertain fraction of the whole batch.

80/20 rule (2506.01939): the policy term acts only on the share rho of tokens with the highest entropy. With n
counted tokens on all ranks, the threshold is the ceil(rho n)-th largest entropy and every token at or above
it is kept, so ties at the threshold stay in together: a batch whose entropies are all equal keeps everything.

The threshold is exact without gathering entropies. The bits of non-negative float32 numbers sort like the
numbers, so the threshold's bits are found a byte at a time: a histogram of 256 counts, summed over ranks,
says which byte it has next. Four short all-reduces whatever the batch, nothing read back to the host.

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
    # -0.0 and the tiny negatives of rounding count as 0, a NaN as certain
    values = entropy.detach().float().nan_to_num(0.0).clamp(min=0.0) + 0.0
    keys = values.view(torch.int32)
    kept = mask & (keys >= _threshold(keys, mask, keep, all_reduce))
    best_count = min(min_tokens, entropy.shape[1])
    if best_count:
        best = values.masked_fill(~mask, -1.0).topk(best_count, dim=1).indices
        own = torch.zeros_like(mask).scatter_(1, best, True) & mask
        kept = torch.where(kept.sum(1, keepdim=True) < min_tokens, own, kept)
    return kept


def _threshold(keys: Tensor, mask: Tensor, keep: float, all_reduce: Callable[[Tensor], object] | None) -> Tensor:
    """The ceil(keep n)-th largest of the n masked keys over all ranks; above all keys if n = 0."""
    live, keys = mask.flatten(), keys.flatten()
    prefix = torch.zeros((), dtype=torch.int32, device=keys.device)
    rank = None  # how many keys from the top, among those that share the prefix
    for shift in (24, 16, 8, 0):
        digit = (keys >> shift) & 255
        counts = _histogram(digit, live)
        if all_reduce is not None:
            all_reduce(counts)
        from_top = counts.flip(0).cumsum(0)  # (256,) keys with digit 255, with 254 or more, ...
        if rank is None:
            rank = (from_top[-1].double() * keep - 1e-9).ceil().long().clamp(min=1)
        above = (from_top < rank).sum()  # digits wholly above the threshold; 256 in an empty batch
        rank = rank - torch.where(above > 0, from_top[(above - 1).clamp(min=0)], 0)
        chosen = 255 - above
        prefix = prefix | (chosen.clamp(min=0) << shift).int()
        live = live & (digit == chosen)
    return torch.where(from_top[-1] == 0, torch.full_like(prefix, 2**31 - 1), prefix)


def _histogram(digit: Tensor, live: Tensor) -> Tensor:
    """(256,) int64, how many live digits there are of each."""
    if digit.is_cuda and len(digit) <= 1 << 17:
        # most digits are the same few, and additions to one address wait for each other
        return ((digit[:, None] == torch.arange(256, device=digit.device)) & live[:, None]).sum(0)
    counts = torch.zeros(256, dtype=torch.int64, device=digit.device)
    return counts.scatter_add_(0, digit.long(), live.long())


def keep_row_weight(weights: Tensor, kept: Tensor) -> Tensor:
    """Weights with the dropped tokens at 0 and the rest scaled up, so that every row keeps its total weight.

    Args:
        weights: (N, T) token weights, 0 where a token doesn't count.
        kept: (N, T) bool from ``entropy_mask``.
    """
    dropped = torch.where(kept, weights, 0)
    left = dropped.sum(1, keepdim=True)
    return torch.where(left != 0, dropped * (weights.sum(1, keepdim=True) / left), 0)
