"""A few rows times NF4 matrices; see ``grpo_lit.kernels.decode_linear`` and ``grpo_lit.kernels.nf4``.

The warps of a program share K (``SHARES``): each multiplies all of the tile's columns with every so many-th block of
64, a batched product whose batch is the warp. So a tile of 16 columns has four warps to hide what a block waits for,
and their sums meet in shared memory; programs along K have to meet in global memory, which takes about 2 us. For
small matrices and more than 8 rows many programs of two warps, which share the columns, are faster after all.

What holds it (H200, 4 rows, 1536 -> 8960): 10.3 us, where reading the weights takes 1.7 and a launch alone 2 to 3.
Turning weights into numbers takes 2.1 byte permutes a weight and the loop 6 instructions; most are integer ones,
whose units run at half the rate of the float ones: about 4 us. The rest is waiting: for the first weights, for
scales that are looked up twice, for the sum at the end. bfloat16 weights, four times the bytes, take as long as
these.

What helped: warps along K (8 to 40 % for up to 8 rows), asking for the first lines ahead of the wait for the
previous kernel, scales read a step ahead, 8 rows instead of 16. What did not: wider tiles, eight warps, programs
along K where four warps have six blocks each, and the table's words from memory (free of the 18 instructions that
make them in every step, but operands of the lookup that are no weights keep the compiler from reading the weights as
its product needs them).
"""

from __future__ import annotations

import triton
import triton.language as tl

from grpo_lit.kernels._triton.decode_parts import added, choose, finish, gathered, locate
from grpo_lit.kernels._triton.launch import prefetch, wait_for_previous
from grpo_lit.kernels._triton.nf4 import unpacked


