"""activation(gate) up, the middle of a gated MLP (2002.05202), of both products side by side in one tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from grpo_lit.errors import UserError
from grpo_lit.kernels.dispatch import resolve_impl

_tanh_gelu: Callable[[Tensor], Tensor] = functools.partial(functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "gelu_new": _tanh_gelu,
    "relu": functional.relu,
}
"""By the names that transformers' configs use."""


@torch.no_grad()
def gated_activation(gate_up: Tensor, activation: str = "silu", *, impl: str | None = None) -> Tensor:
    """activation(gate) up. No gradient flows.

    Args:
        gate_up: (R, 2 I), contiguous: the gate's product, then the other one.
        activation: a key of ``ACTIVATIONS``.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.

    Returns:
        (R, I) in the dtype of ``gate_up``.

    Raises:
        UserError: for an odd width or an unknown activation.
    """
    check_activation(activation)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise UserError("gate_up", tuple(gate_up.shape), "(R, 2 I)")
    if resolve_impl("gated_activation", impl, gate_up.device) == "triton":
        from grpo_lit.kernels._triton.gated_activation import gate

        return gate(gate_up, activation)
    first, second = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](first) * second


def check_activation(activation: str) -> None:
    """Raises UserError unless ``activation`` is known."""
    if activation not in ACTIVATIONS:
        raise UserError("activation", activation, " | ".join(ACTIVATIONS))
