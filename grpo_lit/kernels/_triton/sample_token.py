"""Inverse-CDF sampling by blocks of the vocabulary; see ``grpo_lit.kernels.sample_token``.

The first kernel leaves each block's maximum and sum of exponentials; the second, a program a row, finds the block
in which the cumulative sum passes the target and looks for the token in that block alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels._triton.launch import overlap, wait_for_previous

_BLOCK = 2048  # not by the number of rows: a row's draw must not depend on its company


@triton.jit
def _scores(logits, row, column, vocab, divisor):  # type: ignore[no-untyped-def]
    x = tl.load(logits + row.to(tl.int64) * vocab + column, mask=column < vocab, other=float("-inf"))
    return x.to(tl.float32) / divisor


@triton.jit
def _summaries_kernel(  # type: ignore[no-untyped-def]
    logits, tops, sums, vocab, divisor, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row, block = tl.program_id(0), tl.program_id(1)
    wait_for_previous(PDL)
    x = _scores(logits, row, block * BLOCK + tl.arange(0, BLOCK), vocab, divisor)
    top = tl.max(x, 0)
    total = tl.sum(tl.exp(x - tl.where(top == float("-inf"), 0.0, top)).to(tl.float64), 0)
    tl.store(tops + row * blocks + block, top)
    tl.store(sums + row * blocks + block, total)


@triton.jit
def _choose_kernel(  # type: ignore[no-untyped-def]
    logits,
    tops,
    sums,
    uniform,
    ids,
    logprobs,
    vocab,
    divisor,
    blocks,
    GREEDY: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    wait_for_previous(PDL)
    number = tl.arange(0, BLOCKS)
    known = number < blocks
    block_tops = tl.load(tops + row * blocks + number, mask=known, other=float("-inf"))
    block_sums = tl.load(sums + row * blocks + number, mask=known, other=0.0)
    top = tl.max(block_tops, 0)
    block_sums *= tl.exp(block_tops - top).to(tl.float64)
    total = tl.sum(block_sums, 0)
    lane = tl.arange(0, BLOCK)
    if GREEDY:
        block = tl.min(tl.where(block_tops == top, number, BLOCKS), 0)
        block = tl.minimum(block, blocks - 1)
        x = _scores(logits, row, block * BLOCK + lane, vocab, divisor)
        chosen = tl.min(tl.where(x == top, lane, BLOCK), 0)
    else:
        target = tl.load(uniform + row) * total
        cumulative = tl.cumsum(block_sums, 0)
        # u total may round up to the total: then it is the last block, and in it the last token, that has any
        last = tl.max(tl.where(block_sums > 0.0, number, 0), 0)
        block = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), 0), last)
        before = tl.sum(tl.where(number < block, block_sums, 0.0), 0)
        x = _scores(logits, row, block * BLOCK + lane, vocab, divisor)
        inner = tl.max(x, 0)
        shares = tl.exp(x - inner).to(tl.float64) * tl.exp(inner - top).to(tl.float64)
        passed = (tl.cumsum(shares, 0) + before <= target).to(tl.int32)
        chosen = tl.minimum(tl.sum(passed, 0), tl.max(tl.where(shares > 0.0, lane, 0), 0))
    token = tl.minimum(block * BLOCK + chosen, vocab - 1)
    score = tl.load(logits + row.to(tl.int64) * vocab + token).to(tl.float32) / divisor
    tl.store(ids + row, token.to(tl.int64))
    tl.store(logprobs + row, score - top - tl.log(total).to(tl.float32))


def sample(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(ids, logprobs) of logits (R, V)."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    ids = torch.empty(rows, dtype=torch.long, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return ids, logprobs
    blocks = triton.cdiv(vocab, _BLOCK)
    tops = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
    divisor, launch = float(temperature or 1.0), overlap(logits)
    _summaries_kernel[(rows, blocks)](logits, tops, sums, vocab, divisor, blocks, BLOCK=_BLOCK, num_warps=4, **launch)
    _choose_kernel[(rows,)](
        logits,
        tops,
        sums,
        uniform,
        ids,
        logprobs,
        vocab,
        divisor,
        blocks,
        GREEDY=temperature == 0,
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=_BLOCK,
        num_warps=8,
        **launch,
    )
    return ids, logprobs
