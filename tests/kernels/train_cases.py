"""The Triton kernels of a decoder layer against float64, forward and backward; run by test_triton.py."""

from __future__ import annotations

import pytest
import torch
from triton_cases import DEVICE, assert_close

from grpo_lit.kernels.gated_silu import gated_silu, gated_silu_backward_
from grpo_lit.kernels.rms_norm_train import rms_norm_train, rms_norm_train_backward
from grpo_lit.kernels.rotary import Heads, rotary, rotary_backward

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def made(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def three(function, inputs, dtype):
    """(kernel, torch in the same dtype, torch in float64) results of a function of tensors and an impl."""
    low = [t.to(dtype) for t in inputs]
    exact = [t.to(dtype).double() for t in inputs]
    return function(low, "triton"), function(low, "torch"), function(exact, "torch")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 96), (5, 576)])
def test_rms_norm(dtype, rows, width):
    inputs = [made(rows, width), made(width, seed=1), made(rows, width, seed=2), made(rows, width, seed=3)]

    def forward(tensors, impl):
        return rms_norm_train(tensors[0], tensors[1], 1e-5, impl=impl)

    def backward(tensors, impl):
        x, weight, dy, residual = tensors
        out = torch.empty_like(x)
        rms_norm_train_backward(dy, x, weight, 1e-5, residual=residual, out=out, impl=impl)
        return out

    assert_close(*three(forward, inputs, dtype), dtype)
    assert_close(*three(backward, inputs, dtype), dtype)


def test_rms_norm_gradient_is_that_of_its_formula_and_may_replace_the_residual():
    x, weight, dy, residual = made(3, 96).requires_grad_(), made(96), made(3, 96, seed=1), made(3, 96, seed=2)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
    true = torch.autograd.grad(y, x, dy)[0] + residual
    x, weight, dy, residual = (t.detach().float() for t in (x, weight, dy, residual))
    rms_norm_train_backward(dy, x, weight, 1e-5, residual=residual, out=residual, impl="triton")
    torch.testing.assert_close(residual.double(), true, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (3, 300), (2, 1100)])
@pytest.mark.parametrize("activation", [False, True])
def test_gated_silu(dtype, rows, width, activation):
    inputs = [2 * made(rows, 2 * width), made(rows, width, seed=1)]

    def forward(tensors, impl):
        return gated_silu(tensors[0], impl=impl)

    def backward(tensors, impl):
        gate_up, dout = (t.clone() for t in tensors)
        gated_silu_backward_(gate_up, dout, activation=activation, impl=impl)
        assert torch.equal(dout, tensors[1]) is not activation
        return torch.cat([gate_up, dout], dim=1)

    assert_close(*three(forward, inputs, dtype), dtype)
    assert_close(*three(backward, inputs, dtype), dtype)


def test_gated_silu_gradient_is_that_of_its_formula():
    gate_up, dout = made(3, 40).requires_grad_(), made(3, 20, seed=1)
    gate, up = gate_up.chunk(2, dim=-1)
    true = torch.autograd.grad(torch.nn.functional.silu(gate) * up, gate_up, dout)[0]
    got = gate_up.detach().float()
    gated_silu_backward_(got, dout.float(), activation=False, impl="triton")
    torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-5)


def _heads(queries, keys, size, normed, dtype):
    weights = [made(size, seed=7).to(dtype), made(size, seed=8).to(dtype)] if normed else [None, None]
    return Heads(queries, keys, size, *weights, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "keys", "size"), [(1, 1, 16), (3, 1, 32), (6, 2, 64)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotary(dtype, queries, keys, size, normed):
    rows, width = 4, (queries + 2 * keys) * size
    angle = made(rows, size // 2, seed=2).repeat(1, 2)
    parts = [made(rows, n, size, seed=3 + i) for i, n in enumerate((queries, keys, keys))]
    inputs = [made(rows, width), angle.cos(), angle.sin(), *parts]

    def forward(tensors, impl):
        qkv, cos, sin = tensors[:3]
        return rotary(qkv, cos, sin, _heads(queries, keys, size, normed, qkv.dtype), impl=impl)

    def backward(tensors, impl):
        qkv, cos, sin, *grads = tensors
        return rotary_backward(*grads, qkv, cos, sin, _heads(queries, keys, size, normed, qkv.dtype), impl=impl)

    assert_close(*three(forward, inputs, dtype), dtype)
    assert_close(*three(backward, inputs, dtype), dtype)
    assert torch.equal(
        backward([t.to(dtype) for t in inputs], "triton")[:, -keys * size :], parts[2].to(dtype).flatten(1)
    )


@pytest.mark.parametrize("normed", [False, True])
def test_rotary_gradient_is_that_of_its_formula(normed):
    heads = _heads(3, 1, 32, normed, torch.float64)
    qkv = made(4, 5 * 32).requires_grad_()
    angle = made(4, 16, seed=2).repeat(1, 2)
    up = [made(4, n, 32, seed=3 + n) for n in (3, 1, 1)]
    turned = rotary(qkv, angle.cos(), angle.sin(), heads, impl="torch")
    values = qkv[:, -32:].unflatten(1, (1, 32))
    true = torch.autograd.grad((turned[:, :3], turned[:, 3:], values), qkv, up)[0]
    heads = Heads(3, 1, 32, *(None if w is None else w.float() for w in (heads.q_norm, heads.k_norm)), heads.eps)
    low = [t.detach().float() for t in (*up, qkv, angle.cos(), angle.sin())]
    got = rotary_backward(*low, heads, impl="triton")
    torch.testing.assert_close(got.double(), true, rtol=1e-5, atol=1e-5)
