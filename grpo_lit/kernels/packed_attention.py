"""Causal attention over sequences laid end to end, without padding and without a mask.

Token i of a sequence sees tokens 0 to i of the same sequence: out_i = sum_j softmax_j(scale q_i . k_j) v_j. Query
heads share key heads in equal groups. On CUDA in 16 bits this is torch's FlashAttention-2 (2307.08691) for
sequences of different lengths, which keeps one number a token and head for the backward; elsewhere it is torch's
attention, a sequence at a time, recomputed in the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Sequences(NamedTuple):
    """Where sequences start in a row of tokens.

    Attributes:
        starts: (count + 1,) int32, first token of each, and the total.
        lengths: tokens of each, on the host.
    """

    starts: Tensor
    lengths: list[int]

    @staticmethod
    def of(lengths: list[int], device: torch.device) -> Sequences:
        """Sequences of these lengths, in this order."""
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        return Sequences(ends.to(device, non_blocking=True), lengths)


def flashes(q: Tensor) -> bool:
    """Whether queries (rows, Hq, D) like these go through FlashAttention, which reads the starts on the device."""
    return (
        q.is_cuda
        and torch.version.hip is None
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    )


def packed_attention(q: Tensor, k: Tensor, v: Tensor, where: Sequences, scale: float) -> tuple[Tensor, list[Tensor]]:
    """(rows, Hq, D) attention of q (rows, Hq, D), k and v (rows, Hkv, D), and what the backward wants of it."""
    if not flashes(q):
        return torch.cat(list(_each(q, k, v, where, scale))), []
    longest = max(where.lengths)
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        q, k, v, where.starts, where.starts, longest, longest, 0.0, True, False, scale=scale
    )
    return out, [lse, rng, unused]


def packed_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: list[Tensor], where: Sequences, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; ``out`` and ``kept`` as `packed_attention` gave them."""
    if kept:
        lse, rng, unused = kept
        longest = max(where.lengths)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, where.starts, where.starts, longest, longest, 0.0, True, rng, unused, scale=scale
        )
        return dq, dk, dv
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    with torch.enable_grad():
        again = torch.cat(list(_each(q, k, v, where, scale)))
    dq, dk, dv = torch.autograd.grad(again, (q, k, v), dout)
    return dq, dk, dv


def _each(q: Tensor, k: Tensor, v: Tensor, where: Sequences, scale: float) -> Iterator[Tensor]:
    """The sequences one by one, through torch's attention."""
    parts = zip(*(t.transpose(0, 1).split(where.lengths, dim=1) for t in (q, k, v)), strict=True)
    for queries, keys, values in parts:
        out = scaled_dot_product_attention(
            queries[None], keys[None], values[None], is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        yield out[0].transpose(0, 1)
