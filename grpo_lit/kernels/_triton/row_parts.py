"""Device functions of ``logit_rows_kernel``: published words, tiles of a row, and what a logit becomes."""

from __future__ import annotations

import triton
import triton.language as tl

from grpo_lit.kernels._triton.math import tanh


@triton.jit
def publishable(value, check):  # type: ignore[no-untyped-def]
    """A published word: float32 ``value`` below, the bits of positive float32 ``check`` above."""
    low = value.to(tl.uint32, bitcast=True).to(tl.int64)
    return low | (check.to(tl.uint32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def halves(words, wanted, WAIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(value, check) of the ``wanted`` words, 0 elsewhere; waits until they are published if WAIT."""
    if WAIT:
        low, high = tl.inline_asm_elementwise(
            """{
                .reg .pred idle, waiting;
                mov.b32 $0, 0;
                mov.b32 $1, 0;
                setp.eq.u32 idle, $3, 0;
                @idle bra done;
            again:
                ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2];
                setp.eq.u32 waiting, $1, 0;
                @waiting bra again;
            done:
            }""",
            "=&r,=&r,l,r",
            [words, wanted.to(tl.int32)],
            dtype=(tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        word = tl.load(words, mask=wanted, other=0)
        low = word.to(tl.uint32).to(tl.float32, bitcast=True)
        high = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def merged(words, num_blocks, PAD: tl.constexpr, ENTROPY: tl.constexpr, WAIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(reference, normaliser, entropy sum) of a row from the words of its blocks."""
    index = tl.arange(0, PAD)
    block = index < num_blocks
    peaks, sums = halves(words + index, block, WAIT)
    peaks = tl.where(block, peaks, float("-inf"))
    peak = tl.max(peaks, 0)
    reference = tl.where(peak == float("-inf"), 0.0, peak)
    gap = tl.maximum(peaks - reference, -1e4)  # finite, since it meets a 0 below
    share = tl.exp2(gap)
    tilt = 0.0
    if ENTROPY:
        tilts, _ = halves(words + num_blocks + index, block, WAIT)
        tilt = tl.sum((tilts + gap * sums) * share, 0)
    return reference, tl.sum(sums * share, 0), tilt


@triton.jit
def again(x, nothing, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """x, hidden from the compiler, which then keeps 16-bit x and not the float32 made of it."""
    if PACKED:
        zeros = tl.full(x.shape, 0, tl.int16) + nothing.to(tl.int16)
        x = tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, zeros], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def larger(a, b, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elementwise maximum, of pairs where the elements have 16 bits."""
    if PACKED:
        if a.dtype == tl.bfloat16:
            larger = tl.inline_asm_elementwise(
                "max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2
            )
        else:
            larger = tl.inline_asm_elementwise(
                "max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2
            )
    else:
        larger = tl.maximum(a.to(tl.float32), b.to(tl.float32))
    return larger


@triton.jit
def activate(raw, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(x, dx/dz up to the temperature) in float32; a raw -inf stays."""
    x = raw.to(tl.float32)
    slope = 1.0
    if SOFTCAP:
        squashed = tanh(x / softcap)
        slope = 1.0 - squashed * squashed
        x = tl.where(x == float("-inf"), x, softcap * squashed)
    return x, slope


# A row may begin and end inside a vector of 16 bytes. A mask that differs within a vector would make all loads and
# stores of a tile narrow, so tiles take whole vectors alone, and the ends are read and written one by one: `edges`.
@triton.jit
def read_tile(source, column, shift, vocab, width, EVEN: tl.constexpr, VEC: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of logits as stored, without the row's `edges`; -inf beyond the last vector with a token."""
    if EVEN:
        raw = tl.load(source + column, mask=column < vocab, other=float("-inf"))
    else:
        first = column // VEC * VEC
        inside = (first >= shift) & (first + VEC <= width) & (first < vocab)
        raw = tl.load(source + column, mask=inside, other=float("-inf"))
    return raw


@triton.jit
def write_tile(target, values, column, shift, width, EVEN: tl.constexpr, VEC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a tile of the gradient, padded columns included, without the row's `edges`."""
    values = values.to(target.dtype.element_ty)
    if EVEN:
        tl.store(target + column, values, mask=column < width)
    else:
        first = column // VEC * VEC
        tl.store(target + column, values, mask=(first >= shift) & (first + VEC <= width))


@triton.jit
def edges(shift, width, SIZE: tl.constexpr, VEC: tl.constexpr):  # type: ignore[no-untyped-def]
    """(2 VEC columns, which of them lie in vectors that the row has only a part of, among the first SIZE columns)."""
    lane = tl.arange(0, 2 * VEC)
    column = tl.where(lane < VEC, lane, width // VEC * VEC + lane - VEC)
    head = tl.minimum(shift, 1) * VEC  # > 0 if the row begins inside the first vector
    partial = ((lane < VEC) & (lane < head)) | ((lane >= VEC) & (column >= head))  # the last may be the first
    return column, partial & (column >= shift) & (column >= 0) & (column < width) & (column < SIZE)
