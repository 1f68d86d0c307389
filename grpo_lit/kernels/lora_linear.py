"""A frozen linear layer and its low-rank update in one autograd node, over 16-bit or NF4 weights.

LoRA (2106.09685, equation 3), rows x (rows, K), W (N, K), A (r, K), B (N, r), s = alpha / r, dy the gradient of y::

    y  = x W^T + bias + s (x A^T) B^T
    dx = dy W + s (dy B) A      dA = s (dy B)^T x      dB = s dy^T (x A^T)

Written as separate operations this makes the update, scales it and adds it, three passes over an (rows, N)
tensor in the forward and as many over (rows, K) in the backward. Here the second product of each pair
accumulates into the first one's result (cuBLAS does that with its beta), so there are no passes in between;
only x and x A^T are kept for the backward. NF4 weights are dequantized for the product, in the forward and
again in the backward, and never kept. The adapters compute in the dtype of x with float32 accumulation;
their gradients come in their own dtype.

The products are left to cuBLAS: at rank 16 they are 2 % of the layer's arithmetic, and what fusing them
into one Triton kernel could still save is one read and one write of y.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels.nf4 import Nf4Weight


def lora_linear(
    x: Tensor,
    weight: Tensor | Nf4Weight,
    lora_a: Tensor,
    lora_b: Tensor,
    scaling: float,
    *,
    bias: Tensor | None = None,
) -> Tensor:
    """x W^T + bias + scaling (x A^T) B^T, with gradients for x, A and B; W and bias are frozen.

    Args:
        x: (..., K), the dtype of everything computed.
        weight: (N, K), a tensor or NF4; cast to the dtype of ``x`` if it differs.
        lora_a: A, (r, K), any float dtype.
        lora_b: B, (N, r), any float dtype.
        scaling: s = alpha / r.
        bias: (N,) or None.

    Returns:
        (..., N) in the dtype of ``x``.

    Raises:
        UserError: for shapes that don't fit.
    """
    nf4 = isinstance(weight, Nf4Weight)
    shape = (weight.out_features, weight.in_features) if isinstance(weight, Nf4Weight) else tuple(weight.shape)
    rank = lora_a.shape[0]
    if x.shape[-1] != shape[1]:
        raise UserError("x", tuple(x.shape), f"(..., {shape[1]})")
    if lora_a.shape != (rank, shape[1]):
        raise UserError("lora_a", tuple(lora_a.shape), f"(r, {shape[1]})")
    if lora_b.shape != (shape[0], rank):
        raise UserError("lora_b", tuple(lora_b.shape), f"({shape[0]}, {rank})")
    if bias is not None and bias.shape != shape[:1]:
        raise UserError("bias", tuple(bias.shape), f"({shape[0]},)")
    base = list(weight) if isinstance(weight, Nf4Weight) else [weight]
    out: Tensor = _LoRALinear.apply(x.reshape(-1, shape[1]), lora_a, lora_b, scaling, bias, nf4, *base)
    return out.view(*x.shape[:-1], shape[0])


def _matrix(nf4: bool, base: list[Any], dtype: torch.dtype) -> Tensor:
    return Nf4Weight(*base).dequantize(dtype) if nf4 else base[0].to(dtype)


def wide_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in ``dtype``, straight from the float32 accumulator where the device can."""
    if a.is_cuda and dtype == torch.float32 and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


class _LoRALinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, a: Tensor, b: Tensor, scaling: float, bias: Tensor | None, nf4: bool, *base: Any
    ) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            weight = _matrix(nf4, list(base), x.dtype)
            bias = None if bias is None else bias.to(x.dtype)
            y = torch.nn.functional.linear(x, weight, bias)
            low = x @ a.to(x.dtype).t()  # (rows, r)
            y.addmm_(low, b.to(x.dtype).t(), alpha=scaling)
        ctx.scaling, ctx.nf4 = scaling, nf4
        ctx.numbers = [item for item in base if not isinstance(item, Tensor)]
        ctx.save_for_backward(x, a, b, low, *(item for item in base if isinstance(item, Tensor)))
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b, low, *tensors = ctx.saved_tensors
        base = [*tensors, *ctx.numbers]
        dx = da = db = None
        with torch.autocast(x.device.type, enabled=False):
            dlow = (dy @ b.to(dy.dtype)).mul_(ctx.scaling)  # (rows, r)
            if ctx.needs_input_grad[0]:
                dx = dy @ _matrix(ctx.nf4, base, dy.dtype)
                dx.addmm_(dlow, a.to(dy.dtype))
            if ctx.needs_input_grad[1]:
                da = wide_product(dlow.t(), x, a.dtype)
            if ctx.needs_input_grad[2]:
                db = wide_product(dy.t(), low, b.dtype).mul_(ctx.scaling)
        return dx, da, db, *(None,) * (3 + len(base))
