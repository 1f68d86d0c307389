"""Attention of one new token a row over a cache in pages: reads only what is filled, shares key-value heads.

With q (R, Hq, D), and keys and values of row r at positions 0 .. lengths[r] - 1::

    out[r, h] = sum_t softmax_t(scale q[r, h] . k[r, h // (Hq / Hkv), t]) v[r, h // (Hq / Hkv), t]

Position t of row r lies in page ``page_table[r, t // PAGE]``, slot ``t % PAGE``, so rows may share pages (the
prompt of a group, say). Grouped heads: 2305.13245. Pages: 2309.06180. The Triton version splits a row's pages
over several programs and joins their softmaxes (2311.01282), so that few long rows still fill the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels.dispatch import resolve_impl

PAGE = 64
"""Tokens of a page of the cache."""


@torch.no_grad()
def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    impl: str | None = None,
) -> Tensor:
    """Attention of R single queries over their rows' cached keys and values. No gradient flows.

    Args:
        q: (R, Hq, D), contiguous, rotated already.
        k_pages: (num_pages, Hkv, PAGE, D), in the dtype of ``q``; what isn't filled may hold anything.
        v_pages: as ``k_pages``.
        page_table: (R, P) int32 page numbers; entries beyond a row's length aren't read.
        lengths: (R,) int32, cached tokens of each row (the new one included), at most P PAGE; 0 gives zeros.
        scale: factor of the scores; None is D**-0.5.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.

    Returns:
        (R, Hq, D) in the dtype of ``q``.

    Raises:
        UserError: for shapes that don't fit.
    """
    check_pages(k_pages, v_pages, page_table, rows=len(q), head_dim=q.shape[-1])
    if q.dim() != 3 or q.shape[1] % k_pages.shape[1]:
        raise UserError("q", tuple(q.shape), f"(R, a multiple of {k_pages.shape[1]} heads, D)")
    if lengths.shape != q.shape[:1]:
        raise UserError("lengths", tuple(lengths.shape), f"({len(q)},)")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if resolve_impl("paged_attention", impl, q.device) == "triton":
        from grpo_lit.kernels._triton.paged_attention import attend

        return attend(q, k_pages, v_pages, page_table, lengths, scale)
    return _reference(q, k_pages, v_pages, page_table, lengths, scale)


def check_pages(k_pages: Tensor, v_pages: Tensor, page_table: Tensor, *, rows: int, head_dim: int) -> None:
    """Raises UserError unless pages and table fit each other, ``rows`` and ``head_dim``."""
    if k_pages.dim() != 4 or k_pages.shape[2:] != (PAGE, head_dim):
        raise UserError("k_pages", tuple(k_pages.shape), f"(num_pages, Hkv, {PAGE}, {head_dim})")
    if v_pages.shape != k_pages.shape:
        raise UserError("v_pages", tuple(v_pages.shape), f"the shape of k_pages, {tuple(k_pages.shape)}")
    if page_table.dim() != 2 or len(page_table) != rows:
        raise UserError("page_table", tuple(page_table.shape), f"({rows}, P)")


def _reference(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, scale: float
) -> Tensor:
    if not q.is_cuda and len(q):  # asking a GPU would stop a graph's capture
        page_table = page_table[:, : max(1, -(-int(lengths.max()) // PAGE))]
    rows, heads, width = q.shape
    kv_heads, tokens = k_pages.shape[1], page_table.shape[1] * PAGE
    filled = torch.arange(tokens, device=q.device) < lengths[:, None]  # (R, P PAGE)
    table = page_table.long().clamp(0, len(k_pages) - 1)
    keys = k_pages[table].transpose(1, 2).reshape(rows, kv_heads, tokens, width)
    values = v_pages[table].transpose(1, 2).reshape(rows, kv_heads, tokens, width)
    values = values.masked_fill(~filled[:, None, :, None], 0.0)  # 0 times what an unfilled slot holds may be nan
    grouped = q.view(rows, kv_heads, heads // kv_heads, width)
    scores = (grouped.float() @ keys.float().transpose(-1, -2)) * scale  # (R, Hkv, G, P PAGE)
    scores = scores.masked_fill(~filled[:, None, None], -torch.inf)
    shares = scores.softmax(dim=-1).masked_fill(~filled[:, None, None], 0.0)  # zeros where nothing is filled
    return (shares @ values.float()).to(q.dtype).view(rows, heads, width)
