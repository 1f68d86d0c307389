"""Rewards that depend on length, applied before the advantages."""

from __future__ import annotations

from torch import Tensor

from grpo_lit.errors import UserError


def soft_overlong_penalty(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """Penalty that grows over the last `cache` tokens before the limit. DAPO, 2503.14476 eq. 13.

    0 for L <= max_length - cache; ((max_length - cache) - L) / cache up to max_length; -1 beyond it. Added to
    the reward. DAPO used max_length 20480 and cache 4096.

    Args:
        lengths: (N,) tokens of each completion.
        max_length: limit in tokens, the soft zone included.
        cache: width of the soft zone in tokens, in [1, max_length].

    Returns:
        (N,) float32 in [-1, 0].

    Raises:
        UserError: if cache is not in [1, max_length].
    """
    if not 1 <= cache <= max_length:
        raise UserError("model.overlong_cache", cache, f"tokens in [1, max_length] = [1, {max_length}]")
    over = ((max_length - cache) - lengths.double()) / cache
    return over.clamp(min=-1, max=0).float()


def length_penalty(rewards: Tensor, lengths: Tensor, coef: float) -> Tensor:
    """r - coef * L, to be taken before centring, so that the group decides what is long.

    Args:
        rewards: (N,).
        lengths: (N,) tokens.
        coef: reward per token, >= 0; 0.0005 costs half a reward at 1000 tokens.

    Raises:
        UserError: if coef is negative or not finite.
    """
    if not 0 <= coef < float("inf"):
        raise UserError("model.length_penalty", coef, "a finite number >= 0")
    return rewards - coef * lengths.to(rewards.dtype)
