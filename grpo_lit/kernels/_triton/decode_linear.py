"""Products of a few rows with matrices in 16 bits or NF4; see ``grpo_lit.kernels.decode_linear``.

A program multiplies a tile of columns (rows of W) with all rows of x over its share of K. Weights are the left
operand of the tensor cores, whose width fits a tile, and the few rows of x the right one, padded to 8 or 16. The
last of a tile's programs to finish adds the shares up, in a fixed order, and does what follows the product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from grpo_lit.kernels._triton.dense_product import dense_kernel
from grpo_lit.kernels._triton.gated_activation import gate
from grpo_lit.kernels._triton.launch import counters_for, device_limits, overlap
from grpo_lit.kernels._triton.low_rank import MAX_PARTS, ints, low_rank, three
from grpo_lit.kernels._triton.nf4_product import nf4_kernel
from grpo_lit.kernels._triton.rms_norm import add_norm
from grpo_lit.kernels.decode_linear import Part, RmsNorm, reference
from grpo_lit.kernels.dispatch import interpreting
from grpo_lit.kernels.nf4 import Nf4Weight

MAX_ROWS = 32  # with more, cuBLAS is faster, even on weights that are first turned into 16 bits


class Plan(NamedTuple):
    """How a product is cut.

    Attributes:
        columns: of a tile, which a program makes.
        splits: programs along K.
        depth: columns of K at a time (dense); blocks of 64 a warp and step (NF4).
        num_warps: of a program.
        num_stages: steps in flight.
        prefetch: lines of 128 bytes of each column that are asked for before the previous kernel has ended.
        shares: parts of K for a program's warps, 1 or ``num_warps``; with 1 they share the columns (NF4).
    """

    columns: int
    splits: int
    depth: int
    num_warps: int
    num_stages: int
    prefetch: int = 0
    shares: int = 1


def dense_plan(rows: int, columns: int, width: int, gated: bool, multiprocessors: int = 132) -> Plan:
    """By size, as measured on an H200: about two programs a multiprocessor."""
    depth = 128 if width % 128 == 0 else 64
    if gated or columns > 8192:
        return Plan(64, 1, depth, 4, 3) if rows <= 16 else Plan(32, 1, depth, 2, 4)
    splits = max(1, min(round(2 * multiprocessors / triton.cdiv(columns, 64)), triton.cdiv(width, depth)))
    return Plan(64, splits, depth, 4, 4, 2)


def nf4_plan(rows: int, columns: int, width: int, gated: bool, multiprocessors: int = 132) -> Plan:
    """By size, as measured on an H200: warps share K, but for small matrices and more than 8 rows the columns."""
    if width > 4096:
        tiles = triton.cdiv(columns // 2 if gated else columns, 32)
        splits = max(1, min(round(2.2 * multiprocessors / tiles), width // 512))
        return Plan(32, splits, 2, 4, 3, 8, 4) if rows <= 16 else Plan(32, splits, 1, 4, 4, 8, 4)
    if gated:
        return Plan(16, 1, 1, 4, 4, 8, 4)
    if columns > 4096:
        return Plan(16, 2, 1, 4, 4, 8, 4) if rows <= 8 else Plan(32, 1, 2, 4, 3, 8, 4)
    if rows > 16 or (rows > 8 and columns >= 2048):
        splits = round(4.2 * multiprocessors / triton.cdiv(columns, 32))
        return Plan(32, max(1, min(splits, width // 256)), 4, 2, 3)
    narrow = columns <= 1024 or (rows <= 8 and columns < 2048)
    return Plan(16 if narrow else 32, 1, 1, 4, 4, 8, 4)


def fewer_stages(plan: Plan, matrices: int, rows: int, shared_memory: int) -> Plan:
    """A dense plan with as many stages, up to its own, as ``shared_memory`` bytes hold; at least one."""
    stage = (matrices * plan.columns + rows) * plan.depth * 2
    return plan._replace(num_stages=max(1, min(plan.num_stages, (shared_memory - 1024) // stage)))


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
    packed = isinstance(parts[0].weight, Nf4Weight)
    columns = [part.columns for part in parts]
    if plan is None:
        limits, gated = device_limits(x.device), activation is not None
        size = (len(x), sum(columns), x.shape[1], gated, limits.multiprocessors)
        plan = nf4_plan(*size) if packed else dense_plan(*size)
        if not packed:
            rows = max(16, triton.next_power_of_2(len(x)))
            plan = fewer_stages(plan, 1 + gated, rows, limits.shared_memory)
    return _launch(x, low, parts, residual, activation, plan, out_dtype or x.dtype)


def _launch(
    x: Tensor,
    low: Tensor,
    parts: list[Part],
    residual: Tensor | None,
    activation: str | None,
    plan: Plan,
    out_dtype: torch.dtype,
) -> Tensor:
    rows, width = x.shape
    columns, gated = [part.columns for part in parts], activation is not None
    packed = isinstance(parts[0].weight, Nf4Weight)
    steps = width // 64 if packed else triton.cdiv(width, plan.depth)
    each = triton.cdiv(steps, plan.splits)
    grid = (sum(triton.cdiv(n, plan.columns) for n in (columns[:1] if gated else columns)), triton.cdiv(steps, each))
    padded_rows = max(8 if packed else 16, triton.next_power_of_2(rows))
    out = x.new_empty(rows, columns[0] if gated else sum(columns), dtype=out_dtype)
    size = grid[0] * grid[1] * plan.columns * padded_rows * (2 if gated else 1)
    after = [
        *three([part.bias for part in parts], x),
        *three([None if part.lora is None else part.lora.b for part in parts], x),
        low,
        x if residual is None else residual.contiguous(),
        out,
        x.new_empty(size if grid[1] > 1 else 1, dtype=torch.float32),
        counters_for(grid[0], x.device),
        rows,
        width // 64 if packed else width,
        *ints(columns),
        sum((part.bias is not None) << i for i, part in enumerate(parts)),
        *ints([0 if part.lora is None else len(part.lora.a) for part in parts]),
        out.shape[1],
        each,
        grid[1],
    ]
    lines = triton.cdiv(each, 4) if packed else each * plan.depth // 64
    options: dict[str, Any] = {
        "ROWS": padded_rows,
        "COLUMNS": plan.columns,
        "SPLIT": grid[1] > 1,
        "PREFETCH": min(plan.prefetch, triton.next_power_of_2(lines)),
        "HAS_BIAS": any(part.bias is not None for part in parts),
        "HAS_LORA": any(part.lora is not None for part in parts),
        "HAS_RESIDUAL": residual is not None,
        "ACTIVATION": activation,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
        **overlap(x),
    }
    if packed:
        cut = {"UNROLL": plan.depth, "SHARES": plan.shares}
        nf4_kernel[grid](*_nf4_tensors(x, parts), *after, **cut, **_nf4_options(x, parts), **options)
    else:
        dense = three([part.weight if isinstance(part.weight, Tensor) else None for part in parts], x)
        even = width % plan.depth == 0
        dense_kernel[grid](x, *dense, *after, DEPTH=plan.depth, EVEN=even, WIDEN=interpreting(), **options)
    return out


def _nf4_tensors(x: Tensor, parts: list[Part]) -> list[Tensor]:
    weights = [part.weight for part in parts if isinstance(part.weight, Nf4Weight)]
    fields = ("packed", "scales", "scale_code", "group_scales", "offset")
    tensors = [t for name in fields for t in three([getattr(weight, name) for weight in weights], x)]
    return [x.view(torch.int32), *tensors, weights[0].code]


def _nf4_options(x: Tensor, parts: list[Part]) -> dict[str, bool]:
    nested = any(isinstance(part.weight, Nf4Weight) and len(part.weight.scale_code) > 0 for part in parts)
    return {"BF16": x.dtype == torch.bfloat16, "NESTED": nested, "PERMUTE": not interpreting()}
