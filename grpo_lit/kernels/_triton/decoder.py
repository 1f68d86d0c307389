"""The small operations of a decoder layer, forward and backward; formulas in ``rms_norm_train``, ``rotary`` and
``gated_silu`` of ``grpo_lit.kernels``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(x, weight, out, width, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    v = tl.load(x + row * width + lane, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(v * v, 0) / width + eps)
    # rounded before the weight, as transformers does
    unit = (v * rstd).to(out.dtype.element_ty).to(tl.float32)
    w = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + lane, (w * unit).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_backward_kernel(dy, x, weight, residual, out, width, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    at = row * width + lane
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    g *= tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(v * v, 0) / width + eps)
    unit = v * rstd
    dx = rstd * (g - unit * (tl.sum(g * unit, 0) / width))
    dx += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, dx.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_silu_kernel(gate_up, out, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (silu * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gated_silu_backward_kernel(gate_up, dout, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes d gate and d up over ``gate_up``, and the activation over ``dout`` if ACTIVATION."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at_gate = gate_up + row * 2 * width + column
    at_up = at_gate + width
    gate = tl.load(at_gate, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at_up, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dout + row * width + column, mask=inside, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    silu = gate * s
    tl.store(at_gate, (d * up * s * (1.0 + gate - silu)).to(gate_up.dtype.element_ty), mask=inside)
    tl.store(at_up, (d * silu).to(gate_up.dtype.element_ty), mask=inside)
    if ACTIVATION:
        tl.store(dout + row * width + column, (silu * up).to(dout.dtype.element_ty), mask=inside)


@triton.jit
def _head_rstd(low, high, HALF: tl.constexpr, eps):  # type: ignore[no-untyped-def]
    return tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]


@triton.jit
def _head_weights(q_weight, k_weight, is_q, half):  # type: ignore[no-untyped-def]
    q = tl.load(q_weight + half).to(tl.float32)
    k = tl.load(k_weight + half).to(tl.float32)
    return tl.where(is_q, q, k)


@triton.jit
def _rotary_kernel(  # type: ignore[no-untyped-def]
    qkv,
    out,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    q_heads,
    heads,
    stride,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program a token: normalises (if NORM) and turns its query and key heads."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    inside = (head < heads) & (lane < HALF)
    at = head * (2 * HALF) + lane
    low = tl.load(qkv + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(qkv + row * stride + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        rstd = _head_rstd(low, high, HALF, eps)
        is_q = head < q_heads
        low = (low * rstd).to(out.dtype.element_ty).to(tl.float32)
        high = (high * rstd).to(out.dtype.element_ty).to(tl.float32)
        low *= _head_weights(q_weight, k_weight, is_q, lane)
        high *= _head_weights(q_weight, k_weight, is_q, lane + HALF)
    c = tl.load(cos + row * (2 * HALF) + lane).to(tl.float32)
    s = tl.load(sin + row * (2 * HALF) + lane).to(tl.float32)
    to = out + row * heads * (2 * HALF) + at
    tl.store(to, (low * c - high * s).to(out.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (high * c + low * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotary_backward_kernel(  # type: ignore[no-untyped-def]
    dq,
    dk,
    dv,
    qkv,
    out,
    cos,
    sin,
    q_weight,
    k_weight,
    eps,
    q_heads,
    heads,
    all_heads,
    stride,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program a token: gradients of turned query and key heads, and of the values, to one row of d qkv."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    kv_heads = heads - q_heads
    at_q = dq + (row * q_heads + head) * (2 * HALF) + lane
    at_k = dk + (row * kv_heads + head - q_heads) * (2 * HALF) + lane
    at_v = dv + (row * kv_heads + head - heads) * (2 * HALF) + lane
    is_q = head < q_heads
    is_k = (head >= q_heads) & (head < heads)
    is_v = (head >= heads) & (head < all_heads)
    # a position outside its own tensor is masked off: each element comes from one of the three
    low = tl.load(at_q, mask=is_q & (lane < HALF), other=0.0).to(tl.float32)
    low += tl.load(at_k, mask=is_k & (lane < HALF), other=0.0).to(tl.float32)
    high = tl.load(at_q + HALF, mask=is_q & (lane < HALF), other=0.0).to(tl.float32)
    high += tl.load(at_k + HALF, mask=is_k & (lane < HALF), other=0.0).to(tl.float32)
    c = tl.load(cos + row * (2 * HALF) + lane).to(tl.float32)
    s = tl.load(sin + row * (2 * HALF) + lane).to(tl.float32)
    turned = low * c + high * s
    high = high * c - low * s
    low = turned
    at = row * stride + head * (2 * HALF) + lane
    if NORM:
        inside = (head < heads) & (lane < HALF)
        x_low = tl.load(qkv + at, mask=inside, other=0.0).to(tl.float32)
        x_high = tl.load(qkv + at + HALF, mask=inside, other=0.0).to(tl.float32)
        rstd = _head_rstd(x_low, x_high, HALF, eps)
        x_low *= rstd
        x_high *= rstd
        low *= _head_weights(q_weight, k_weight, is_q, lane)
        high *= _head_weights(q_weight, k_weight, is_q, lane + HALF)
        mean = ((tl.sum(low * x_low, 1) + tl.sum(high * x_high, 1)) / (2 * HALF))[:, None]
        low = rstd * (low - x_low * mean)
        high = rstd * (high - x_high * mean)
    low += tl.load(at_v, mask=is_v & (lane < HALF), other=0.0).to(tl.float32)
    high += tl.load(at_v + HALF, mask=is_v & (lane < HALF), other=0.0).to(tl.float32)
    inside = (head < all_heads) & (lane < HALF)
    tl.store(out + at, low.to(out.dtype.element_ty), mask=inside)
    tl.store(out + at + HALF, high.to(out.dtype.element_ty), mask=inside)


def _warps(block: int) -> int:
    return max(1, min(8, block // 256))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalised rows of x (rows, H), contiguous."""
    out = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    if len(x):
        _rms_norm_kernel[(len(x),)](x, weight, out, x.shape[1], eps, BLOCK=block, num_warps=_warps(block))
    return out


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor, out: Tensor) -> None:
    """out = residual + gradient of x; contiguous (rows, H)."""
    block = triton.next_power_of_2(x.shape[1])
    if len(x):
        grid = (len(x),)
        _rms_norm_backward_kernel[grid](
            dy, x, weight, residual, out, x.shape[1], eps, BLOCK=block, num_warps=_warps(block)
        )


