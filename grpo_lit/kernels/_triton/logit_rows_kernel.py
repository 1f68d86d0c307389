"""Rows of logits in, loss / log-prob / entropy and the logits' gradient out: one read, one write.

A row is cut into blocks, one program each. A program keeps its block in registers, publishes the block's
(maximum, normaliser, entropy sum), waits until the whole row has published, merges the triples as in online
softmax (1805.02867), and writes its block of the gradient. So a row of any length is read once, while one
program a row has to read it twice or hold it in shared memory.

What a program publishes are 64-bit words: 32 bits of value and 32 bits that are 0 until the word is there. A
waiting program reads the words themselves, so nothing has to be ordered by a fence, and a round trip to the
second-level cache is all it costs. Nothing else passes between programs.

Waiting is safe because blocks of a row are consecutive programs and programs start in the order of their
index (what the single-pass scan of CUB rests on too): the unfinished row with the lowest index always has
all its programs on the device, as long as a row has fewer blocks than the device runs at a time. Where that
can't be promised (the interpreter, ROCm, a tiny device), the same kernel runs twice: publish, then finish.

Where the device can, the kernel starts while the words are still being cleared (``launch``): it reads its logits and
waits for the clearing only before it publishes.

Writing over the logits is safe because everything a program reads has arrived before it publishes, and no
program of the row writes before all have published.

In 16 bits arithmetic is the limit, not memory, so the inner loops count instructions: the maximum is taken on
pairs, the exponent is one fused multiply-add (x scale - c, with c = maximum x scale rounded once and used
everywhere, so its rounding cancels), and the chosen token's term is added to its one element afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grpo_lit.kernels._triton.launch import wait_for_previous
from grpo_lit.kernels._triton.math import token_terms
from grpo_lit.kernels._triton.row_parts import (
    activate,
    again,
    edges,
    halves,
    larger,
    merged,
    publishable,
    read_tile,
    write_tile,
)

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _gradient(raw, scale, base, flat, steep, softcap, TILT: tl.constexpr, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Gradient of logits ``raw``, float32, but for the chosen token's own term."""
    x, slope = activate(raw, softcap, SOFTCAP)
    y = x * scale - base
    dz = tl.exp2(y)
    if TILT:  # noqa: SIM108
        dz *= flat + steep * tl.maximum(y, -1e4)
    else:
        dz *= flat
    if SOFTCAP:
        dz *= slope
    return dz


