"""values *= factor in place, returning at once where the factor is 1."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels._triton.launch import overlap, wait_for_previous

_BLOCK = 8192
_PROGRAMS = 132  # a large one for each multiprocessor of an H200; few, so that doing nothing is quick


@triton.jit
def _scale_kernel(values, factor, numel, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    wait_for_previous(PDL)
    by = tl.load(factor).to(tl.float32)
    if by != 1.0:
        first = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        lane = tl.arange(0, BLOCK)
        for start in range(first, numel, step):
            inside = start + lane < numel
            at = values + start + lane
            scaled = tl.load(at, mask=inside).to(tl.float32) * by
            tl.store(at, scaled.to(values.dtype.element_ty), mask=inside)


def scale(values: Tensor, factor: Tensor) -> None:
    """``values`` contiguous, any size; ``factor`` a scalar on the same device."""
    if values.numel() == 0:
        return
    grid = (min(_PROGRAMS, triton.cdiv(values.numel(), _BLOCK)),)
    by = factor.to(torch.float32)
    _scale_kernel[grid](values, by, values.numel(), BLOCK=_BLOCK, num_warps=16, **overlap(values))
