"""A few rows times matrices in 16 bits; see ``grpo_lit.kernels.decode_linear``."""

from __future__ import annotations

import triton
import triton.language as tl

from grpo_lit.kernels._triton.decode_parts import added, choose, finish, gathered, locate
from grpo_lit.kernels._triton.launch import prefetch, wait_for_previous


@triton.jit
def dense_kernel(  # type: ignore[no-untyped-def]
    x,
    w0,
    w1,
    w2,
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
    width,
    n0,
    n1,
    n2,
    biased,
    rank0,
    rank1,
    rank2,
    out_width,
    steps_each,
    splits,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN: tl.constexpr,
    PREFETCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_LORA: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    GATED: tl.constexpr = ACTIVATION is not None
    if GATED:
        part, first, before = 0, tile * COLUMNS, 0
        w = w0
    else:
        part, first, before = locate(tile, n0, n1, COLUMNS)
        w = choose(part, w0, w1, w2)
    n = choose(part, n0, n1, n2)
    column = first + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    k = split * steps_each * DEPTH + tl.arange(0, DEPTH)
    offset = (column % n).to(tl.int64)[:, None] * width + k[None, :]
    from_x = x + row[None, :] * width + k[:, None]
    steps = tl.minimum(steps_each, tl.cdiv(width, DEPTH) - split * steps_each)
    if PREFETCH > 0:  # the share's first lines of 128 bytes
        line = tl.minimum(split * steps_each * DEPTH + tl.arange(0, PREFETCH) * 64, width - 1)
        ahead = (column % n).to(tl.int64)[:, None] * width + line[None, :]
        prefetch(w + ahead, PDL)
        if GATED:
            prefetch(w1 + ahead, PDL)
    wait_for_previous(PDL)
    y = tl.zeros((COLUMNS, ROWS), tl.float32)
    other = y
    for step in range(steps):
        left = width - (split * steps_each + step) * DEPTH
        there = row[None, :] < rows
        if EVEN:
            weights = tl.load(w + offset + step * DEPTH)
        else:
            inner = tl.arange(0, DEPTH)
            there = there & (inner[:, None] < left)
            weights = tl.load(w + offset + step * DEPTH, mask=inner[None, :] < left, other=0.0)
        few = tl.load(from_x + step * DEPTH, mask=there, other=0.0)
        if WIDEN:  # the interpreter has no 16-bit products
            weights, few = weights.to(tl.float32), few.to(tl.float32)
        y = tl.dot(weights, few, y)
        if GATED:
            if EVEN:
                weights = tl.load(w1 + offset + step * DEPTH)
            else:
                weights = tl.load(w1 + offset + step * DEPTH, mask=inner[None, :] < left, other=0.0)
            if WIDEN:
                weights = weights.to(tl.float32)
            other = tl.dot(weights, few, other)
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
