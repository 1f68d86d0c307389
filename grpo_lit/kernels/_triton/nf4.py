"""NF4 weights back to numbers, in registers or in memory; see ``grpo_lit.kernels.nf4``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels.dispatch import interpreting
from grpo_lit.kernels.nf4 import Nf4Weight

# The 16 quantiles of NF4 in float32 (QLoRA, 2305.14314, appendix E).
_CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def _lookup(dtype: torch.dtype) -> str:
    """PTX that turns 4 bytes of packed weights into the 4 earlier and the 4 later ones, as 16-bit numbers.

    ``prmt`` picks 4 of 8 bytes by 4 nibbles, which is what the weights are. The low and the high bytes of the 16
    numbers are tables of 16 bytes each, so two picks by the nibbles' three lower bits and a third by the upper bit.
    The tables' words are made by reversing the bits of other words, which are xor-ed with a zero that the compiler
    can't see through: words that it knows, or can get in one step, it does not keep in registers but makes again
    before every use.
    """
    bits = [int(v) & 0xFFFF for v in torch.tensor(_CODE).to(dtype).view(torch.int16)]
    planes = [[b & 255 for b in bits], [b >> 8 for b in bits]]
    words = [sum(p[4 * i + j] << 8 * j for j in range(4)) for p in planes for i in range(4)] + [0x32103210]
    lines = [
        ".reg .b32 z, s, t, a, b, l0, h0, l1, h1;",
        ".reg .b32 w<9>;",
        "mov.u32 z, %lanemask_lt;",
        "shr.u32 z, z, 31;",
    ]
    reversed_words = [int(format(word, "032b")[::-1], 2) for word in words]
    lines += [f"xor.b32 w{i}, z, {word}; brev.b32 w{i}, w{i};" for i, word in enumerate(reversed_words)]
    lines += ["and.b32 s, $4, 0x77777777;", "shr.u32 t, $4, 1;", "lop3.b32 t, t, 0x44444444, w8, 0xEA;"]
    for half in range(2):
        if half:
            lines += ["shr.u32 s, s, 16;", "shr.u32 t, t, 16;"]
        for name, first in (("l", 0), ("h", 4)):
            lines += [f"prmt.b32 a, w{first}, w{first + 1}, s;", f"prmt.b32 b, w{first + 2}, w{first + 3}, s;"]
            lines += [f"prmt.b32 {name}{half}, a, b, t;"]
        # nibbles 1 and 3 are the high halves of the two bytes: the earlier weights
        lines += [f"prmt.b32 ${half}, l{half}, h{half}, 0x7351;"]
        lines += [f"prmt.b32 ${2 + half}, l{half}, h{half}, 0x6240;"]
    return "{" + " ".join(lines) + "}"


_LOOKUP_BF16 = tl.constexpr(_lookup(torch.bfloat16))
_LOOKUP_FP16 = tl.constexpr(_lookup(torch.float16))


@triton.jit
def unpacked(q, code, BF16: tl.constexpr, PERMUTE: tl.constexpr):  # type: ignore[no-untyped-def]
    """(earlier, later) weights of packed bytes, unscaled, in 16 bits."""
    if PERMUTE:
        if BF16:
            early, late = tl.inline_asm_elementwise(
                _LOOKUP_BF16, "=&r,=&r,=&r,=&r,r", [q], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            early, late = tl.inline_asm_elementwise(
                _LOOKUP_FP16, "=&r,=&r,=&r,=&r,r", [q], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
            )
    else:
        early = tl.load(code + (q >> 4).to(tl.int32))
        late = tl.load(code + (q & 15).to(tl.int32))
    return early, late


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    packed, scales, scale_code, group_scales, offset, code, out, blocks, BLOCKS: tl.constexpr, NESTED: tl.constexpr
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    if NESTED:
        index = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
        group = tl.load(group_scales + block // 256, mask=inside, other=0.0)
        scale = tl.load(scale_code + index) * group + tl.load(offset)
    else:
        scale = tl.load(scales + block, mask=inside, other=0.0)
    at = block[:, None].to(tl.int64) * 32 + tl.arange(0, 32)[None, :]
    q = tl.load(packed + at, mask=inside[:, None], other=0)
    early = tl.load(code + (q >> 4).to(tl.int32)) * scale[:, None]
    late = tl.load(code + (q & 15).to(tl.int32)) * scale[:, None]
    both = tl.interleave(early, late)  # (BLOCKS, 64)
    at = block[:, None].to(tl.int64) * 64 + tl.arange(0, 64)[None, :]
    tl.store(out + at, both.to(out.dtype.element_ty), mask=inside[:, None])


def dequantize(weight: Nf4Weight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """(N, K) weights in ``dtype``, computed in float32; written into contiguous ``out`` where given."""
    if out is None:
        out = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.packed.device)
    blocks = out.numel() // 64
    # a fused multiply-add would round differently from the quantizer's own two steps
    exact = {} if interpreting() else {"enable_fp_fusion": False}
    _dequantize_kernel[(triton.cdiv(blocks, 64),)](
        weight.packed,
        weight.scales,
        weight.scale_code,
        weight.group_scales,
        weight.offset,
        weight.code,
        out,
        blocks,
        BLOCKS=64,
        NESTED=len(weight.scale_code) > 0,
        num_warps=4,
        **exact,
    )
    return out
