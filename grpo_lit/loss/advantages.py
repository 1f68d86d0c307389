"""Advantages: how much better a completion was than the others of its prompt.

Rows are flat: `group_ids[i]` says which prompt row i belongs to, so groups may have different sizes and
need not lie next to each other. A reward of NaN means that no reward function had an opinion (abstained):
the row takes no part in the statistics of its group and gets advantage 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.errors import UserError

ADVANTAGE_SCALES = ("group", "batch", "none")


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    scale: str = "group",
    eps: float = 1e-4,
    eps_inside_root: bool = False,
    leave_one_out: bool = False,
    correction: int = 0,
) -> Tensor:
    """Centres each reward on its group's mean and divides by a spread.

    A_i = (r_i - mean_g) / (std + eps), DeepSeekMath (2402.03300), section 4.1.2. ``scale="none"`` leaves out
    the division (Dr.GRPO, 2503.20783); ``scale="batch"`` divides by the spread of all rewards about their
    common mean (2508.08221; ScaleRL, 2510.13786) while the baseline stays the group's.

    A group whose rewards are all equal, compared exactly and before any arithmetic, gets exactly 0: in
    floating point the mean of seven times 0.1 is not 0.1, and dividing that residue by a spread of the same
    size would turn rounding into a full-sized advantage. A group of one is such a group.

    ``leave_one_out`` takes the mean of the *other* rows as the baseline (RLOO, 2402.14740), which multiplies
    the centred reward by n/(n-1). The spread stays that of the whole group: the spread of the others alone is
    0 for the one right answer of a group and would blow its advantage up.

    Args:
        rewards: (N,) one number a completion; NaN = abstained.
        group_ids: (N,) integers, equal for completions of one prompt.
        scale: "group", "batch" or "none".
        eps: added to the standard deviation; 1e-4 is what TRL adds.
        eps_inside_root: divide by sqrt(variance + eps) instead of std + eps (grpo.cpp does, with 1e-8).
        leave_one_out: baseline without the row itself.
        correction: 0 divides the variance by n (population), 1 by n - 1 (sample, as TRL and torch.std).

    Returns:
        (N,) float64 for float64 rewards, otherwise float32; all arithmetic is in float64.

    Raises:
        UserError: for an unknown scale, a negative eps, infinite rewards or shapes that don't match.
    """
    _check(rewards, group_ids, scale, eps)
    dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
    if rewards.numel() == 0:
        return rewards.to(dtype)
    kept = ~torch.isnan(rewards)
    values = torch.where(kept, rewards, 0).double()
    groups, index = torch.unique(group_ids, return_inverse=True)  # index (N,): 0 .. number of groups - 1
    zeros = values.new_zeros(groups.numel())
    count = zeros.index_add(0, index, kept.double())
    mean = zeros.index_add(0, index, values) / count.clamp(min=1)
    centred = torch.where(kept, values - mean[index], 0)
    varied = kept & ~_is_flat(values, kept, index, groups.numel())[index]

    advantages = centred * (count / (count - 1).clamp(min=1))[index] if leave_one_out else centred
    if scale == "group":
        variance = zeros.index_add(0, index, centred.square()) / (count - correction).clamp(min=1)
        advantages = advantages / _spread(variance, eps, eps_inside_root)[index]
    elif scale == "batch":
        advantages = advantages / _spread(_variance(values, kept, correction), eps, eps_inside_root)
    # where, not a product: a flat group with eps = 0 divided 0 by 0 above
    return torch.where(varied, advantages, 0).to(dtype)


def _check(rewards: Tensor, group_ids: Tensor, scale: str, eps: float) -> None:
    if scale not in ADVANTAGE_SCALES:
        raise UserError("model.loss.advantage_scale", scale, " | ".join(ADVANTAGE_SCALES))
    if not 0 <= eps < float("inf"):
        raise UserError("model.loss.advantage_eps", eps, "a finite number >= 0")
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        accepted = f"shape (N,) like group_ids {tuple(group_ids.shape)}"
        raise UserError("rewards", tuple(rewards.shape), accepted)
    if torch.isinf(rewards).any():
        raise UserError("rewards", "inf", "finite numbers, or NaN where no reward function had an opinion")


def _variance(values: Tensor, kept: Tensor, correction: int) -> Tensor:
    """Of all kept values, about their common mean."""
    total = kept.sum().double()
    deviation = torch.where(kept, values - values.sum() / total.clamp(min=1), 0)
    return deviation.square().sum() / (total - correction).clamp(min=1)


def multi_reward_advantages(
    rewards: Tensor, group_ids: Tensor, function_weights: Tensor, *, eps: float = 1e-4, correction: int = 0
) -> Tensor:
    """Normalises each reward function within its group, adds them up, and normalises the sum over the batch.

    GDPO, 2601.05242: summing raw rewards first lets different combinations (one of two rewards, either way)
    fall on the same advantage, and lets the function of largest spread drown the others.

    Args:
        rewards: (N, F), one column a reward function; NaN = that function abstained.
        group_ids: (N,).
        function_weights: (F,).
        eps: added to every standard deviation.
        correction: 0 divides variances by n, 1 by n - 1.

    Returns:
        (N,) as `group_advantages`; 0 for rows on which all functions abstained.

    Raises:
        UserError: for shapes that don't match, or infinite rewards.
    """
    if rewards.dim() != 2 or function_weights.shape != rewards.shape[1:]:
        shapes = (tuple(rewards.shape), tuple(function_weights.shape))
        raise UserError("rewards, function_weights", shapes, "shapes (N, F) and (F,)")
    columns = [group_advantages(column, group_ids, eps=eps, correction=correction) for column in rewards.T]
    total = (torch.stack(columns, dim=1).double() * function_weights.double()).sum(dim=1)
    total = torch.where(torch.isnan(rewards).all(dim=1), float("nan"), total)
    whole_batch = torch.zeros_like(group_ids)
    advantages = group_advantages(total, whole_batch, eps=eps, correction=correction)
    return advantages.to(torch.float64 if rewards.dtype == torch.float64 else torch.float32)


def _spread(variance: Tensor, eps: float, eps_inside_root: bool) -> Tensor:
    return (variance + eps).sqrt() if eps_inside_root else variance.sqrt() + eps


def _is_flat(values: Tensor, kept: Tensor, index: Tensor, num_groups: int) -> Tensor:
    """(G,) bool: all rewards of the group that count are the same number."""
    low = values.new_full((num_groups,), float("inf"))
    high = values.new_full((num_groups,), float("-inf"))
    low = low.scatter_reduce(0, index, torch.where(kept, values, float("inf")), "amin")
    high = high.scatter_reduce(0, index, torch.where(kept, values, float("-inf")), "amax")
    return low >= high  # >= also covers a group without any reward: inf >= -inf