@triton.jit
def _stored_scale(scales, group_scales, number, NESTED: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the scales of blocks ``number`` are computed from: (index, group scale), or twice the scale itself."""
    if NESTED:
        first = tl.load(scales + number).to(tl.int32)
        second = tl.load(group_scales + number // 256)
    else:
        first = tl.load(scales + number)
        second = first
    return first, second


@triton.jit
def _block_scale(stored, scale_code, shift, NESTED: tl.constexpr):  # type: ignore[no-untyped-def]
    first, second = stored
    if NESTED:
        second = tl.load(scale_code + first) * second + shift
    return second


@triton.jit
def _block_product(  # type: ignore[no-untyped-def]
    even, odd, packed, code, number, lane, scale, BF16: tl.constexpr, PERMUTE: tl.constexpr
):
    """(SHARES, COLUMNS, ROWS) products with a block of 64 each, their numbers in ``number``; without SHARES if 1."""
    q = tl.load(packed + (number.to(tl.int64) * 32)[:, :, None] + lane[None, None, :])
    early, late = unpacked(q, code, BF16, PERMUTE)
    if q.shape[0] == 1:
        early, late = tl.reshape(early, q.shape[1:]), tl.reshape(late, q.shape[1:])
        even, odd = tl.reshape(even, even.shape[1:]), tl.reshape(odd, odd.shape[1:])
        product = tl.dot(late, odd, tl.dot(early, even)) * tl.reshape(scale, scale.shape[1:])[:, None]
    else:
        product = tl.dot(late, odd, tl.dot(early, even)) * scale[:, :, None]
    return product


@triton.jit
def nf4_kernel(  # type: ignore[no-untyped-def]
    x,
    packed0,
    packed1,
    packed2,
    scales0,
    scales1,
    scales2,
    scale_code0,
    scale_code1,
    scale_code2,
    groups0,
    groups1,
    groups2,
    offset0,
    offset1,
    offset2,
    code,
    bias0,
    bias1,
    bias2,
    b0,
    b1,
    b2,
    low,
    residual,
    out,
    partial,
    counters,
    rows,
    blocks,
    n0,
    n1,
    n2,
    biased,
    rank0,
    rank1,
    rank2,
    out_width,
    blocks_each,
    splits,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARES: tl.constexpr,
    UNROLL: tl.constexpr,
    PREFETCH: tl.constexpr,
    SPLIT: tl.constexpr,
    BF16: tl.constexpr,
    NESTED: tl.constexpr,
    PERMUTE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    GATED: tl.constexpr = ACTIVATION is not None
    if GATED:
        part, first, before = 0, tile * COLUMNS, 0
        packed, scales, scale_code, groups, offset = packed0, scales0, scale_code0, groups0, offset0
    else:
        part, first, before = locate(tile, n0, n1, COLUMNS)
        packed, scales = choose(part, packed0, packed1, packed2), choose(part, scales0, scales1, scales2)
        scale_code = choose(part, scale_code0, scale_code1, scale_code2)
        groups = choose(part, groups0, groups1, groups2)
        offset = choose(part, offset0, offset1, offset2)
    n = choose(part, n0, n1, n2)
    column = first + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    start = split * blocks_each
    end = tl.minimum(start + blocks_each, blocks)
    start_of = (column % n) * blocks
    if PREFETCH > 0:  # the share's first lines of 128 bytes, and the scales beside them
        line = tl.minimum(start + tl.arange(0, PREFETCH) * 4, blocks - 1)
        ahead = start_of[:, None] + line[None, :]
        prefetch(packed + ahead.to(tl.int64) * 32, PDL)
        prefetch(scales + ahead, PDL)
        if GATED:
            prefetch(packed1 + ahead.to(tl.int64) * 32, PDL)
            prefetch(scales1 + ahead, PDL)
    wait_for_previous(PDL)
    DTYPE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    warp = tl.arange(0, SHARES)  # one stands for all where they share the columns
    lane = tl.arange(0, 32)
    shift, other_shift = 0.0, 0.0
    if NESTED:
        shift = tl.load(offset)
        if GATED:
            other_shift = tl.load(offset1)
    y = tl.zeros((COLUMNS, ROWS) if SHARES == 1 else (SHARES, COLUMNS, ROWS), tl.float32)
    other = y
    # what scales are computed from is read a block ahead
    number = start_of[None, :] + tl.minimum(start + warp, blocks - 1)[:, None]
    stored = _stored_scale(scales, groups, number, NESTED)
    other_stored = stored
    if GATED:
        other_stored = _stored_scale(scales1, groups1, number, NESTED)
    for step in range(start, end, SHARES * UNROLL):
        for i in tl.static_range(UNROLL):
            block = step + i * SHARES + warp
            safe = tl.minimum(block, blocks - 1)
            # two neighbouring 16-bit numbers of x at a time; zeros beyond this program's share
            pairs = tl.load(
                x + row[None, None, :] * (blocks * 32) + safe[:, None, None] * 32 + lane[None, :, None],
                mask=row[None, None, :] < tl.where(block < end, rows, 0)[:, None, None],
                other=0,
            )
            even = (pairs & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
            odd = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
            if not PERMUTE:  # the interpreter has no 16-bit products
                even, odd = even.to(tl.float32), odd.to(tl.float32)
            number = start_of[None, :] + safe[:, None]
            later = start_of[None, :] + tl.minimum(block + SHARES, blocks - 1)[:, None]
            scale = _block_scale(stored, scale_code, shift, NESTED)
            stored = _stored_scale(scales, groups, later, NESTED)
            y += _block_product(even, odd, packed, code, number, lane, scale, BF16, PERMUTE)
            if GATED:
                scale = _block_scale(other_stored, scale_code1, other_shift, NESTED)
                other_stored = _stored_scale(scales1, groups1, later, NESTED)
                other += _block_product(even, odd, packed1, code, number, lane, scale, BF16, PERMUTE)
    if SHARES > 1:
        y, other = tl.sum(y, 0), tl.sum(other, 0)
    tiles = tl.num_programs(0)
    last, y, other = gathered(y, other, partial, counters, tile, split, splits, tiles, row, rows, SPLIT, GATED)
    if last:
        ranks = rank0 + rank1 + rank2
        rank = choose(part, rank0, rank1, rank2)
        at = choose(part, 0, rank0, rank0 + rank1)
        bias, b = choose(part, bias0, bias1, bias2), choose(part, b0, b1, b2)
        has = (biased >> part) & 1 != 0
        y = added(y, bias, has, low, b, rank, at, ranks, row, rows, column, n, HAS_BIAS, HAS_LORA)
        if GATED:
            has = biased & 2 != 0
            other = added(other, bias1, has, low, b1, rank1, rank0, ranks, row, rows, column, n, HAS_BIAS, HAS_LORA)
        finish(y, other, out, residual, out_width, column, n, before, row, rows, HAS_RESIDUAL, ACTIVATION)
