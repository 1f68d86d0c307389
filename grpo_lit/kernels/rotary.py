"""Rotary positions (2104.09864, equation 34) on the query and key heads of a fused projection, and back.

A head x of D numbers with halves (a, b), after its RMS norm where the model has one (Qwen3), turns to::

    (a cos - b sin, b cos + a sin)

The backward turns back by the same angle, goes through the norm, and puts the gradient of the values beside it:
one row of d qkv. Arithmetic in float32 (float64 for float64).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_lit.kernels.dispatch import Impl
from grpo_lit.kernels.rms_norm_train import rms_norm_train, rms_norm_train_backward
from grpo_lit.kernels.token_terms import compute_dtype


class Heads(NamedTuple):
    """How a row of qkv is cut, and the norms of its heads.

    Attributes:
        queries: query heads.
        keys: key heads, and as many value heads.
        size: D, numbers of a head.
        q_norm: (D,) weight of the norm on query heads, or None.
        k_norm: (D,) likewise for key heads.
        eps: of these norms.
    """

    queries: int
    keys: int
    size: int
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    c, s = (t[:, None, : t.shape[-1] // 2].to(x.dtype) for t in (cos, sin))
    return torch.cat([low * c - high * s, high * c + low * s], dim=-1)


def rotary(qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, *, impl: Impl) -> Tensor:
    """(rows, queries + keys, D) turned heads of qkv (rows, (queries + 2 keys) D); cos and sin (rows, D)."""
    if impl == "triton":
        from grpo_lit.kernels._triton.decoder import rotary as kernel

        return kernel(qkv, cos, sin, heads.queries, heads.keys, heads.q_norm, heads.k_norm, heads.eps)
    count = heads.queries + heads.keys
    x = qkv[:, : count * heads.size].unflatten(1, (count, heads.size))
    if heads.q_norm is not None and heads.k_norm is not None:
        parts = x.split([heads.queries, heads.keys], dim=1)
        weights = (heads.q_norm, heads.k_norm)
        x = torch.cat(
            [rms_norm_train(t, w, heads.eps, impl="torch") for t, w in zip(parts, weights, strict=True)], dim=1
        )
    return _turn(x.to(compute_dtype(qkv.dtype)), cos, sin).to(qkv.dtype)


def rotary_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, *, impl: Impl
) -> Tensor:
    """d qkv of the gradients (rows, heads, D) of turned queries, turned keys and values."""
    if impl == "triton":
        from grpo_lit.kernels._triton.decoder import rotary_backward as kernel

        grads = (dq.contiguous(), dk.contiguous(), dv.contiguous())
        return kernel(grads, qkv, cos, sin, heads.q_norm, heads.k_norm, heads.eps)
    count = heads.queries + heads.keys
    d = _turn(torch.cat([dq, dk], dim=1).to(compute_dtype(qkv.dtype)), cos, -sin)
    if heads.q_norm is not None and heads.k_norm is not None:
        x = qkv[:, : count * heads.size].unflatten(1, (count, heads.size))
        for where, weight in (
            (slice(0, heads.queries), heads.q_norm),
            (slice(heads.queries, count), heads.k_norm),
        ):
            part, zero = torch.empty_like(d[:, where]), torch.zeros_like(d[:, where])
            rms_norm_train_backward(d[:, where], x[:, where], weight, heads.eps, residual=zero, out=part, impl="torch")
            d[:, where] = part
    return torch.cat([d.to(qkv.dtype), dv], dim=1).flatten(1)
