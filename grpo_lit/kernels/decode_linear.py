"""A decode step's linear layers on its few rows, with what stands around them fused in.

For parts i (query, key and value, say, or gate and up, or a single matrix), each with its own weight, bias and
low-rank update (2106.09685, equation 3), written side by side into one output::

    n = x, or RMS norm of x (``norm``)
    y_i = n W_i^T + bias_i + scaling_i (n A_i^T) B_i^T
    out = [y_0, y_1, ...],  or activation(y_0) y_1 (``activation``),  plus residual

Weights stay where they are: no concatenated copy, and NF4 as the quantizer stored it (``nf4``), turned into
numbers in registers. At few rows such a product is as fast as its weights can be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from grpo_lit.errors import UserError
from grpo_lit.kernels.dispatch import resolve_impl
from grpo_lit.kernels.gated_activation import ACTIVATIONS, check_activation
from grpo_lit.kernels.nf4 import Nf4Weight
from grpo_lit.kernels.rms_norm import rms_norm_reference

Weight = Tensor | Nf4Weight
_Value = TypeVar("_Value")


class LoraUpdate(NamedTuple):
    """A low-rank update: scaling (x A^T) B^T with ``a`` (r, K) and ``b`` (N, r)."""

    a: Tensor
    b: Tensor
    scaling: float


class RmsNorm(NamedTuple):
    """An RMS norm: ``weight`` (K,) and ``eps``, added to the mean square."""

    weight: Tensor
    eps: float


class Part(NamedTuple):
    """One matrix of a product and what is added to it."""

    weight: Weight
    bias: Tensor | None
    lora: LoraUpdate | None

    @property
    def columns(self) -> int:
        """N of this part."""
        return self.weight.out_features if isinstance(self.weight, Nf4Weight) else self.weight.shape[0]


@torch.no_grad()
def decode_linear(
    x: Tensor,
    weight: Weight | Sequence[Weight],
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    lora: LoraUpdate | Sequence[LoraUpdate | None] | None = None,
    residual: Tensor | None = None,
    norm: RmsNorm | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """Product of R rows with one or several matrices, see above. No gradient flows.

    Args:
        x: (R, K), contiguous; R up to 128 is what it is made for, more works.
        weight: W (N, K) in the dtype of ``x`` (a transposed view is fine) or ``Nf4Weight``; or a sequence of them.
        bias: (N,) of the weight or None; with a sequence of weights a sequence as long, or None.
        lora: update of the weight or None; with a sequence of weights a sequence as long, or None. A and B may be
            in another dtype than ``x``; the update is computed in theirs.
        residual: (R, output width) in the dtype of ``x``, added at the end.
        norm: RMS norm of ``x`` before the product.
        activation: a key of ``gated_activation.ACTIVATIONS``: exactly two weights of one size, gate and up.
        out_dtype: dtype of the result, that of ``x`` by default; float32 spares logits the last rounding.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.

    Returns:
        (R, sum of N), or (R, N) with an activation, in ``out_dtype``.

    Raises:
        UserError: for shapes or dtypes that don't fit.
    """
    weights: list[Weight] = [weight] if isinstance(weight, Tensor | Nf4Weight) else list(weight)
    biases = _one_each("bias", len(weights), [bias] if isinstance(bias, Tensor) else bias)
    updates = _one_each("lora", len(weights), [lora] if isinstance(lora, LoraUpdate) else lora)
    parts = [Part(*part) for part in zip(weights, biases, updates, strict=True)]
    _check(x, parts, residual, norm, activation)
    if resolve_impl("decode_linear", impl, x.device) == "triton":
        from grpo_lit.kernels._triton.decode_linear import product

        return product(x, parts, residual, norm, activation, out_dtype=out_dtype)
    return reference(x, parts, residual, norm, activation, out_dtype)


def _one_each(name: str, count: int, values: Sequence[_Value | None] | None) -> Sequence[_Value | None]:
    if values is None:
        return [None] * count
    if len(values) != count:
        raise UserError(name, f"{len(values)} of them", f"one for each of {count} weights")
    return values


def _check(x: Tensor, parts: list[Part], residual: Tensor | None, norm: RmsNorm | None, activation: str | None) -> None:
    if x.dim() != 2 or not parts:
        raise UserError("x", tuple(x.shape), "(R, K), and at least one weight")
    width = x.shape[1]
    for part in parts:
        _check_part(x, part)
    if norm is not None and norm.weight.shape != (width,):
        raise UserError("norm", tuple(norm.weight.shape), f"({width},)")
    columns = [part.columns for part in parts]
    if activation is not None:
        check_activation(activation)
        if len(parts) != 2 or columns[0] != columns[1]:
            raise UserError("weight", f"{columns} columns", "two weights of one size with an activation")
    shape = (len(x), columns[0] if activation is not None else sum(columns))
    if residual is not None and (residual.shape != shape or residual.dtype != x.dtype):
        raise UserError("residual", (residual.dtype, tuple(residual.shape)), f"{x.dtype} {shape}")


def _check_part(x: Tensor, part: Part) -> None:
    width, n = x.shape[1], part.columns
    if isinstance(part.weight, Tensor):
        if part.weight.shape != (n, width) or part.weight.dtype != x.dtype:
            raise UserError("weight", (part.weight.dtype, tuple(part.weight.shape)), f"{x.dtype} (N, {width})")
    elif part.weight.in_features != width:
        raise UserError("weight", f"{part.weight.in_features} columns", f"{width}, the width of x")
    if part.bias is not None and part.bias.shape != (n,):
        raise UserError("bias", tuple(part.bias.shape), f"({n},)")
    if part.lora is not None:
        rank = part.lora.a.shape[0]
        if part.lora.a.shape != (rank, width) or part.lora.b.shape != (n, rank):
            shapes = (tuple(part.lora.a.shape), tuple(part.lora.b.shape))
            raise UserError("lora", shapes, f"(r, {width}) and ({n}, r)")


def reference(
    x: Tensor,
    parts: list[Part],
    residual: Tensor | None,
    norm: RmsNorm | None,
    activation: str | None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The op in plain torch, in the roundings of the training path's modules."""
    if norm is not None:
        x = rms_norm_reference(x, norm.weight, norm.eps)
    outs = []
    for part in parts:
        dense = part.weight if isinstance(part.weight, Tensor) else part.weight.dequantize(x.dtype)
        bias = None if part.bias is None else part.bias.to(x.dtype)
        if x.is_cuda and out_dtype is not None and out_dtype != x.dtype and bias is None:
            y = torch.mm(x, dense.t(), out_dtype=out_dtype)
        else:
            y = functional.linear(x, dense, bias)
        if part.lora is not None:
            low_rank = functional.linear(x.to(part.lora.a.dtype), part.lora.a)
            update = functional.linear(low_rank, part.lora.b) * part.lora.scaling
            y = y + update.to(y.dtype)
        outs.append(y)
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    if activation is not None:
        out = ACTIVATIONS[activation](outs[0]) * outs[1]
    out = out if residual is None else out + residual
    return out if out_dtype is None else out.to(out_dtype)
