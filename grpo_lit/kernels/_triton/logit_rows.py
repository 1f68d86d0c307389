"""Rows of logits in, loss / log-prob / entropy and the logits' gradient out: one read and one write of the row.

A row is cut into blocks, one program each. A program keeps its block in registers, publishes the block's
(maximum, normaliser, entropy sum), waits until the whole row has published, merges all the triples as in
online softmax (1805.02867), and writes its block of the gradient. So a row of any length is read once, while
a program per row has to read it twice or hold it in shared memory.

Waiting is safe because blocks of a row are consecutive programs and programs start in the order of their
index (what the single-pass scan of CUB rests on too): the unfinished row with the lowest index always has all
its programs on the device, as long as a row has fewer blocks than the device runs at a time. Where that can't be
promised (the interpreter, ROCm, a tiny device), the same kernel runs twice: publish, then finish.

The softmax works on differences to the maximum, scaled by log2(e) / temperature for ``exp2``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels._triton.math import tanh, token_terms
from grpo_lit.kernels.dispatch import interpreting
from grpo_lit.kernels.token_terms import TokenScalars

_LN2 = tl.constexpr(0.6931471805599453)
_LOG2E = 1.4426950408889634
_BOTH, _PUBLISH, _FINISH = 0, 1, 2


class Plan(NamedTuple):
    """How a row is cut.

    Attributes:
        block: elements of the row that one program holds.
        num_warps: its warps.
        reload: read the block a second time (from the second-level cache) instead of keeping it in registers.
        registers: most registers a thread may take, None to leave it to the compiler.
    """

    block: int
    num_warps: int
    reload: bool = False
    registers: int | None = None


@triton.jit
def _merged(peaks_at, sums_at, tilts_at, num_blocks, scale, PAD: tl.constexpr, ENTROPY: tl.constexpr):  # type: ignore[no-untyped-def]
    """(maximum, normaliser, entropy sum) of a row from its blocks' triples."""
    index = tl.arange(0, PAD)
    inside = index < num_blocks
    # .cg: these were written by other multiprocessors a moment ago, the first-level cache may be stale
    peaks = tl.load(peaks_at + index, mask=inside, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(sums_at + index, mask=inside, other=0.0, cache_modifier=".cg")
    peak = tl.max(peaks, 0)
    gap = tl.where(sums > 0.0, (peaks - peak) * scale, 0.0)
    share = tl.where(sums > 0.0, tl.exp2(gap), 0.0)
    tilt = 0.0
    if ENTROPY:
        tilts = tl.load(tilts_at + index, mask=inside, other=0.0, cache_modifier=".cg")
        tilt = tl.sum((tilts + gap * sums) * share, 0)
    return peak, tl.sum(sums * share, 0), tilt


@triton.jit
def _logit_rows_kernel(  # type: ignore[no-untyped-def]
    logits,
    grad,
    ids,
    old,
    advantages,
    weights,
    ref,
    dlogprobs,
    dentropy,
    loss_out,
    logprob_out,
    entropy_out,
    peaks,
    sums,
    tilts,
    picked,
    arrived,
    num_blocks,
    steps,
    vocab,
    width,
    stride_n,
    stride_t,
    grad_stride_n,
    grad_stride_t,
    inv_temperature,
    softcap,
    epsilon_low,
    epsilon_high,
    delta,
    beta,
    entropy_coef,
    cispo_cap,
    BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    PHASE: tl.constexpr,
    LOSS: tl.constexpr,
    GIVEN: tl.constexpr,
    GIVEN_ENTROPY: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_REF: tl.constexpr,
    ENTROPY: tl.constexpr,
    ENTROPY_BONUS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CISPO: tl.constexpr,
    WRITE: tl.constexpr,
    SINGLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    SAME_LAYOUT: tl.constexpr,
    EVEN: tl.constexpr,
    VEC: tl.constexpr,
    RELOAD: tl.constexpr,
):
    pid = tl.program_id(0)
    row = pid // num_blocks
    block = pid % num_blocks
    first = (row // steps).to(tl.int64) * stride_n + (row % steps).to(tl.int64) * stride_t
    lane = tl.arange(0, BLOCK)
    # Rows that start off a 16-byte boundary are read from the boundary below, so that loads stay 16 bytes wide.
    shift = 0
    if not ALIGNED:
        shift = (first % VEC).to(tl.int32)
        first = tl.multiple_of(first - shift, VEC)
    begin = block * BLOCK
    column = begin + lane - shift  # (BLOCK,) vocabulary index, negative before the row
    source = logits + first + begin + lane
    if SAME_LAYOUT:
        target = grad + first + begin + lane
    else:
        out_first = (row // steps).to(tl.int64) * grad_stride_n + (row % steps).to(tl.int64) * grad_stride_t
        target = grad + out_first + column
    whole = (begin >= shift) & (begin + BLOCK - shift <= vocab)

    weight = 1.0
    upstream = 0.0
    upstream_entropy = 0.0
    live = True
    if LOSS:
        weight = tl.load(weights + row)
        live = weight != 0.0
    if GIVEN:
        upstream = tl.load(dlogprobs + row)
        live = upstream != 0.0
        if GIVEN_ENTROPY:
            upstream_entropy = tl.load(dentropy + row)
            live = live | (upstream_entropy != 0.0)

    if live:
        scale = inv_temperature * 1.4426950408889634
        chosen = tl.load(ids + row).to(tl.int32)
        spot = chosen + shift - begin
        owner = (spot >= 0) & (spot < BLOCK)
        # Before the first barrier: in place, this element is overwritten soon after the last one.
        x_chosen = tl.load(logits + first + begin + spot, mask=owner, other=0.0).to(tl.float32)
        if SOFTCAP:
            x_chosen = softcap * tanh(x_chosen / softcap)
        x, slope = _read(source, column, whole, vocab, softcap, EVEN, SOFTCAP)
        peak_here = tl.max(x, 0)
        reference = tl.where(peak_here == float("-inf"), 0.0, peak_here)
        power = tl.exp2((x - reference) * scale)  # (BLOCK,) e^(x - peak), 0 outside the row

        if PHASE != 2:
            total_here = tl.sum(power, 0)
            tilt_here = 0.0
            if ENTROPY:
                tilt_here = tl.sum(tl.where(power > 0.0, power * ((x - reference) * scale), 0.0), 0)
            if SINGLE:
                peak, total, tilt = peak_here, total_here, tilt_here
            else:
                # stored and announced by the same thread, so the announcement releases the stores
                tl.store(peaks + pid, peak_here)
                tl.store(sums + pid, total_here)
                if ENTROPY:
                    tl.store(tilts + pid, tilt_here)
                tl.store(picked + row, x_chosen, mask=owner)

        last = True
        if (not SINGLE) and PHASE == 0:
            count = tl.atomic_add(arrived + row, 1, sem="acq_rel") + 1
            if WRITE:
                while count < num_blocks:
                    count = tl.atomic_add(arrived + row, 0, sem="acquire")
            else:
                last = count == num_blocks
        if PHASE == 2 and (not WRITE):
            last = block == 0
        if PHASE != 1 and last:
            if not SINGLE:
                triples = row * num_blocks
                peak, total, tilt = _merged(
                    peaks + triples, sums + triples, tilts + triples, num_blocks, scale, PAD, ENTROPY
                )
                x_chosen = tl.load(picked + row, cache_modifier=".cg")
            log2_total = tl.log2(total)
            logp = ((x_chosen - peak) * scale - log2_total) * _LN2
            entropy = 0.0
            if ENTROPY:
                entropy = (log2_total - tilt / total) * _LN2
            loss = 0.0
            slope_logp = upstream
            slope_entropy = upstream_entropy
            if LOSS:
                before = logp
                if HAS_OLD:
                    before = tl.load(old + row)
                other = 0.0
                if HAS_REF:
                    other = tl.load(ref + row)
                advantage = tl.load(advantages + row)
                loss, slope_logp = token_terms(
                    logp,
                    before,
                    advantage,
                    weight,
                    other,
                    epsilon_low,
                    epsilon_high,
                    delta,
                    beta,
                    cispo_cap,
                    CISPO,
                    HAS_REF,
                )
                if ENTROPY_BONUS:
                    loss -= weight * entropy_coef * entropy
                    slope_entropy = -weight * entropy_coef
            if (block == 0) | (not WRITE):
                if LOSS:
                    tl.store(loss_out + row, loss)
                tl.store(logprob_out + row, logp)
                if ENTROPY:
                    tl.store(entropy_out + row, entropy)
            if WRITE:
                if RELOAD:
                    x, slope = _read(source, column, whole, vocab, softcap, EVEN, SOFTCAP)
                    power = tl.exp2((x - reference) * scale)
                p = power * (tl.exp2((reference - peak) * scale) / total)
                dx = -slope_logp * p
                if GIVEN_ENTROPY or ENTROPY_BONUS:
                    log_p = ((x - peak) * scale - log2_total) * _LN2
                    dx -= tl.where(p > 0.0, slope_entropy * p * (log_p + entropy), 0.0)
                dx += tl.where(column == chosen, slope_logp, 0.0)
                dx *= inv_temperature
                if SOFTCAP:
                    dx *= slope
                _write(target, dx, column, begin, shift, width, BLOCK, EVEN)
    else:
        if PHASE != 1:
            if block == 0:
                if LOSS:
                    tl.store(loss_out + row, 0.0)
                tl.store(logprob_out + row, 0.0)
                if ENTROPY:
                    tl.store(entropy_out + row, 0.0)
            if WRITE:
                _write(target, tl.zeros((BLOCK,), tl.float32), column, begin, shift, width, BLOCK, EVEN)


@triton.jit
def _read(source, column, whole, vocab, softcap, EVEN: tl.constexpr, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(x, dx/dz up to the temperature) of a block in float32; -inf outside the row's vocabulary."""
    inside = (column >= 0) & (column < vocab)
    if EVEN:
        raw = tl.load(source, mask=inside, other=float("-inf"))
    else:
        # A mask whose edge isn't on a boundary would make every load of the block narrow.
        if whole:
            raw = tl.load(source)
        else:
            raw = tl.load(source, mask=inside, other=float("-inf"))
    x = raw.to(tl.float32)
    slope = 1.0
    if SOFTCAP:
        squashed = tanh(x / softcap)
        slope = 1.0 - squashed * squashed
        x = tl.where(inside, softcap * squashed, float("-inf"))
    return x, slope


@triton.jit
def _write(target, values, column, begin, shift, width, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a block of the gradient, the padded columns of the row included, nothing outside the row."""
    values = values.to(target.dtype.element_ty)
    inside = (column >= 0) & (column < width)
    if EVEN:
        tl.store(target, values, mask=inside)
    else:
        if (begin >= shift) & (begin + BLOCK - shift <= width):
            tl.store(target, values)
        else:
            tl.store(target, values, mask=inside)


def default_plan(width: int, element_size: int) -> Plan:
    """Block and warps for rows of ``width`` logits; sizes from sweeps on one H200."""
    block = min(8192, max(128, triton.next_power_of_2(width)))
    return Plan(block, num_warps=max(1, min(8, block // 1024)))


def waits_safely(num_blocks: int, device: torch.device) -> bool:
    """Whether a row's programs may wait for each other, see the module docstring."""
    if interpreting() or device.type != "cuda" or torch.version.hip is not None:
        return False
    # at least one program a multiprocessor; halved for a second stream doing the same
    return num_blocks <= torch.cuda.get_device_properties(device).multi_processor_count // 2


def logit_rows(
    logits: Tensor,
    ids: Tensor,
    *,
    grad: Tensor | None,
    old: Tensor | None,
    advantages: Tensor | None,
    weights: Tensor | None,
    ref: Tensor | None,
    dlogprobs: Tensor | None,
    dentropy: Tensor | None,
    scalars: TokenScalars,
    temperature: float,
    softcap: float,
    vocab_size: int,
    want_entropy: bool,
    plan: Plan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, logprob, entropy) per row, float32, and the logits' gradient written to ``grad`` where given.

    Arguments as in ``grpo_lit.kernels.logit_rows``; ``logits`` and ``grad`` are (N, T, V) with contiguous rows
    and may be the same tensor.
    """
    count, steps, width = logits.shape
    rows = count * steps
    plan = plan or default_plan(width, logits.element_size())
    vec = 16 // logits.element_size()
    aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0 and logits.stride(1) % 16 == 0
    num_blocks = triton.cdiv(width if aligned else width + vec - 1, plan.block)
    out = logits if grad is None else grad
    same = out.stride() == logits.stride() and out.data_ptr() % 16 == logits.data_ptr() % 16 == 0
    bonus = weights is not None and scalars.entropy_coef != 0
    entropy_used = want_entropy or bonus or dentropy is not None

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    loss = empty(rows if weights is not None else 0)
    logprob, entropy = empty(rows), empty(rows if entropy_used else 0)
    if rows == 0:
        return loss, logprob, entropy
    single = num_blocks == 1
    triples = empty(3, 0 if single else rows * num_blocks)
    picked = empty(0 if single else rows)
    waits = single or waits_safely(num_blocks, logits.device)
    arrived = torch.zeros(0 if single or not waits else rows, dtype=torch.int32, device=logits.device)
    limit = {} if plan.registers is None or interpreting() else {"maxnreg": plan.registers}
    for phase in (_BOTH,) if waits else (_PUBLISH, _FINISH):
        _logit_rows_kernel[(rows * num_blocks,)](
            logits,
            out,
            ids,
            old,
            advantages,
            weights,
            ref,
            dlogprobs,
            dentropy,
            loss,
            logprob,
            entropy,
            triples[0],
            triples[1],
            triples[2],
            picked,
            arrived,
            num_blocks,
            steps,
            vocab_size,
            width,
            logits.stride(0),
            logits.stride(1),
            out.stride(0),
            out.stride(1),
            1.0 / temperature,
            softcap,
            scalars.epsilon_low,
            scalars.epsilon_high,
            scalars.delta,
            scalars.beta,
            scalars.entropy_coef,
            scalars.cispo_cap,
            BLOCK=plan.block,
            PAD=triton.next_power_of_2(num_blocks),
            PHASE=phase,
            LOSS=weights is not None,
            GIVEN=dlogprobs is not None,
            GIVEN_ENTROPY=dentropy is not None,
            HAS_OLD=old is not None,
            HAS_REF=ref is not None,
            ENTROPY=entropy_used,
            ENTROPY_BONUS=bonus,
            SOFTCAP=softcap != 0,
            CISPO=scalars.cispo,
            WRITE=grad is not None,
            SINGLE=single,
            ALIGNED=aligned,
            SAME_LAYOUT=same,
            EVEN=aligned and vocab_size % 16 == 0 and width % 16 == 0,
            VEC=vec,
            RELOAD=plan.reload,
            num_warps=plan.num_warps,
            **limit,
        )
    return loss, logprob, entropy
