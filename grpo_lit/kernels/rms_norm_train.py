"""RMS normalisation of rows (1910.07467, equation 4) with a frozen weight, and its gradient plus a residual's.

::

    r = 1 / sqrt(mean(x^2) + eps)       y = w (x r)
    dx = residual + r (w dy - x r mean(w dy x r))

Memory: nothing is kept for the backward but x itself. Arithmetic in float32 (float64 for float64); x r is rounded
to the dtype of x before it meets the weight, as transformers' Llama and Qwen layers round it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.kernels.dispatch import Impl
from grpo_lit.kernels.token_terms import compute_dtype


def rms_norm_train(x: Tensor, weight: Tensor, eps: float, *, impl: Impl) -> Tensor:
    """y of contiguous x (rows, H), in the dtype of x; weight (H,)."""
    if impl == "triton":
        from grpo_lit.kernels._triton.decoder import rms_norm

        return rms_norm(x, weight, eps)
    wide = x.to(compute_dtype(x.dtype))
    unit = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight.to(wide.dtype) * unit).to(x.dtype)


def rms_norm_train_backward(
    dy: Tensor, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor, out: Tensor, impl: Impl
) -> None:
    """Writes dx into ``out``, which may be ``residual``; contiguous (rows, H) tensors."""
    if impl == "triton":
        from grpo_lit.kernels._triton.decoder import rms_norm_backward

        rms_norm_backward(dy, x, weight, eps, residual, out)
        return
    wide = x.to(compute_dtype(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit, scaled = wide * rstd, dy.to(wide.dtype) * weight.to(wide.dtype)
    dx = rstd * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    out.copy_(residual.to(wide.dtype) + dx)
