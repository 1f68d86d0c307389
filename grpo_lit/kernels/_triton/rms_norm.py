"""Sum and norm of a row a program; formulas in ``grpo_lit.kernels.rms_norm``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels._triton.launch import overlap, wait_for_previous


@triton.jit
def _add_norm_kernel(  # type: ignore[no-untyped-def]
    x,
    residual,
    weight,
    bias,
    normed,
    total,
    width,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    LAYER_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    inside = lane < width
    scale = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
    if LAYER_NORM:
        shift = tl.load(bias + lane, mask=inside, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    h = tl.load(x + row * width + lane, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        h += tl.load(residual + row * width + lane, mask=inside, other=0.0).to(tl.float32)
        rounded = h.to(total.dtype.element_ty)
        tl.store(total + row * width + lane, rounded, mask=inside)
        h = rounded.to(tl.float32)
    if LAYER_NORM:
        h -= tl.sum(h, 0) / width
        h = tl.where(inside, h, 0.0)
    y = h * tl.rsqrt(tl.sum(h * h, 0) / width + eps) * scale
    if LAYER_NORM:
        y += shift
    tl.store(normed + row * width + lane, y.to(normed.dtype.element_ty), mask=inside)


def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(normed, x + residual); a layer norm where there is a bias, else an RMS norm."""
    x = x.contiguous()
    rows, width = x.shape
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    if rows:
        block = triton.next_power_of_2(width)
        _add_norm_kernel[(rows,)](
            x,
            None if residual is None else residual.contiguous(),
            weight,
            bias,
            normed,
            total,
            width,
            eps,
            HAS_RESIDUAL=residual is not None,
            LAYER_NORM=bias is not None,
            BLOCK=block,
            num_warps=max(1, min(8, block // 256)),
            **overlap(x),
        )
    return normed, total
