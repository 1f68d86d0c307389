"""What lies between a decode step's query-key-value product and its attention, in one pass.

Of each row's product (q, k, v): RMS norm of every query and key head (Qwen3 has it), rotary position (RoFormer,
2104.09864, in the halves layout of Llama and Qwen), and the new key and value into the row's page of the cache::

    n(u) = u / sqrt(mean(u^2) + eps) g,    rotate(u) = u cos(p) + (-u[D/2:], u[:D/2]) sin(p)
    q' = rotate(n(q)),    k_pages[page, :, slot] = rotate(n(k)),    v_pages[page, :, slot] = v

with p = positions[r], page = page_table[r, p // PAGE] and slot = p % PAGE.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels.dispatch import resolve_impl
from grpo_lit.kernels.paged_attention import PAGE, check_pages
from grpo_lit.kernels.rms_norm import rms_norm_reference


@torch.no_grad()
def rope_cache(
    qkv: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    positions: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    impl: str | None = None,
) -> Tensor:
    """Rotated queries of R new tokens; their keys and values go into the cache in place. No gradient flows.

    Args:
        qkv: (R, (Hq + 2 Hkv) D), contiguous: all query heads, then the key heads, then the value heads.
        k_pages: (num_pages, Hkv, PAGE, D), written at the positions; in the dtype of ``qkv``.
        v_pages: as ``k_pages``.
        page_table: (R, P) int32 page numbers.
        positions: (R,) int32, position of each row's new token; below 0 nothing is written, and the row's ``q``
            means nothing. No two rows may write the same slot.
        num_heads: Hq.
        num_kv_heads: Hkv.
        cos: (max_position, D) table indexed by position, or (R, 1, D) already picked for each row; None rotates
            nothing.
        sin: as ``cos``.
        q_norm: (D,) weight of the queries' RMS norm, or None for none.
        k_norm: (D,) weight of the keys' RMS norm, or None for none.
        eps: of both norms.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.

    Returns:
        q (R, Hq, D) in the dtype of ``qkv``.

    Raises:
        UserError: for shapes that don't fit, or only one of ``cos`` and ``sin``.
    """
    heads = num_heads + 2 * num_kv_heads
    if qkv.dim() != 2 or qkv.shape[1] % heads:
        raise UserError("qkv", tuple(qkv.shape), f"(R, {heads} heads of one width)")
    width = qkv.shape[1] // heads
    check_pages(k_pages, v_pages, page_table, rows=len(qkv), head_dim=width)
    if k_pages.shape[1] != num_kv_heads:
        raise UserError("num_kv_heads", num_kv_heads, f"{k_pages.shape[1]}, the heads of k_pages")
    if positions.shape != qkv.shape[:1]:
        raise UserError("positions", tuple(positions.shape), f"({len(qkv)},)")
    if (cos is None) != (sin is None):
        raise UserError("cos", "given" if cos is not None else None, "cos and sin together, or neither")
    for name, table in (("cos", cos), ("sin", sin)):
        per_row = table is not None and table.dim() == 3 and table.shape == (len(qkv), 1, width)
        if table is not None and not per_row and (table.dim() != 2 or table.shape[1] != width):
            raise UserError(name, tuple(table.shape), f"(max_position, {width}) or ({len(qkv)}, 1, {width})")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None and weight.shape != (width,):
            raise UserError(name, tuple(weight.shape), f"({width},)")
    args = (qkv, k_pages, v_pages, page_table, positions, num_heads, cos, sin, q_norm, k_norm, eps)
    if resolve_impl("rope_cache", impl, qkv.device) == "triton":
        from grpo_lit.kernels._triton.rope_cache import rope_and_store

        return rope_and_store(*args)
    return _reference(*args)


def _reference(
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
    rows, kv_heads, width = len(qkv), k_pages.shape[1], k_pages.shape[3]
    q, k, v = qkv.view(rows, -1, width).split([num_heads, kv_heads, kv_heads], dim=1)
    written = positions >= 0
    at = positions.long().clamp(min=0)
    if q_norm is not None:
        q = rms_norm_reference(q, q_norm, eps)
    if k_norm is not None:
        k = rms_norm_reference(k, k_norm, eps)
    if cos is not None and sin is not None:
        turned_by = [t if t.dim() == 3 else t[at][:, None] for t in (cos, sin)]  # (R, 1, D)
        q, k = (_rotate(u, *(t.to(u.dtype) for t in turned_by)) for u in (q, k))
    page = page_table.gather(1, (at // PAGE)[:, None]).squeeze(1).long().clamp(0, len(k_pages) - 1)
    # Rows without a position must write nothing, and how many they are can't be asked in a graph: they repeat the
    # write of the first row that has one; if none has, all write what is there already.
    first = written.int().argmax()
    repeats = torch.where(written, torch.arange(rows, device=qkv.device), first)
    page, slot = page[repeats], (at % PAGE)[repeats]
    for pages, new in ((k_pages, k), (v_pages, v)):
        pages[page, :, slot] = torch.where(written.any(), new[repeats].to(pages.dtype), pages[page, :, slot])
    turned: Tensor = q.contiguous()
    return turned


def _rotate(u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """u (R, H, D) turned by (R, 1, D) angles; products and sum in the dtype of ``u``, as transformers does."""
    first, second = u.chunk(2, dim=-1)
    return u * cos + torch.cat((-second, first), dim=-1) * sin