@triton.jit(do_not_specialize=["rows", "row_step"])  # type: ignore[untyped-decorator]
def logit_rows_kernel(  # type: ignore[no-untyped-def]
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
    words,
    slots,
    nothing,
    num_blocks,
    rows,
    row_step,
    steps,
    advantage_steps,
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
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PAD: tl.constexpr,
    PHASE: tl.constexpr,
    LOSS: tl.constexpr,
    GIVEN: tl.constexpr,
    GIVEN_ENTROPY: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_REF: tl.constexpr,
    ENTROPY: tl.constexpr,
    WRITE_ENTROPY: tl.constexpr,
    ENTROPY_BONUS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CISPO: tl.constexpr,
    WRITE: tl.constexpr,
    ZEROS: tl.constexpr,
    SINGLE: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    SAME_LAYOUT: tl.constexpr,
    EVEN: tl.constexpr,
    PADDED: tl.constexpr,
    VEC: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
):
    pid = tl.program_id(0)
    # Not always in their own order: masked tokens come in runs, and a run of programs with nothing to do would leave
    # the memory idle.
    row = (pid // num_blocks) * row_step % rows
    block = pid % num_blocks
    begin = block * (TILE * TILES)
    if FLAT:
        first = row.to(tl.int64) * stride_t
        out_first = row.to(tl.int64) * grad_stride_t
    else:
        n = (row // steps).to(tl.int64)
        t = (row % steps).to(tl.int64)
        first = n * stride_n + t * stride_t
        out_first = n * grad_stride_n + t * grad_stride_t
    lane = tl.arange(0, TILE)
    # Rows that start off a 16-byte boundary are cut from the boundary below, so that loads stay 16 bytes
    # wide.
    shift = 0
    if not ALIGNED:
        shift = (first % VEC).to(tl.int32)
        first = tl.multiple_of(first - shift, VEC)
    source = logits + first + begin
    if SAME_LAYOUT:  # noqa: SIM108
        target = grad + first + begin
    else:
        target = grad + (out_first + begin - shift)
    # from here on, columns count from the first lane of this program
    vocab = vocab + shift - begin
    width = width + shift - begin
    shift -= begin

    chosen = tl.load(ids + row).to(tl.int32) + shift
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

    at_edge, in_edge = edges(shift, width, TILE * TILES, VEC)
    if live:
        scale = inv_temperature * 1.4426950408889634
        known = (chosen >= shift) & (chosen < vocab)
        raw_chosen = tl.load(source + chosen, mask=known, other=float("-inf"))
        if PHASE == 1 and block == 0:  # the second run may find this logit overwritten
            tl.store(words + (row + 1).to(tl.int64) * slots - 1, publishable(raw_chosen.to(tl.float32), scale))
        if PHASE == 2:
            raw_chosen, _ = halves(words + (row + 1).to(tl.int64) * slots - 1, known | True, False)
        x_chosen, slope_chosen = activate(raw_chosen, softcap, SOFTCAP)
        raw_edge = raw_chosen
        if not EVEN:
            raw_edge = tl.load(source + at_edge, mask=in_edge & (at_edge < vocab), other=float("-inf"))
        raws = ()  # type: ignore[var-annotated]
        for i in tl.static_range(TILES):
            raw = read_tile(source, lane + i * TILE, shift, vocab, width, EVEN, VEC)
            raws = raws + (raw,)  # type: ignore[assignment]
        if PADDED and not EVEN:  # once all are on their way
            tokens = ()  # type: ignore[var-annotated]
            # cast, as Triton 3.7's interpreter has no bfloat16 constants
            lowest = tl.full((), float("-inf"), tl.float32).to(logits.dtype.element_ty)
            for i in tl.static_range(TILES):
                tokens = tokens + (tl.where(lane + i * TILE < vocab, raws[i], lowest),)  # type: ignore[assignment]
            raws = tokens
        wait_for_previous(PDL)  # the words are cleared; all else that is read was there before that began
        top = raws[0]  # type: ignore[misc]
        for i in tl.static_range(1, TILES):
            top = larger(top, raws[i], PACKED)
        highest = tl.max(top.to(tl.float32), 0)
        if not EVEN:
            highest = tl.maximum(highest, tl.max(raw_edge.to(tl.float32), 0))
        peak, _ = activate(highest, softcap, SOFTCAP)
        # `nothing` is 0. Taken in here, the chosen logit has arrived in every thread before this one
        # publishes.
        peak = peak * scale + (x_chosen.to(tl.int32, bitcast=True) & nothing).to(tl.float32)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        sums = tl.zeros((TILE,), tl.float32)
        tilts = tl.zeros((TILE,), tl.float32)
        for i in tl.static_range(TILES):
            x, _ = activate(again(raws[i], nothing, PACKED), softcap, SOFTCAP)
            power = tl.exp2(x * scale - base)
            sums += power
            if ENTROPY:
                tilts += power * tl.maximum(x * scale - base, -1e4)
        total = tl.sum(sums, 0)
        tilt = 0.0
        if ENTROPY:
            tilt = tl.sum(tilts, 0)
        if not EVEN:
            x, _ = activate(raw_edge, softcap, SOFTCAP)
            power = tl.exp2(x * scale - base)
            total += tl.sum(power, 0)
            if ENTROPY:
                tilt += tl.sum(power * tl.maximum(x * scale - base, -1e4), 0)
        at = words
        if not SINGLE:
            at = words + row.to(tl.int64) * slots
            if PHASE != 2:
                # 1e-30: a block without a finite logit counts nothing, but must not look unpublished
                tl.atomic_xchg(at + block, publishable(peak, tl.maximum(total, 1e-30)), sem="relaxed")
                if ENTROPY:
                    one = tl.full((), 1.0, tl.float32)
                    tl.atomic_xchg(at + num_blocks + block, publishable(tilt, one), sem="relaxed")
        if PHASE != 1 and (WRITE or block == 0):
            advantage = 0.0
            before = 0.0
            other = 0.0
            if LOSS:  # asked for before the wait
                advantage = tl.load(advantages + row // advantage_steps)
                if HAS_OLD:
                    before = tl.load(old + row)
                if HAS_REF:
                    other = tl.load(ref + row)
            if not SINGLE:
                base, total, tilt = merged(at, num_blocks, PAD, ENTROPY, PHASE == 0)
            log2_total = tl.log2(total)
            y_chosen = x_chosen * scale - base
            logp = (y_chosen - log2_total) * _LN2
            entropy = 0.0
            if ENTROPY:
                entropy = (log2_total - tilt / total) * _LN2
            loss = 0.0
            slope_logp = upstream
            slope_entropy = upstream_entropy
            if LOSS:
                if not HAS_OLD:
                    before = logp
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
            if block == 0:
                if LOSS:
                    tl.store(loss_out + row, loss)
                tl.store(logprob_out + row, logp)
                if WRITE_ENTROPY:
                    tl.store(entropy_out + row, entropy)
            if WRITE:
                TILT: tl.constexpr = GIVEN_ENTROPY or ENTROPY_BONUS
                # dz / slope = (g 1[v = a] - p (g + e (ln p + entropy))) / temperature, with p = 2^y / total
                g = slope_logp * inv_temperature
                e = slope_entropy * inv_temperature
                flat = -(g + e * (entropy - log2_total * _LN2)) / total
                steep = -e * _LN2 / total
                for i in tl.static_range(TILES):
                    dz = _gradient(
                        again(raws[i], 2 * nothing, PACKED), scale, base, flat, steep, softcap, TILT, SOFTCAP
                    )
                    write_tile(target, dz, lane + i * TILE, shift, width, EVEN, VEC)
                if not EVEN:
                    dz = _gradient(raw_edge, scale, base, flat, steep, softcap, TILT, SOFTCAP)
                    tl.store(target + at_edge, dz.to(grad.dtype.element_ty), mask=in_edge)
                if (chosen >= 0) & (chosen < TILE * TILES):
                    tl.debug_barrier()  # the element is written twice, this time last
                    dz_chosen = g + tl.exp2(y_chosen) * (flat + steep * tl.maximum(y_chosen, -1e4))
                    tl.store(target + chosen, (dz_chosen * slope_chosen).to(grad.dtype.element_ty))
    else:
        if (block == 0) | ZEROS:  # a program that writes nothing has nothing to wait for
            wait_for_previous(PDL)
        if PHASE != 1:
            if block == 0:
                if LOSS:
                    tl.store(loss_out + row, 0.0)
                tl.store(logprob_out + row, 0.0)
                if WRITE_ENTROPY:
                    tl.store(entropy_out + row, 0.0)
            if WRITE and ZEROS:
                for i in tl.static_range(TILES):
                    zeros = tl.zeros((TILE,), tl.float32)
                    write_tile(target, zeros, lane + i * TILE, shift, width, EVEN, VEC)
                if not EVEN:
                    tl.store(target + at_edge, tl.zeros((2 * VEC,), grad.dtype.element_ty), mask=in_edge)
