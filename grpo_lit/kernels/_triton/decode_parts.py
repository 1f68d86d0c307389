"""What the products of ``decode_linear`` share on the device: which part a tile belongs to, the sum over programs
along K, and what follows the product."""

from __future__ import annotations

import triton
import triton.language as tl

from grpo_lit.kernels._triton.gated_activation import activate


@triton.jit
def choose(part, a, b, c):  # type: ignore[no-untyped-def]
    chosen = a
    if part == 1:
        chosen = b
    if part == 2:
        chosen = c
    return chosen


@triton.jit
def locate(tile, n0, n1, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(part, first column of the tile in the part, first column of the part in the output)."""
    tiles0 = tl.cdiv(n0, COLUMNS)
    tiles1 = tl.cdiv(n1, COLUMNS)
    part = (tile >= tiles0).to(tl.int32) + (tile >= tiles0 + tiles1).to(tl.int32)
    start = tl.where(part == 0, 0, tl.where(part == 1, tiles0, tiles0 + tiles1))
    before = tl.where(part == 0, 0, tl.where(part == 1, n0, n0 + n1))
    return part, (tile - start) * COLUMNS, before


@triton.jit
def added(  # type: ignore[no-untyped-def]
    y, bias, biased, low, b, rank, rank_at, ranks, row, rows, column, n, HAS_BIAS: tl.constexpr, HAS_LORA: tl.constexpr
):
    """y (COLUMNS, ROWS) plus the part's bias and low-rank update."""
    if HAS_BIAS:
        y += tl.load(bias + column, mask=column < tl.where(biased, n, 0), other=0.0).to(tl.float32)[:, None]
    if HAS_LORA:
        for start in range(0, rank, 16):
            j = start + tl.arange(0, 16)
            left = tl.load(
                b + column[:, None].to(tl.int64) * rank + j[None, :],
                mask=(column[:, None] < n) & (j[None, :] < rank),
                other=0.0,
            )
            right = tl.load(
                low + row[None, :] * ranks + rank_at + j[:, None],
                mask=(row[None, :] < rows) & (j[:, None] < rank),
                other=0.0,
            )
            y = tl.dot(left.to(tl.float32), right, y, input_precision="tf32x3")
    return y


@triton.jit
def gathered(  # type: ignore[no-untyped-def]
    y, other, partial, counters, tile, split, splits, tiles, row, rows, SPLIT: tl.constexpr, GATED: tl.constexpr
):
    """(is this program the tile's last, the tile's sum over all splits); ``other`` is the second product if GATED."""
    last = True
    if SPLIT:
        COLUMNS: tl.constexpr = y.shape[0]
        ROWS: tl.constexpr = y.shape[1]
        SIZE: tl.constexpr = COLUMNS * ROWS * (2 if GATED else 1)
        at = row[None, :] * COLUMNS + tl.arange(0, COLUMNS)[:, None]
        real = row[None, :] < rows + tl.zeros_like(at)
        mine = partial + (tile * splits + split).to(tl.int64) * SIZE
        tl.store(mine + at, y, mask=real)
        if GATED:
            tl.store(mine + COLUMNS * ROWS + at, other, mask=real)
        tl.debug_barrier()  # the whole program has written before it counts as arrived
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == splits - 1
        if last:
            tl.debug_barrier()
            y = tl.zeros_like(y)
            other = tl.zeros_like(other)
            for first in range(0, splits, 8):  # eight at a time, so that their reads overlap
                for i in tl.static_range(8):
                    some = partial + (tile * splits + first + i).to(tl.int64) * SIZE + at
                    there = row[None, :] < tl.where(first + i < splits, rows, 0) + tl.zeros_like(at)
                    y += tl.load(some, mask=there, other=0.0, cache_modifier=".cg")
                    if GATED:
                        other += tl.load(some + COLUMNS * ROWS, mask=there, other=0.0, cache_modifier=".cg")
            tl.store(counters + tile, 0)
    return last, y, other


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    y,
    other,
    out,
    residual,
    out_width,
    column,
    n,
    before,
    row,
    rows,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    if ACTIVATION is not None:
        y = activate(y, ACTIVATION) * other
    at = row[None, :].to(tl.int64) * out_width + before + column[:, None]
    real = (row[None, :] < rows) & (column[:, None] < n)
    if HAS_RESIDUAL:
        y += tl.load(residual + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=real)
