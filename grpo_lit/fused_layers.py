"""Decoder layers for training as one autograd node each: packed tokens, few kernels, little memory.

                        x (tokens, H)                    tokens of all rows, end to end, no padding
          ┌───────────────┤
          │            norm ── q|k|v ── rotary ── attention ── o
          └───────────────(+)                                  │
          ┌───────────────┤ h <────────────────────────────────┘
          │            norm ── gate|up ── silu(gate) up ── down
          └───────────────(+)                                  │
                          y <──────────────────────────────────┘

The layers are transformers' own (Llama, Mistral, Qwen2, Qwen3), with a frozen base in 16 bits, 32 bits or NF4 and
LoRA on any of the seven projections. Here their forward and backward are written out:

- padding is never computed: sequences lie end to end, and attention knows where they start
- projections with one input are one product (``linear_group``); residual sums happen inside the products
- with checkpointing a layer keeps its input alone; the backward recomputes up to h, and the feed-forward part chunk
  by chunk, where forward and gradient meet, so that its wide activations never exist for all tokens
- 4-bit weights are dequantized once a pass and once for recomputation and backward together

The result is that of transformers' modules up to rounding: adapters compute in the dtype of the activations, sums
with the residual are rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_lit.kernels.dispatch import Impl
from grpo_lit.kernels.gated_silu import gated_silu, gated_silu_backward_
from grpo_lit.kernels.packed_attention import Sequences, packed_attention, packed_attention_backward
from grpo_lit.kernels.rms_norm_train import rms_norm_train, rms_norm_train_backward
from grpo_lit.kernels.rotary import Heads, rotary, rotary_backward
from grpo_lit.linear_group import Adapters, LinearGroup, product, product_backward, product_into_


class FusedLayer:
    """The parts of one decoder layer, read out of transformers' module."""

    def __init__(self, layer: nn.Module) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.module = layer
        self.qkv = LinearGroup([attention.q_proj, attention.k_proj, attention.v_proj])  # type: ignore[union-attr, list-item]
        self.o = LinearGroup([attention.o_proj])  # type: ignore[union-attr, list-item]
        self.gate_up = LinearGroup([mlp.gate_proj, mlp.up_proj])  # type: ignore[union-attr, list-item]
        self.down = LinearGroup([mlp.down_proj])  # type: ignore[union-attr, list-item]
        self.groups = (self.qkv, self.o, self.gate_up, self.down)
        self.size = int(attention.head_dim)  # type: ignore[union-attr, arg-type]
        self.scale = float(attention.scaling)  # type: ignore[union-attr, arg-type]

    def heads(self) -> Heads:
        """Cut of the fused projection."""
        attention: Any = self.module.self_attn
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        if q_norm is None or k_norm is None:
            return Heads(self.qkv.sizes[0] // self.size, self.qkv.sizes[1] // self.size, self.size)
        norms = (q_norm.weight, k_norm.weight, q_norm.variance_epsilon)
        return Heads(self.qkv.sizes[0] // self.size, self.qkv.sizes[1] // self.size, self.size, *norms)

    def norm(self, name: str, x: Tensor, impl: Impl) -> Tensor:
        """Rows normalised by ``input_layernorm`` or ``post_attention_layernorm``."""
        norm: Any = getattr(self.module, name)
        return rms_norm_train(x, norm.weight, norm.variance_epsilon, impl=impl)

    def norm_backward(self, name: str, dy: Tensor, x: Tensor, residual: Tensor, out: Tensor, impl: Impl) -> None:
        """out = residual + gradient of x."""
        norm: Any = getattr(self.module, name)
        eps = norm.variance_epsilon
        rms_norm_train_backward(dy, x, norm.weight, eps, residual=residual, out=out, impl=impl)


@dataclass
class Call:
    """One layer in one forward pass: what all its steps need besides the tokens."""

    layer: FusedLayer
    adapters: list[Adapters | None]
    """Of q|k|v, o, gate|up, down."""
    cos: Tensor
    sin: Tensor
    where: Sequences
    recompute: bool
    impl: Impl
    chunk: int
    grads: list[list[Tensor]] = field(default_factory=lambda: [[], [], [], []])


class Attended(NamedTuple):
    """What the first half of a layer computed."""

    normed: Tensor
    qkv: Tensor
    turned: Tensor
    out: Tensor
    kept: list[Tensor]
    low_qkv: Tensor | None
    low_o: Tensor | None
    h: Tensor


Matrices = list[tuple[slice, Tensor]]


def _attend(call: Call, x: Tensor, qkv_weight: Matrices, o_weight: Matrices) -> Attended:
    """The first half of a layer."""
    layer, heads = call.layer, call.layer.heads()
    normed = layer.norm("input_layernorm", x, call.impl)
    qkv, low_qkv = product(normed, layer.qkv, qkv_weight, call.adapters[0])
    turned = rotary(qkv, call.cos, call.sin, heads, impl=call.impl)
    out, kept = packed_attention(*_parts(turned, qkv, heads), call.where, layer.scale)
    h = x.clone()
    low_o = product_into_(h, out.flatten(1), layer.o, o_weight, call.adapters[1])
    return Attended(normed, qkv, turned, out, kept, low_qkv, low_o, h)


def _parts(turned: Tensor, qkv: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), each (tokens, heads, D)."""
    values = qkv[:, (heads.queries + heads.keys) * heads.size :].unflatten(1, (heads.keys, heads.size))
    return turned[:, : heads.queries], turned[:, heads.queries :], values


def _chunks(tokens: int, size: int) -> list[slice]:
    """Slices of about equal length, none longer than ``size``."""
    count = max(1, -(-tokens // size))
    each = -(-tokens // count)
    return [slice(start, min(start + each, tokens)) for start in range(0, tokens, each)]


def _feed_forward_(call: Call, h: Tensor, gate_up_all: Tensor | None) -> Tensor:
    """The second half of a layer, over h; keeps gate|up in ``gate_up_all`` where given."""
    layer, dtype = call.layer, h.dtype
    gate_up_weight, down_weight = layer.gate_up.matrices(dtype), layer.down.matrices(dtype)
    for part in _chunks(len(h), call.chunk):
        normed = layer.norm("post_attention_layernorm", h[part], call.impl)
        gate_up, _ = product(normed, layer.gate_up, gate_up_weight, call.adapters[2])
        if gate_up_all is not None:
            gate_up_all[part] = gate_up
        product_into_(h[part], gated_silu(gate_up, impl=call.impl), layer.down, down_weight, call.adapters[3])
    return h


def _feed_forward_backward(call: Call, h: Tensor, dy: Tensor, gate_up_all: Tensor | None) -> Tensor:
    """dh (tokens, H); gate|up is recomputed where it was not kept."""
    layer, dtype = call.layer, h.dtype
    gate_up_weight, down_weight = layer.gate_up.matrices(dtype), layer.down.matrices(dtype)
    down_lora = call.adapters[3]
    dh = torch.empty_like(h)
    for part in _chunks(len(h), call.chunk):
        normed = layer.norm("post_attention_layernorm", h[part], call.impl)
        if gate_up_all is None:
            gate_up, low = product(normed, layer.gate_up, gate_up_weight, call.adapters[2])
        else:
            gate_up, low = gate_up_all[part], _low_rank(normed, call.adapters[2])
        act = low_down = None
        if down_lora is not None:
            act = gated_silu(gate_up, impl=call.impl)
            low_down = _low_rank(act, down_lora)
        dact = product_backward(dy[part], act, low_down, layer.down, down_weight, down_lora, call.grads[3])
        assert dact is not None
        del act
        gated_silu_backward_(gate_up, dact, activation=False, impl=call.impl)
        del dact
        dnormed = product_backward(gate_up, normed, low, layer.gate_up, gate_up_weight, call.adapters[2], call.grads[2])
        del gate_up
        assert dnormed is not None
        layer.norm_backward("post_attention_layernorm", dnormed, h[part], dy[part], dh[part], call.impl)
    return dh


def _low_rank(x: Tensor, adapters: Adapters | None) -> Tensor | None:
    """s x A^T."""
    if adapters is None:
        return None
    return x.new_empty(len(x), len(adapters.a)).addmm_(x, adapters.a.t(), beta=0, alpha=adapters.scaling)


def _attend_backward(
    call: Call, x: Tensor, seen: Attended, dh: Tensor, weights: tuple[Matrices, Matrices], want_dx: bool
) -> Tensor | None:
    """dx (tokens, H)."""
    layer, heads = call.layer, call.layer.heads()
    flat = seen.out.flatten(1)
    dout = product_backward(dh, flat, seen.low_o, layer.o, weights[1], call.adapters[1], call.grads[1])
    assert dout is not None
    q, k, v = _parts(seen.turned, seen.qkv, heads)
    dq, dk, dv = packed_attention_backward(
        dout.view_as(seen.out), q, k, v, seen.out, seen.kept, call.where, layer.scale
    )
    dqkv = rotary_backward(dq, dk, dv, seen.qkv, call.cos, call.sin, heads, impl=call.impl)
    del dq, dk, dv, dout
    dnormed = product_backward(
        dqkv, seen.normed, seen.low_qkv, layer.qkv, weights[0], call.adapters[0], call.grads[0], want_dx=want_dx
    )
    if dnormed is None:
        return None
    layer.norm_backward("input_layernorm", dnormed, x, dh, dh, call.impl)
    return dh


class LayerFunction(torch.autograd.Function):
    """One decoder layer; its inputs after the call are the adapters' parameters, for their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, *parameters: Tensor) -> Tensor:
        layer, dtype = call.layer, x.dtype
        with torch.autocast(x.device.type, enabled=False):
            seen = _attend(call, x, layer.qkv.matrices(dtype), layer.o.matrices(dtype))
            if call.recompute:
                ctx.save_for_backward(x)
                y = _feed_forward_(call, seen.h, None)
            else:
                gate_up = x.new_empty(len(x), sum(layer.gate_up.sizes))
                y = _feed_forward_(call, seen.h.clone(), gate_up)
                kept = [seen.normed, seen.qkv, seen.turned, seen.out, seen.low_qkv, seen.low_o, seen.h, gate_up]
                ctx.save_for_backward(x, *kept, *seen.kept)
        ctx.call = call
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        call, x = ctx.call, ctx.saved_tensors[0]
        kept = None if call.recompute else ctx.saved_tensors[1:]
        with torch.autocast(x.device.type, enabled=False):
            dx, grads = layer_backward(call, x, dy.contiguous(), kept, ctx.needs_input_grad[0])
        return dx, None, *grads


def layer_forward(call: Call, x: Tensor) -> Tensor:
    """y (tokens, H) of one layer, nothing kept."""
    dtype = x.dtype
    seen = _attend(call, x, call.layer.qkv.matrices(dtype), call.layer.o.matrices(dtype))
    return _feed_forward_(call, seen.h, None)


def layer_backward(
    call: Call, x: Tensor, dy: Tensor, kept: tuple[Any, ...] | None, want_dx: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """(dx, gradients of A and B of each adapter) of one layer.

    Args:
        call: the layer in this pass.
        x: its input (tokens, H).
        dy: gradient of its output, contiguous; not written to.
        kept: what the forward kept beside x; None recomputes it.
        want_dx: False where nobody asks for dx.
    """
    layer, dtype = call.layer, x.dtype
    call.grads = [[], [], [], []]
    weights = (layer.qkv.matrices(dtype), layer.o.matrices(dtype))
    gate_up = None
    if kept is None:
        seen = _attend(call, x, *weights)
    else:
        normed, qkv, turned, out, low_qkv, low_o, h, gate_up = kept[:8]
        gate_up = gate_up.clone()  # the gradient is written over it, and a graph may be kept
        seen = Attended(normed, qkv, turned, out, list(kept[8:]), low_qkv, low_o, h)
    dh = _feed_forward_backward(call, seen.h, dy, gate_up)
    del gate_up
    dx = _attend_backward(call, x, seen, dh, weights, want_dx)
    grads = [grad for group in call.grads for grad in group]
    call.grads = [[], [], [], []]
    return dx, grads
