"""Products of a few rows with matrices in 16 bits or NF4; see ``grpo_lit.kernels.decode_linear``.

A program multiplies a tile of columns (rows of W) with all rows of x over its share of K. Weights are the left
operand of the tensor cores, whose width fits a tile, and the few rows of x the right one, padded to 16. The last of
a tile's programs to finish adds the shares up, in a fixed order, and does what follows the product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels._triton.gated_activation import activate, gate
from grpo_lit.kernels._triton.launch import counters_for, overlap, prefetch, wait_for_previous
from grpo_lit.kernels._triton.nf4 import unpacked
from grpo_lit.kernels._triton.rms_norm import add_norm
from grpo_lit.kernels.decode_linear import Part, RmsNorm, reference
from grpo_lit.kernels.dispatch import interpreting
from grpo_lit.kernels.nf4 import Nf4Weight

MAX_PARTS = 3
MAX_ROWS = 32  # with more, cuBLAS is faster, even on weights that are first turned into 16 bits


class Plan(NamedTuple):
    """How a product is cut: columns of a tile, programs along K, columns of K at a time (dense only), and so on."""

    columns: int
    splits: int
    depth: int
    num_warps: int
    num_stages: int
    prefetch: int = 0


@triton.jit
def _choose(part, a, b, c):  # type: ignore[no-untyped-def]
    chosen = a
    if part == 1:
        chosen = b
    if part == 2:
        chosen = c
    return chosen


@triton.jit
def _locate(tile, n0, n1, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """(part, first column of the tile in the part, first column of the part in the output)."""
    tiles0 = tl.cdiv(n0, COLUMNS)
    tiles1 = tl.cdiv(n1, COLUMNS)
    part = (tile >= tiles0).to(tl.int32) + (tile >= tiles0 + tiles1).to(tl.int32)
    start = tl.where(part == 0, 0, tl.where(part == 1, tiles0, tiles0 + tiles1))
    before = tl.where(part == 0, 0, tl.where(part == 1, n0, n0 + n1))
    return part, (tile - start) * COLUMNS, before


@triton.jit
def _added(  # type: ignore[no-untyped-def]
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
def _gathered(  # type: ignore[no-untyped-def]
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
def _finish(  # type: ignore[no-untyped-def]
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


@triton.jit
def _dense_kernel(  # type: ignore[no-untyped-def]
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
        part, first, before = _locate(tile, n0, n1, COLUMNS)
        w = _choose(part, w0, w1, w2)
    n = _choose(part, n0, n1, n2)
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
    last, y, other = _gathered(y, other, partial, counters, tile, split, splits, tiles, row, rows, SPLIT, GATED)
    if last:
        ranks = rank0 + rank1 + rank2
        rank = _choose(part, rank0, rank1, rank2)
        at = _choose(part, 0, rank0, rank0 + rank1)
        bias, b = _choose(part, bias0, bias1, bias2), _choose(part, b0, b1, b2)
        has = (biased >> part) & 1 != 0
        y = _added(y, bias, has, low, b, rank, at, ranks, row, rows, column, n, HAS_BIAS, HAS_LORA)
        if GATED:
            has = biased & 2 != 0
            other = _added(other, bias1, has, low, b1, rank1, rank0, ranks, row, rows, column, n, HAS_BIAS, HAS_LORA)
        _finish(y, other, out, residual, out_width, column, n, before, row, rows, HAS_RESIDUAL, ACTIVATION)


@triton.jit
def _low_rank_kernel(  # type: ignore[no-untyped-def]
    x,
    norm,
    normed,
    a0,
    a1,
    a2,
    low,
    rows,
    width,
    rank0,
    rank1,
    rank2,
    scaling0,
    scaling1,
    scaling2,
    eps,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """scaling n A^T: a program one row of A, of whichever part, and ROWS rows of n.

    n is x, or its RMS norm if NORM; then one further program for each ROWS rows writes n, and DEPTH covers a row.
    """
    number = tl.program_id(0)
    ranks = rank0 + rank1 + rank2
    part = (number >= rank0).to(tl.int32) + (number >= rank0 + rank1).to(tl.int32)
    a = _choose(part, a0, a1, a2) + (number - _choose(part, 0, rank0, rank0 + rank1)).to(tl.int64) * width
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    at = row[:, None].to(tl.int64) * width + k[None, :]
    wait_for_previous(PDL)
    if NORM:
        there = (row[:, None] < rows) & (k[None, :] < width)
        h = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        h *= tl.rsqrt(tl.sum(h * h, 1) / width + eps)[:, None]
        h = h.to(x.dtype.element_ty).to(tl.float32) * tl.load(norm + k, mask=k < width, other=0.0).to(tl.float32)
        h = h.to(x.dtype.element_ty)
        if number == ranks:
            tl.store(normed + at, h, mask=there)
        else:
            weights = tl.load(a + k, mask=k < width, other=0.0).to(tl.float32)
            total = tl.sum(h.to(tl.float32) * weights[None, :], 1)
            tl.store(low + row * ranks + number, total * _choose(part, scaling0, scaling1, scaling2), mask=row < rows)
    else:
        summed = tl.zeros((ROWS, DEPTH), tl.float32)
        for start in range(0, width, DEPTH):
            inside = k < width - start
            weights = tl.load(a + start + k, mask=inside, other=0.0).to(tl.float32)
            few = tl.load(x + at + start, mask=(row[:, None] < rows) & inside[None, :], other=0.0)
            summed += few.to(tl.float32) * weights[None, :]
        total = tl.sum(summed, 1) * _choose(part, scaling0, scaling1, scaling2)
        tl.store(low + row * ranks + number, total, mask=row < rows)


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
def _nf4_step(  # type: ignore[no-untyped-def]
    even, odd, packed, code, number, lane, scale, BF16: tl.constexpr, PERMUTE: tl.constexpr
):
    """(COLUMNS, ROWS) product with one block of 64 of each column; ``number`` (COLUMNS,) of the blocks."""
    q = tl.load(packed + (number.to(tl.int64) * 32)[:, None] + lane[None, :])
    early, late = unpacked(q, code, BF16, PERMUTE)
    return tl.dot(late, odd, tl.dot(early, even)) * scale[:, None]


@triton.jit
def _nf4_kernel(  # type: ignore[no-untyped-def]
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
        part, first, before = _locate(tile, n0, n1, COLUMNS)
        packed, scales = _choose(part, packed0, packed1, packed2), _choose(part, scales0, scales1, scales2)
        scale_code = _choose(part, scale_code0, scale_code1, scale_code2)
        groups = _choose(part, groups0, groups1, groups2)
        offset = _choose(part, offset0, offset1, offset2)
    n = _choose(part, n0, n1, n2)
    column = first + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    start = split * blocks_each
    end = tl.minimum(start + blocks_each, blocks)
    if PREFETCH > 0:  # the share's first lines of 128 bytes, and the scales beside them
        line = tl.minimum(start + tl.arange(0, PREFETCH) * 4, blocks - 1)
        ahead = (column % n)[:, None] * blocks + line[None, :]
        prefetch(packed + ahead.to(tl.int64) * 32, PDL)
        prefetch(scales + ahead, PDL)
        if GATED:
            prefetch(packed1 + ahead.to(tl.int64) * 32, PDL)
            prefetch(scales1 + ahead, PDL)
    wait_for_previous(PDL)
    DTYPE: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    lane = tl.arange(0, 32)
    start_of = (column % n) * blocks
    shift, other_shift = 0.0, 0.0
    if NESTED:
        shift = tl.load(offset)
        if GATED:
            other_shift = tl.load(offset1)
    y = tl.zeros((COLUMNS, ROWS), tl.float32)
    other = y
    # Scales are read two blocks ahead and computed one block ahead: each takes a look-up that depends on a read.
    final = start_of + blocks - 1
    scale = _block_scale(_stored_scale(scales, groups, start_of + start, NESTED), scale_code, shift, NESTED)
    stored = _stored_scale(scales, groups, tl.minimum(start_of + start + 1, final), NESTED)
    other_scale, other_stored = scale, stored
    if GATED:
        other_scale = _block_scale(
            _stored_scale(scales1, groups1, start_of + start, NESTED), scale_code1, other_shift, NESTED
        )
        other_stored = _stored_scale(scales1, groups1, tl.minimum(start_of + start + 1, final), NESTED)
    for step in range(start, end, UNROLL):
        for i in tl.static_range(UNROLL):
            block = tl.minimum(step + i, blocks - 1)
            # two neighbouring 16-bit numbers of x at a time; zeros beyond this program's share
            pairs = tl.load(
                x + row[None, :] * (blocks * 32) + block * 32 + lane[:, None],
                mask=row[None, :] < tl.where(step + i < end, rows, 0),
                other=0,
            )
            even = (pairs & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
            odd = (pairs >> 16).to(tl.int16).to(DTYPE, bitcast=True)
            if not PERMUTE:  # the interpreter has no 16-bit products
                even, odd = even.to(tl.float32), odd.to(tl.float32)
            number = start_of + block
            later = tl.minimum(number + 2, final)
            next_scale = _block_scale(stored, scale_code, shift, NESTED)
            stored = _stored_scale(scales, groups, later, NESTED)
            y += _nf4_step(even, odd, packed, code, number, lane, scale, BF16, PERMUTE)
            scale = next_scale
            if GATED:
                next_scale = _block_scale(other_stored, scale_code1, other_shift, NESTED)
                other_stored = _stored_scale(scales1, groups1, later, NESTED)
                other += _nf4_step(even, odd, packed1, code, number, lane, other_scale, BF16, PERMUTE)
                other_scale = next_scale
    tiles = tl.num_programs(0)
    last, y, other = _gathered(y, other, partial, counters, tile, split, splits, tiles, row, rows, SPLIT, GATED)
    if last:
        ranks = rank0 + rank1 + rank2
        rank = _choose(part, rank0, rank1, rank2)
        at = _choose(part, 0, rank0, rank0 + rank1)
        bias, b = _choose(part, bias0, bias1, bias2), _choose(part, b0, b1, b2)
        has = (biased >> part) & 1 != 0
        y = _added(y, bias, has, low, b, rank, at, ranks, row, rows, column, n, HAS_BIAS, HAS_LORA)
        if GATED:
            has = biased & 2 != 0
            other = _added(other, bias1, has, low, b1, rank1, rank0, ranks, row, rows, column, n, HAS_BIAS, HAS_LORA)
        _finish(y, other, out, residual, out_width, column, n, before, row, rows, HAS_RESIDUAL, ACTIVATION)


def _three(values: list[Tensor | None], instead: Tensor) -> list[Tensor]:
    """The parts' tensors, padded to three with something of the right type that is never read."""
    some = [value for value in values if value is not None]
    filled = [value if value is not None else (some[0] if some else instead) for value in values]
    return filled + [filled[0]] * (MAX_PARTS - len(filled))


