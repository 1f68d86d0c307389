"""Attention of one query a row over pages, split along the tokens; see ``grpo_lit.kernels.paged_attention``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels._triton.launch import counters_for, device_limits, overlap, wait_for_previous
from grpo_lit.kernels.dispatch import interpreting


@triton.jit
def _attend_kernel(  # type: ignore[no-untyped-def]
    q,
    k_pages,
    v_pages,
    page_table,
    lengths,
    out,
    partial,
    stats,
    counters,
    scale,
    table_width,
    kv_heads,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    TABLE: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the heads of a group over its share of a row's blocks of BLOCK tokens.

    The last of a row's and group's programs to finish joins what all of them found.
    """
    row, kv, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    wait_for_previous(PDL)
    length = tl.load(lengths + row)
    if TABLE > 0:  # the row's whole table, so that no read waits for another to know its page
        entry = tl.arange(0, TABLE)
        table = tl.load(page_table + row * table_width + entry, mask=entry < table_width, other=0)
    blocks = (length + BLOCK - 1) // BLOCK
    each = tl.maximum((blocks + SPLITS - 1) // SPLITS, 1)
    busy = tl.maximum((blocks + each - 1) // each, 1)
    if split < busy:
        member = tl.arange(0, GROUP_PADDED)
        lane = tl.arange(0, WIDTH_PADDED)
        token = tl.arange(0, BLOCK)
        head = (row * kv_heads + kv) * GROUP + member  # among all rows' query heads
        real = (member[:, None] < GROUP) & (lane[None, :] < WIDTH)
        query = tl.load(q + head[:, None] * WIDTH + lane[None, :], mask=real, other=0.0)
        if WIDEN:
            query = query.to(tl.float32)
        top = tl.full((GROUP_PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_PADDED,), tl.float32)
        mixed = tl.zeros((GROUP_PADDED, WIDTH_PADDED), tl.float32)
        for block in range(split * each, tl.minimum((split + 1) * each, blocks)):
            if TABLE > 0:
                page = tl.sum(tl.where(entry == block * BLOCK // PAGE, table, 0), 0).to(tl.int64)
            else:
                page = tl.load(page_table + row * table_width + block * BLOCK // PAGE).to(tl.int64)
            slot = (page * kv_heads + kv) * PAGE + (block * BLOCK) % PAGE + token
            left = length - block * BLOCK
            there = (token[:, None] < left) & (lane[None, :] < WIDTH)
            cell = slot[:, None] * WIDTH + lane[None, :]
            keys = tl.load(k_pages + cell, mask=there, other=0.0)
            values = tl.load(v_pages + cell, mask=there, other=0.0)
            if WIDEN:  # the interpreter has no 16-bit products
                keys, values = keys.to(tl.float32), values.to(tl.float32)
            scores = tl.dot(query, keys.T, input_precision=PRECISION) * scale
            scores = tl.where(token[None, :] < left, scores, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            shares = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.sum(shares, 1)
            mixed = mixed * shrink[:, None] + tl.dot(shares.to(values.dtype), values, input_precision=PRECISION)
            top = higher
        if busy == 1:
            mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
            tl.store(out + head[:, None] * WIDTH + lane[None, :], mixed.to(out.dtype.element_ty), mask=real)
        else:
            at = head * SPLITS + split
            tl.store(partial + at[:, None] * WIDTH + lane[None, :], mixed, mask=real)
            tl.store(stats + at * 2, top, mask=member < GROUP)
            tl.store(stats + at * 2 + 1, total, mask=member < GROUP)
            tl.debug_barrier()  # the whole program has written before it counts as arrived
            if tl.atomic_add(counters + row * kv_heads + kv, 1, sem="acq_rel") == busy - 1:
                tl.debug_barrier()
                part = tl.arange(0, SPLITS)
                known = (member[:, None] < GROUP) & (part[None, :] < busy)
                every = head[:, None] * SPLITS + part[None, :]
                tops = tl.load(stats + every * 2, mask=known, other=float("-inf"), cache_modifier=".cg")
                totals = tl.load(stats + every * 2 + 1, mask=known, other=0.0, cache_modifier=".cg")
                top = tl.where(member < GROUP, tl.max(tops, 1), 0.0)
                total = tl.sum(totals * tl.exp2(tops - top[:, None]), 1)
                mixed = tl.zeros((GROUP_PADDED, WIDTH_PADDED), tl.float32)
                for first in range(0, busy, 4):  # four at a time, so that their reads overlap
                    for i in tl.static_range(4):
                        some = head * SPLITS + first + i
                        there = member < tl.where(first + i < busy, GROUP, 0)
                        weight = tl.load(stats + some * 2, mask=there, other=float("-inf"), cache_modifier=".cg")
                        value = tl.load(
                            partial + some[:, None] * WIDTH + lane[None, :],
                            mask=there[:, None] & (lane[None, :] < WIDTH),
                            other=0.0,
                            cache_modifier=".cg",
                        )
                        mixed += value * tl.exp2(weight - top)[:, None]
                mixed = mixed / tl.where(total > 0.0, total, 1.0)[:, None]
                tl.store(out + head[:, None] * WIDTH + lane[None, :], mixed.to(out.dtype.element_ty), mask=real)
                tl.store(counters + row * kv_heads + kv, 0)


def default_splits(rows: int, kv_heads: int, max_blocks: int, multiprocessors: int = 132) -> int:
    """Programs a row and group: a power of 2, about two a multiprocessor in all, about two blocks each at the end."""
    wanted = max(1, 2 * multiprocessors // (rows * kv_heads))
    return min(1 << (wanted.bit_length() - 1), max(1, int(triton.next_power_of_2(max_blocks)) // 2), 32)


def attend(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    splits: int | None = None,
    block: int = 64,
    num_warps: int = 4,
    num_stages: int = 2,
) -> Tensor:
    """(R, Hq, D); ``splits`` programs at most work on a row and group, each over blocks of ``block`` tokens."""
    q, page_table = q.contiguous(), page_table.contiguous()
    rows, heads, width = q.shape
    kv_heads, page = k_pages.shape[1:3]
    assert k_pages.is_contiguous()
    assert v_pages.is_contiguous()
    out = torch.empty_like(q)
    if not rows:
        return out
    exact = q.dtype == torch.float32
    block = min(block, 32) if exact else block
    max_blocks = page_table.shape[1] * page // block
    splits = splits or default_splits(rows, kv_heads, max_blocks, device_limits(q.device).multiprocessors)
    partial = q.new_empty(rows * heads * splits * width if splits > 1 else 1, dtype=torch.float32)
    stats = q.new_empty(rows * heads * splits * 2 if splits > 1 else 1, dtype=torch.float32)
    _attend_kernel[(rows, kv_heads, splits)](
        q,
        k_pages,
        v_pages,
        page_table,
        lengths,
        out,
        partial,
        stats,
        counters_for(rows * kv_heads, q.device),
        scale * 1.4426950408889634,  # powers of 2 from here on
        page_table.shape[1],
        kv_heads,
        GROUP=heads // kv_heads,
        GROUP_PADDED=max(16, triton.next_power_of_2(heads // kv_heads)),
        WIDTH=width,
        WIDTH_PADDED=max(16, triton.next_power_of_2(width)),
        PAGE=page,
        BLOCK=block,
        SPLITS=splits,
        TABLE=triton.next_power_of_2(page_table.shape[1]) if page_table.shape[1] <= 32 else 0,
        PRECISION="ieee" if exact else "tf32",
        WIDEN=interpreting(),
        num_warps=num_warps,
        num_stages=num_stages,
        **overlap(q),
    )
    return out
