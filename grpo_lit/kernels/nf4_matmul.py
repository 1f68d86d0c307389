"""x W^T for a few rows of x and W in NF4, for decoding: weights become numbers in registers, never in memory.

At few rows a product reads each weight for little arithmetic, so its limit is the reading: half a byte a weight.
Multiplying by a dequantized copy writes and reads 2 bytes more. The Triton version looks the 16 values up with
byte permutes, multiplies 64 columns at a time on the tensor cores, and applies the scale of each block to the
product, in float32; beyond 32 rows it multiplies by a copy after all. It is ``decode_linear`` with one matrix and
nothing around it, as a custom op. Layout and formula of the weights: ``nf4``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels.dispatch import resolve_impl
from grpo_lit.kernels.nf4 import Nf4Weight


def nf4_matmul(x: Tensor, weight: Nf4Weight, *, bias: Tensor | None = None, impl: str | None = None) -> Tensor:
    """x W^T + bias for NF4 ``weight``. No gradient flows: it is for decoding (training uses ``lora_linear``).

    Args:
        x: (..., K), bfloat16 or float16 where it is to be fast.
        weight: W, (N, K).
        bias: (N,) or None.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.

    Returns:
        (..., N) in the dtype of ``x``.

    Raises:
        UserError: for shapes that don't fit.
    """
    if x.shape[-1] != weight.in_features:
        raise UserError("x", tuple(x.shape), f"(..., {weight.in_features})")
    if bias is not None and bias.shape != (weight.out_features,):
        raise UserError("bias", tuple(bias.shape), f"({weight.out_features},)")
    chosen = resolve_impl("nf4_matmul", impl, x.device)
    rows = x.detach().reshape(-1, x.shape[-1])
    out: Tensor = torch.ops.grpo_lit.nf4_matmul(rows, *weight, bias, chosen)
    return out.view(*x.shape[:-1], weight.out_features)


@torch.library.custom_op(
    "grpo_lit::nf4_matmul",
    mutates_args=(),
    schema="(Tensor x, Tensor packed, Tensor scales, Tensor scale_code, Tensor group_scales, Tensor offset, "
    "Tensor code, int out_features, int in_features, Tensor? bias, str impl) -> Tensor",
)
def _op(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    scale_code: Tensor,
    group_scales: Tensor,
    offset: Tensor,
    code: Tensor,
    out_features: int,
    in_features: int,
    bias: Tensor | None,
    impl: str,
) -> Tensor:
    weight = Nf4Weight(packed, scales, scale_code, group_scales, offset, code, out_features, in_features)
    if impl == "triton":
        from grpo_lit.kernels._triton.decode_linear import product
        from grpo_lit.kernels.decode_linear import Part

        return product(x, [Part(weight, bias, None)], None, None, None)
    out = x @ weight.dequantize(x.dtype).t()
    return out if bias is None else out + bias.to(out.dtype)


@_op.register_fake
def _(x, packed, scales, scale_code, groups, offset, code, out_features, in_features, bias, impl):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape[0], out_features)
