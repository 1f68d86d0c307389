"""NF4 weights and their product in torch; the Triton product is in triton_cases.py."""

from __future__ import annotations

import pytest
import torch

from grpo_lit.errors import UserError
from grpo_lit.kernels import Nf4Weight, nf4_matmul

functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes has no build for this machine")


def _quantized(rows=100, width=256, nested=True, blocksize=64, kind="nf4"):
    gen = torch.Generator().manual_seed(0)
    weight = (torch.randn(rows, width, generator=gen) * 0.02).bfloat16()
    options = {"quant_type": kind, "compress_statistics": nested, "blocksize": blocksize}
    return functional.quantize_4bit(weight, **options)


@pytest.mark.parametrize("nested", [True, False])
def test_the_numbers_are_bitsandbytes_numbers(nested):
    data, state = _quantized(nested=nested)
    weight = Nf4Weight.from_bitsandbytes(data, state)
    assert torch.equal(weight.dequantize(torch.bfloat16), functional.dequantize_4bit(data, state))
    assert weight.packed.data_ptr() == data.data_ptr()  # no second copy


@pytest.mark.parametrize("shape", [(1, 256), (3, 5, 256), (70, 256)])
def test_the_product_in_torch(shape):
    weight = Nf4Weight.from_bitsandbytes(*_quantized())
    gen = torch.Generator().manual_seed(1)
    x, bias = torch.randn(shape, generator=gen), torch.randn(100, generator=gen)
    got = nf4_matmul(x, weight, bias=bias)
    want = x.double() @ weight.dequantize(torch.float64).T + bias
    assert want.abs().max() > 1
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_the_op_is_registered_right():
    weight = Nf4Weight.from_bitsandbytes(*_quantized())
    arguments = (torch.randn(2, 256), *weight, None, "torch")
    torch.library.opcheck(torch.ops.grpo_lit.nf4_matmul, arguments, test_utils=("test_schema", "test_faketensor"))


def test_mistakes_are_named():
    weight = Nf4Weight.from_bitsandbytes(*_quantized())
    with pytest.raises(UserError, match="x="):
        nf4_matmul(torch.randn(2, 255), weight)
    with pytest.raises(UserError, match="bias"):
        nf4_matmul(torch.randn(2, 256), weight, bias=torch.zeros(3))
    with pytest.raises(UserError, match="nf4 in blocks of 64"):
        Nf4Weight.from_bitsandbytes(*_quantized(blocksize=128))
    with pytest.raises(UserError, match="nf4 in blocks of 64"):
        Nf4Weight.from_bitsandbytes(*_quantized(kind="fp4"))
    with pytest.raises(UserError, match="whole blocks"):
        Nf4Weight.from_bitsandbytes(*_quantized(rows=64, width=100))
