"""NF4 weights (QLoRA, 2305.14314): what is stored, and back to numbers.

A weight is 4 bits: an index into 16 quantiles of the normal distribution, scaled by its block's largest
magnitude. Blocks are 64 weights in a row of the matrix; the scales are themselves 8-bit numbers in blocks
of 256 ("double quantization")::

    w[n, k] = code[q[n, k]] scale[b],   scale[b] = scale_code[s[b]] group_scale[b // 256] + offset,   b = (n
    K + k) // 64

Two weights share a byte, the earlier one in the high half. These are bitsandbytes' layout and its numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels.dispatch import resolve_impl

BLOCK = 64


class Nf4Weight(NamedTuple):
    """A weight matrix in NF4, as views of the quantizer's own tensors.

    Attributes:
        packed: (N K / 2,) uint8.
        scales: (N K / 64,) uint8 indices into ``scale_code``, or float32 scales without double quantization.
        scale_code: (256,) float32; empty without double quantization.
        group_scales: (N K / 64 / 256 rounded up,) float32; empty without double quantization.
        offset: scalar float32 tensor.
        code: (16,) float32, the quantiles.
        out_features: N.
        in_features: K.
    """

    packed: Tensor
    scales: Tensor
    scale_code: Tensor
    group_scales: Tensor
    offset: Tensor
    code: Tensor
    out_features: int
    in_features: int

    @classmethod
    def from_bitsandbytes(cls, data: Tensor, state: Any) -> Nf4Weight:
        """Of a bitsandbytes tensor ``data`` and its ``quant_state``; shares their memory.

        Raises:
            UserError: for another quantization than NF4 in blocks of 64, or rows that don't hold whole
                blocks.
        """
        out_features, in_features = state.shape
        if state.quant_type != "nf4" or state.blocksize != BLOCK:
            raise UserError("weight", f"{state.quant_type} in blocks of {state.blocksize}", "nf4 in blocks of 64")
        if in_features % BLOCK:
            raise UserError("weight", tuple(state.shape), "rows of whole blocks of 64")
        none = state.absmax.new_empty(0, dtype=torch.float32)
        offset = none.new_zeros(())
        if state.nested:
            if state.state2.blocksize != 256:
                raise UserError("weight", f"scales in blocks of {state.state2.blocksize}", "blocks of 256")
            none, groups, offset = state.state2.code, state.state2.absmax, state.offset
        else:
            groups = none
        parts = (data.view(torch.uint8).flatten(), state.absmax, none, groups, offset, state.code)
        return cls(*parts, out_features=out_features, in_features=in_features)

    def block_scales(self) -> Tensor:
        """(N K / 64,) float32 scales."""
        if not len(self.scale_code):
            return self.scales
        groups = self.group_scales.repeat_interleave(256)[: len(self.scales)]
        return self.scale_code[self.scales.long()] * groups + self.offset

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """(N, K) weights, computed in float32 and rounded once to ``dtype``."""
        if self.packed.is_cuda and resolve_impl("nf4_dequantize", None, self.packed.device) == "triton":
            dense: Tensor = torch.ops.grpo_lit.nf4_dequantize(*self, dtype)
            return dense
        indices = torch.stack([self.packed >> 4, self.packed & 15], dim=1).flatten()
        values = self.code[indices.long()].view(-1, BLOCK) * self.block_scales()[:, None]
        return values.view(self.out_features, self.in_features).to(dtype)

    def dequantize_into(self, out: Tensor) -> None:
        """Writes the (N, K) weights into contiguous ``out``, rounded to its dtype."""
        if self.packed.is_cuda and resolve_impl("nf4_dequantize", None, self.packed.device) == "triton":
            from grpo_lit.kernels._triton.nf4 import dequantize

            dequantize(self, out.dtype, out)
        else:
            out.copy_(self.dequantize(out.dtype))


@torch.library.custom_op(
    "grpo_lit::nf4_dequantize",
    mutates_args=(),
    schema="(Tensor packed, Tensor scales, Tensor scale_code, Tensor group_scales, Tensor offset, Tensor code, "
    "int out_features, int in_features, ScalarType dtype) -> Tensor",
)
def _dequantize_op(
    packed: Tensor,
    scales: Tensor,
    scale_code: Tensor,
    group_scales: Tensor,
    offset: Tensor,
    code: Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> Tensor:
    """The matrix in ``dtype``, by the Triton kernel: every packed byte read once, every weight written once."""
    from grpo_lit.kernels._triton.nf4 import dequantize

    weight = Nf4Weight(packed, scales, scale_code, group_scales, offset, code, out_features, in_features)
    return dequantize(weight, dtype)


@_dequantize_op.register_fake
def _(packed, scales, scale_code, group_scales, offset, code, out_features, in_features, dtype):  # type: ignore[no-untyped-def]
    return packed.new_empty(out_features, in_features, dtype=dtype)
