"""Sum with the residual stream, then a norm, in one pass: RMS norm (1910.07467) and layer norm (1607.06450).

With h = x + residual, over the last dimension::

    RMS norm:    h / sqrt(mean(h^2) + eps) weight
    layer norm:  (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) weight + bias

Means and roots in float32, as transformers computes them; h itself is rounded to its dtype first, since it is
what the next layer adds to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels.dispatch import resolve_impl


@torch.no_grad()
def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """RMS norm of x + residual, and the sum. No gradient flows.

    Args:
        x: (R, H), contiguous.
        residual: (R, H) in the dtype of ``x``, or None for none.
        weight: (H,).
        eps: added to the mean square.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.

    Returns:
        normed (R, H) and new_residual (R, H) = x + residual (``x`` itself without one), in the dtype of ``x``.

    Raises:
        UserError: for shapes that don't fit.
    """
    return _add_norm("add_rms_norm", x, residual, weight, None, eps, impl)


@torch.no_grad()
def add_layer_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, *, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Layer norm of x + residual, and the sum. No gradient flows.

    Args:
        x: (R, H), contiguous.
        residual: (R, H) in the dtype of ``x``, or None for none.
        weight: (H,).
        bias: (H,).
        eps: added to the variance.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.

    Returns:
        normed (R, H) and new_residual (R, H) = x + residual (``x`` itself without one), in the dtype of ``x``.

    Raises:
        UserError: for shapes that don't fit.
    """
    return _add_norm("add_layer_norm", x, residual, weight, bias, eps, impl)


def _add_norm(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, impl: str | None
) -> tuple[Tensor, Tensor]:
    if x.dim() != 2:
        raise UserError("x", tuple(x.shape), "(R, H)")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise UserError("residual", (residual.dtype, tuple(residual.shape)), f"{x.dtype} {tuple(x.shape)}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[1:]:
            raise UserError(name, tuple(vector.shape), f"({x.shape[1]},)")
    if resolve_impl(op, impl, x.device) == "triton":
        from grpo_lit.kernels._triton.rms_norm import add_norm

        return add_norm(x, residual, weight, bias, eps)
    total = x if residual is None else x + residual
    if bias is None:
        return rms_norm_reference(total, weight, eps), total
    return torch.nn.functional.layer_norm(total, weight.shape, weight, bias, eps), total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension in the roundings of transformers' Llama, Qwen2 and Qwen3."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.to(x.dtype)).to(x.dtype)