def _ints(values: list[int]) -> list[int]:
    return values + [0] * (MAX_PARTS - len(values))


def dense_plan(rows: int, columns: int, width: int, gated: bool) -> Plan:
    """By size, as measured on an H200: about two programs a multiprocessor."""
    depth = 128 if width % 128 == 0 else 64
    if gated or columns > 8192:
        return Plan(64, 1, depth, 4, 3) if rows <= 16 else Plan(32, 1, depth, 2, 4)
    splits = max(1, min(round(264 / triton.cdiv(columns, 64)), triton.cdiv(width, depth)))
    return Plan(64, splits, depth, 4, 4, 2)


def nf4_plan(rows: int, columns: int, width: int, gated: bool) -> Plan:
    """By size, as measured on an H200: from four programs a multiprocessor on, each with six blocks of 64 or more."""
    if gated or columns > 8192:
        tiles = triton.cdiv(columns // 2 if gated else columns, 32)
        unroll, stages = (2, 5) if rows <= 8 else (1, 8)
        return Plan(32, max(1, min(round(1100 / tiles), width // 384)), unroll, 2, stages)
    tiles = triton.cdiv(columns, 32)
    return Plan(32, max(1, min(round(560 / tiles), width // 256)), 4, 2, 3)


def low_rank(x: Tensor, parts: list[Part], norm: RmsNorm | None = None) -> tuple[Tensor, Tensor]:
    """n (R, K), and (R, sum of ranks) float32: scaling n A^T of every part that has an update; n is normed x or x."""
    loras = [part.lora for part in parts]
    ranks = _ints([0 if lora is None else len(lora.a) for lora in loras])
    low = torch.empty(len(x), sum(ranks), dtype=torch.float32, device=x.device)
    normed = x if norm is None else torch.empty_like(x)
    depth = triton.next_power_of_2(x.shape[1])
    depth = depth if norm is not None else min(depth, 2048)
    rows = max(1, min(2 if len(x) <= 8 else 4, triton.next_power_of_2(len(x)), 8192 // depth))
    scalings = [0.0 if lora is None else float(lora.scaling) for lora in loras]
    _low_rank_kernel[(sum(ranks) + (norm is not None), triton.cdiv(len(x), rows))](
        x,
        None if norm is None else norm.weight,
        normed,
        *_three([None if lora is None else lora.a for lora in loras], x),
        low,
        len(x),
        x.shape[1],
        *ranks,
        *scalings,
        *[0.0] * (MAX_PARTS - len(parts)),
        0.0 if norm is None else norm.eps,
        ROWS=rows,
        DEPTH=depth,
        NORM=norm is not None,
        num_warps=4,
        **overlap(x),
    )
    return normed, low


def _fits(x: Tensor, parts: list[Part]) -> bool:
    """Whether the kernels take it, up to the number of rows."""
    if x.dtype not in (torch.bfloat16, torch.float16) or len(x) < 1 or len(parts) > MAX_PARTS:
        return False
    packed = [isinstance(part.weight, Nf4Weight) for part in parts]
    if any(packed) != all(packed):
        return False
    updates = [part.lora for part in parts if part.lora is not None]
    if len({(lora.a.dtype, lora.b.dtype) for lora in updates}) > 1:
        return False
    if any(not (lora.a.is_contiguous() and lora.b.is_contiguous()) for lora in updates):
        return False
    biases = {part.bias.dtype for part in parts if part.bias is not None}
    if len(biases) > 1:
        return False
    if packed[0]:
        return len({len(part.weight.scale_code) > 0 for part in parts}) == 1  # type: ignore[union-attr]
    return all(isinstance(part.weight, Tensor) and part.weight.is_contiguous() for part in parts)


def _by_library(
    x: Tensor, low: Tensor, parts: list[Part], residual: Tensor | None, activation: str | None, out_dtype: torch.dtype
) -> Tensor:
    """cuBLAS for the products, each part straight into its place; ``low`` as `low_rank` leaves it."""
    alone = len(parts) == 1 and activation is None
    if alone and residual is None and parts[0].bias is None and parts[0].lora is None:
        weight = parts[0].weight
        dense = weight if isinstance(weight, Tensor) else weight.dequantize(x.dtype)
        return torch.mm(x, dense.t()) if out_dtype == x.dtype else torch.mm(x, dense.t(), out_dtype=out_dtype)
    out = x.new_empty(len(x), sum(part.columns for part in parts))
    before, rank_at = 0, 0
    for part in parts:
        place = out[:, before : before + part.columns]
        dense = part.weight if isinstance(part.weight, Tensor) else part.weight.dequantize(x.dtype)
        both = alone and residual is not None
        added = residual if both else part.bias
        if added is None:
            torch.mm(x, dense.t(), out=place)
        else:
            torch.addmm(added.to(x.dtype), x, dense.t(), out=place)
        if both and part.bias is not None:
            place += part.bias
        if part.lora is not None:
            rank = len(part.lora.a)
            place += low[:, rank_at : rank_at + rank].to(part.lora.b.dtype) @ part.lora.b.t()
            rank_at += rank
        before += part.columns
    if activation is not None:
        out = gate(out, activation)
    if residual is not None and not alone:
        out = out + residual
    return out.to(out_dtype)


def product(
    x: Tensor,
    parts: list[Part],
    residual: Tensor | None,
    norm: RmsNorm | None,
    activation: str | None,
    plan: Plan | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The op on Triton, or partly through torch where the kernels don't fit."""
    x = x.contiguous()
    low, fits = x, _fits(x, parts)
    if fits and any(part.lora is not None for part in parts):
        x, low = low_rank(x, parts, norm)
    elif norm is not None:
        x = add_norm(x, None, norm.weight, None, norm.eps)[0]
    if not fits:
        return reference(x, parts, residual, None, activation, out_dtype)
    if len(x) > MAX_ROWS:
        return _by_library(x, low, parts, residual, activation, out_dtype or x.dtype)
    rows, width = x.shape
    columns = [part.columns for part in parts]
    out_width = columns[0] if activation is not None else sum(columns)
    packed = isinstance(parts[0].weight, Nf4Weight)
    plan = plan or (nf4_plan if packed else dense_plan)(rows, sum(columns), width, activation is not None)
    steps = width // 64 if packed else triton.cdiv(width, plan.depth)
    each = triton.cdiv(steps, plan.splits)
    splits = triton.cdiv(steps, each)
    tiles = sum(triton.cdiv(n, plan.columns) for n in (columns[:1] if activation is not None else columns))
    padded_rows = max(8 if packed else 16, triton.next_power_of_2(rows))
    out = x.new_empty(rows, out_width, dtype=out_dtype or x.dtype)
    size = tiles * splits * plan.columns * padded_rows * (1 if activation is None else 2)
    partial = x.new_empty(size if splits > 1 else 1, dtype=torch.float32)
    after = [
        *_three([part.bias for part in parts], x),
        *_three([None if part.lora is None else part.lora.b for part in parts], x),
        low,
        x if residual is None else residual.contiguous(),
        out,
        partial,
        counters_for(tiles, x.device),
        rows,
    ]
    sizes = [
        *_ints(columns),
        sum((part.bias is not None) << i for i, part in enumerate(parts)),
        *_ints([0 if part.lora is None else len(part.lora.a) for part in parts]),
        out_width,
        each,
        splits,
    ]
    options = {
        "ROWS": padded_rows,
        "COLUMNS": plan.columns,
        "SPLIT": splits > 1,
        "PREFETCH": min(
            plan.prefetch, triton.next_power_of_2(triton.cdiv(each, 4) if packed else each * plan.depth // 64)
        ),
        "HAS_BIAS": any(part.bias is not None for part in parts),
        "HAS_LORA": any(part.lora is not None for part in parts),
        "HAS_RESIDUAL": residual is not None,
        "ACTIVATION": activation,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
        **overlap(x),
    }
    weights = [part.weight for part in parts]
    if packed:
        some: list[Nf4Weight] = weights  # type: ignore[assignment]
        fields = ("packed", "scales", "scale_code", "group_scales", "offset")
        tensors = [t for name in fields for t in _three([getattr(weight, name) for weight in some], x)]
        nested = len(some[0].scale_code) > 0
        _nf4_kernel[(tiles, splits)](
            x.view(torch.int32),
            *tensors,
            some[0].code,
            *after,
            width // 64,
            *sizes,
            UNROLL=plan.depth,
            BF16=x.dtype == torch.bfloat16,
            NESTED=nested,
            PERMUTE=not interpreting(),
            **options,
        )
    else:
        dense: list[Tensor | None] = weights  # type: ignore[assignment]
        even = width % plan.depth == 0
        _dense_kernel[(tiles, splits)](
            x, *_three(dense, x), *after, width, *sizes, DEPTH=plan.depth, EVEN=even, WIDEN=interpreting(), **options
        )
    return out
