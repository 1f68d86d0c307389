"""Multiplies a ready gradient by what comes from above, reading it only if that isn't 1.

The fused losses compute their gradient in the forward pass. In a backward from the loss itself the factor
is 1, and reading and writing a (rows, V) gradient to multiply by 1 would double its cost. The factor stays
on the device: a kernel looks at it and returns, so nothing waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.kernels.dispatch import interpreting, triton_available


@torch.library.custom_op(
    "grpo_lit::scale_", mutates_args=("values",), schema="(Tensor(a!) values, Tensor factor) -> ()"
)
def scale_(values: Tensor, factor: Tensor) -> None:
    """values *= factor, in place; ``factor`` is a scalar tensor on the same device."""
    on_triton = triton_available() and (values.is_cuda or (interpreting() and values.dtype != torch.float64))
    if on_triton and values.is_contiguous():
        from grpo_lit.kernels._triton.scale import scale

        scale(values, factor)
    else:
        values.mul_(factor.to(values.dtype))


@scale_.register_fake
def _(values: Tensor, factor: Tensor) -> None:
    return None
