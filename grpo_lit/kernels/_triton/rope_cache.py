"""Norm and rotation of a head a program, and the cache's new entries; see ``grpo_lit.kernels.rope_cache``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels._triton.launch import overlap, wait_for_previous


@triton.jit
def _rope_cache_kernel(  # type: ignore[no-untyped-def]
    qkv,
    q,
    k_pages,
    v_pages,
    page_table,
    positions,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    table_width,
    q_heads,
    kv_heads,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    ROTATE: tl.constexpr,
    PER_ROW: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, HALF)
    inside = lane < WIDTH // 2
    wait_for_previous(PDL)
    position = tl.load(positions + row)
    source = qkv + (row * (q_heads + 2 * kv_heads) + head) * WIDTH + lane
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + WIDTH // 2, mask=inside, other=0.0)
    at = tl.maximum(position, 0)
    page = tl.load(page_table + row * table_width + at // PAGE).to(tl.int64)
    if head < q_heads + kv_heads:
        a, b = low.to(tl.float32), high.to(tl.float32)
        if Q_NORM or K_NORM:
            is_q = head < q_heads
            rstd = tl.rsqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / WIDTH + eps)
            if Q_NORM:
                a = tl.where(is_q, a * rstd * tl.load(q_norm + lane, mask=inside, other=0.0).to(tl.float32), a)
                weight = tl.load(q_norm + WIDTH // 2 + lane, mask=inside, other=0.0).to(tl.float32)
                b = tl.where(is_q, b * rstd * weight, b)
            if K_NORM:
                a = tl.where(is_q, a, a * rstd * tl.load(k_norm + lane, mask=inside, other=0.0).to(tl.float32))
                weight = tl.load(k_norm + WIDTH // 2 + lane, mask=inside, other=0.0).to(tl.float32)
                b = tl.where(is_q, b, b * rstd * weight)
        if ROTATE:
            turn = (row if PER_ROW else at.to(tl.int64)) * WIDTH + lane
            c = tl.load(cos + turn, mask=inside, other=0.0).to(tl.float32)
            s = tl.load(sin + turn, mask=inside, other=0.0).to(tl.float32)
            c_high = tl.load(cos + turn + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
            s_high = tl.load(sin + turn + WIDTH // 2, mask=inside, other=0.0).to(tl.float32)
            a, b = a * c - b * s, b * c_high + a * s_high
        low, high = a.to(qkv.dtype.element_ty), b.to(qkv.dtype.element_ty)
    slot = (page * kv_heads * PAGE + at % PAGE) * WIDTH
    if head < q_heads:
        target = q + (row * q_heads + head) * WIDTH
        there = inside
    elif head < q_heads + kv_heads:
        target = k_pages + slot + (head - q_heads) * PAGE * WIDTH
        there = lane < tl.where(position >= 0, WIDTH // 2, 0)
    else:
        target = v_pages + slot + (head - q_heads - kv_heads) * PAGE * WIDTH
        there = lane < tl.where(position >= 0, WIDTH // 2, 0)
    tl.store(target + lane, low, mask=there)
    tl.store(target + WIDTH // 2 + lane, high, mask=there)


def rope_and_store(
    qkv: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """q (R, Hq, D); writes k and v in place."""
    qkv, page_table = qkv.contiguous(), page_table.contiguous()
    rows, kv_heads, page, width = len(qkv), *k_pages.shape[1:]
    assert width % 2 == 0, width
    assert k_pages.is_contiguous()
    assert v_pages.is_contiguous()
    q = qkv.new_empty(rows, num_heads, width)
    if rows:
        _rope_cache_kernel[(rows, num_heads + 2 * kv_heads)](
            qkv,
            q,
            k_pages,
            v_pages,
            page_table,
            positions,
            None if cos is None else cos.contiguous(),
            None if sin is None else sin.contiguous(),
            q_norm,
            k_norm,
            eps,
            page_table.shape[1],
            num_heads,
            kv_heads,
            PAGE=page,
            WIDTH=width,
            HALF=triton.next_power_of_2(width // 2),
            ROTATE=cos is not None,
            PER_ROW=cos is not None and cos.dim() == 3,
            Q_NORM=q_norm is not None,
            K_NORM=k_norm is not None,
            num_warps=1,
            **overlap(qkv),
        )
    return q
