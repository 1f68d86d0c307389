"""lora_linear against the formula under autograd, over dense and NF4 weights."""

from __future__ import annotations

import pytest
import torch

from grpo_lit.errors import UserError
from grpo_lit.kernels import Nf4Weight, lora_linear


def _inputs(dtype, rows=(3, 5), width=64, out=20, rank=4):
    gen = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=gen, dtype=torch.float64) for shape in
            ((*rows, width), (out, width), (rank, width), (out, rank), (out,))]  # fmt: skip
    x, weight, a, b, bias = (t.to(dtype) for t in made)
    return x.requires_grad_(), weight, a.requires_grad_(), b.requires_grad_(), bias


def _formula(x, weight, a, b, scaling, bias):
    return x @ weight.T + bias + scaling * (x @ a.T) @ b.T


def test_forward_and_gradients_in_float64():
    x, weight, a, b, bias = _inputs(torch.float64)
    got = lora_linear(x, weight, a, b, 0.7, bias=bias)
    want = _formula(x, weight, a, b, 0.7, bias)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    up = torch.randn(got.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for mine, true in zip(*(torch.autograd.grad(y, (x, a, b), up) for y in (got, want)), strict=True):
        assert true.abs().max() > 1
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nested", [True, False])
def test_over_nf4_weights(nested):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes has no build for this machine")
    x, weight, a, b, bias = _inputs(torch.float32)
    data, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=nested, blocksize=64)
    dense = functional.dequantize_4bit(data, state).float()
    results = []
    for base in (dense, Nf4Weight.from_bitsandbytes(data, state)):
        y = lora_linear(x, base, a, b, 0.7, bias=bias)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, a, b))))
    for mine, true in zip(*results, strict=True):
        assert torch.equal(mine, true)


def test_half_inputs_with_float32_adapters():
    x, weight, a, b, bias = _inputs(torch.float32)
    half = x.detach().bfloat16().requires_grad_()
    y = lora_linear(half, weight.bfloat16(), a, b, 0.7, bias=bias)
    grads = torch.autograd.grad(y.float().sum(), (half, a, b))
    assert [t.dtype for t in (y, *grads)] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    exact = _formula(x, weight, a, b, 0.7, bias)
    true = torch.autograd.grad(exact.sum(), (x, a, b))
    for mine, want in zip((y, *grads), (exact, *true), strict=True):
        assert (mine.float() - want).norm() < 0.02 * want.norm()


def test_only_the_adapters_train():
    x, weight, a, b, bias = _inputs(torch.float32)
    weight.requires_grad_()
    lora_linear(x.detach(), weight, a, b, 0.7, bias=bias).sum().backward()
    assert weight.grad is None
    assert a.grad.abs().max() > 0
    assert b.grad.abs().max() > 0


def test_what_is_kept_for_the_backward():
    x, weight, a, b, bias = _inputs(torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lora_linear(x, weight, a, b, 0.7, bias=bias)
    known = {t.data_ptr() for t in (x, weight, a, b)}
    assert [tuple(t.shape) for t in kept if t.data_ptr() not in known] == [(15, 4)]


@pytest.mark.parametrize("wrong", ["x", "lora_a", "lora_b", "bias"])
def test_mistakes_are_named(wrong):
    x, weight, a, b, bias = _inputs(torch.float32)
    tensors = {"x": x, "lora_a": a, "lora_b": b, "bias": bias}
    tensors[wrong] = tensors[wrong][..., 1:]
    with pytest.raises(UserError, match=wrong):
        lora_linear(tensors["x"], weight, tensors["lora_a"], tensors["lora_b"], 0.7, bias=tensors["bias"])