def gated_silu(gate_up: Tensor) -> Tensor:
    """(rows, I) from (rows, 2 I), contiguous."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = min(1024, triton.next_power_of_2(width))
    if rows:
        _gated_silu_kernel[(rows, triton.cdiv(width, block))](gate_up, out, width, BLOCK=block, num_warps=4)
    return out


def gated_silu_backward_(gate_up: Tensor, dout: Tensor, activation: bool) -> None:
    """The gradient over ``gate_up``; the activation over ``dout`` if asked for."""
    rows, width = dout.shape
    block = min(1024, triton.next_power_of_2(width))
    if rows:
        grid = (rows, triton.cdiv(width, block))
        _gated_silu_backward_kernel[grid](gate_up, dout, width, ACTIVATION=activation, BLOCK=block, num_warps=4)


def rotary(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """(rows, q_heads + kv_heads, D) from (rows, (q_heads + 2 kv_heads) D); D a power of two."""
    rows, size = cos.shape
    heads = q_heads + kv_heads
    out = qkv.new_empty(rows, heads, size)
    if rows:
        _rotary_kernel[(rows,)](
            qkv,
            out,
            cos,
            sin,
            q_weight,
            k_weight,
            eps,
            q_heads,
            heads,
            qkv.stride(0),
            NORM=q_weight is not None,
            HEADS=triton.next_power_of_2(heads),
            HALF=size // 2,
            num_warps=4,
        )
    return out


def rotary_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
) -> Tensor:
    """d qkv from contiguous gradients (rows, heads, D) of turned queries, turned keys, and values."""
    dq, dk, dv = grads
    rows, size = cos.shape
    heads = dq.shape[1] + dk.shape[1]
    out = torch.empty_like(qkv)
    if rows:
        _rotary_backward_kernel[(rows,)](
            dq,
            dk,
            dv,
            qkv,
            out,
            cos,
            sin,
            q_weight,
            k_weight,
            eps,
            dq.shape[1],
            heads,
            heads + dv.shape[1],
            qkv.stride(0),
            NORM=q_weight is not None,
            HEADS=triton.next_power_of_2(heads + dv.shape[1]),
            HALF=size // 2,
            num_warps=4,
        )
    return out
