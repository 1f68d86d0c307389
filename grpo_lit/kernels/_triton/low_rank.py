"""The narrow half of low-rank updates, of a few rows; see ``grpo_lit.kernels.decode_linear``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels._triton.decode_parts import choose
from grpo_lit.kernels._triton.launch import overlap, wait_for_previous
from grpo_lit.kernels.decode_linear import Part, RmsNorm

MAX_PARTS = 3


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
    a = choose(part, a0, a1, a2) + (number - choose(part, 0, rank0, rank0 + rank1)).to(tl.int64) * width
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
            tl.store(low + row * ranks + number, total * choose(part, scaling0, scaling1, scaling2), mask=row < rows)
    else:
        summed = tl.zeros((ROWS, DEPTH), tl.float32)
        for start in range(0, width, DEPTH):
            inside = k < width - start
            weights = tl.load(a + start + k, mask=inside, other=0.0).to(tl.float32)
            few = tl.load(x + at + start, mask=(row[:, None] < rows) & inside[None, :], other=0.0)
            summed += few.to(tl.float32) * weights[None, :]
        total = tl.sum(summed, 1) * choose(part, scaling0, scaling1, scaling2)
        tl.store(low + row * ranks + number, total, mask=row < rows)


def three(values: list[Tensor | None], instead: Tensor) -> list[Tensor]:
    """The parts' tensors, padded to three with something of the right type that is never read."""
    some = [value for value in values if value is not None]
    filled = [value if value is not None else (some[0] if some else instead) for value in values]
    return filled + [filled[0]] * (MAX_PARTS - len(filled))


def ints(values: list[int]) -> list[int]:
    return values + [0] * (MAX_PARTS - len(values))


def low_rank(x: Tensor, parts: list[Part], norm: RmsNorm | None = None) -> tuple[Tensor, Tensor]:
    """n (R, K), and (R, sum of ranks) float32: scaling n A^T of every part that has an update; n is normed x or x."""
    loras = [part.lora for part in parts]
    ranks = ints([0 if lora is None else len(lora.a) for lora in loras])
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
        *three([None if lora is None else lora.a for lora in loras], x),
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
