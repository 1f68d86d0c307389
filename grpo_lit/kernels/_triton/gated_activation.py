"""activation(gate) up; formula in ``grpo_lit.kernels.gated_activation``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels._triton.launch import overlap, wait_for_previous


@triton.jit
def activate(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """One of ``grpo_lit.kernels.gated_activation.ACTIVATIONS`` of a float32 block, by name."""
    if KIND == "silu" or KIND == "swish":
        y = x * tl.sigmoid(x)
    elif KIND == "relu":
        y = tl.maximum(x, 0.0)
    elif KIND == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # the tanh form of gelu: 0.5 (1 + tanh(z)) = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def _gate_kernel(gate_up, out, width, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    wait_for_previous(PDL)
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (activate(gate, KIND) * up).to(out.dtype.element_ty), mask=inside)


def gate(gate_up: Tensor, activation: str) -> Tensor:
    """(R, I) of gate_up (R, 2 I)."""
    gate_up = gate_up.contiguous()
    rows, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if out.numel():
        block = 1024
        grid = (rows, triton.cdiv(width, block))
        _gate_kernel[grid](gate_up, out, width, KIND=activation, BLOCK=block, num_warps=4, **overlap(gate_up))
    return out
