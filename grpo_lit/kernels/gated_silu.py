"""The gated activation of Llama's feed-forward layer (SwiGLU, 2002.05202), and its gradient in place.

Of rows that hold the gate g and the value u side by side, with s = sigmoid(g)::

    y = g s u       dg = dy u s (1 + g (1 - s))       du = dy g s

The backward writes dg and du over g and u, and y over dy where an adapter on the next layer needs it: no memory
of its own. Arithmetic in float32 (float64 for float64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.kernels.dispatch import Impl
from grpo_lit.kernels.token_terms import compute_dtype


def gated_silu(gate_up: Tensor, *, impl: Impl) -> Tensor:
    """y (rows, I) of contiguous (rows, 2 I) gates and values."""
    if impl == "triton":
        from grpo_lit.kernels._triton.decoder import gated_silu as kernel

        return kernel(gate_up)
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    silu = (gate * torch.sigmoid(gate)).to(gate_up.dtype)
    return (silu.to(up.dtype) * up).to(gate_up.dtype)


def gated_silu_backward_(gate_up: Tensor, dout: Tensor, *, activation: bool, impl: Impl) -> None:
    """Writes the gradient over ``gate_up`` (rows, 2 I); with ``activation``, y over ``dout`` (rows, I)."""
    if impl == "triton":
        from grpo_lit.kernels._triton.decoder import gated_silu_backward_ as kernel

        kernel(gate_up, dout, activation)
        return
    gate, up = gate_up.to(compute_dtype(gate_up.dtype)).chunk(2, dim=-1)
    s = torch.sigmoid(gate)
    silu, d = gate * s, dout.to(gate.dtype)
    both = torch.cat([d * up * s * (1 + gate - silu), d * silu], dim=-1)
    if activation:
        dout.copy_(silu * up)
    gate_up.copy_(both)
