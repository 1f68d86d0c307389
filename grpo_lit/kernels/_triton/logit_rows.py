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

Writing over the logits is safe because everything a program reads has arrived before it publishes, and no
program of the row writes before all have published.

In 16 bits arithmetic is the limit, not memory, so the inner loops count instructions: the maximum is taken on
pairs, the exponent is one fused multiply-add (x scale - c, with c = maximum x scale rounded once and used
everywhere, so its rounding cancels), and the chosen token's term is added to its one element afterwards.
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
    """How a row is cut: a program holds ``tiles`` tiles of ``tile`` elements, a vector of 16 bytes a thread
    each.

    Attributes:
        tile: elements of a tile, a power of two.
        tiles: tiles of a program.
        num_warps: its warps.
        registers: most registers a thread may take, None to leave it to the compiler.
    """

    tile: int
    tiles: int
    num_warps: int
    registers: int | None = None


@triton.jit
def _word(value, check):  # type: ignore[no-untyped-def]
    """A published word: float32 ``value`` below, the bits of positive float32 ``check`` above."""
    low = value.to(tl.uint32, bitcast=True).to(tl.int64)
    return low | (check.to(tl.uint32, bitcast=True).to(tl.int64) << 32)


@triton.jit
def _halves(words, wanted, WAIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(value, check) of the ``wanted`` words, 0 elsewhere; waits until they are published if WAIT."""
    if WAIT:
        low, high = tl.inline_asm_elementwise(
            """{
                .reg .pred idle, waiting;
                mov.b32 $0, 0;
                mov.b32 $1, 0;
                setp.eq.u32 idle, $3, 0;
                @idle bra done;
            again:
                ld.relaxed.gpu.global.v2.b32 {$0, $1}, [$2];
                setp.eq.u32 waiting, $1, 0;
                @waiting bra again;
            done:
            }""",
            "=&r,=&r,l,r",
            [words, wanted.to(tl.int32)],
            dtype=(tl.float32, tl.float32),
            is_pure=False,
            pack=1,
        )
    else:
        word = tl.load(words, mask=wanted, other=0)
        low = word.to(tl.uint32).to(tl.float32, bitcast=True)
        high = (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _merged(words, num_blocks, PAD: tl.constexpr, ENTROPY: tl.constexpr, WAIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """(reference, normaliser, entropy sum) of a row from the words of its blocks."""
    index = tl.arange(0, PAD)
    block = index < num_blocks
    peaks, sums = _halves(words + index, block, WAIT)
    peaks = tl.where(block, peaks, float("-inf"))
    peak = tl.max(peaks, 0)
    reference = tl.where(peak == float("-inf"), 0.0, peak)
    gap = tl.maximum(peaks - reference, -1e4)  # finite, since it meets a 0 below
    share = tl.exp2(gap)
    tilt = 0.0
    if ENTROPY:
        tilts, _ = _halves(words + num_blocks + index, block, WAIT)
        tilt = tl.sum((tilts + gap * sums) * share, 0)
    return reference, tl.sum(sums * share, 0), tilt


@triton.jit
def _again(x, nothing, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """x, hidden from the compiler, which then keeps 16-bit x and not the float32 made of it."""
    if PACKED:
        zeros = tl.full(x.shape, 0, tl.int16) + nothing.to(tl.int16)
        x = tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, zeros], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def _larger(a, b, PACKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Elementwise maximum, of pairs where the elements have 16 bits."""
    if PACKED:
        if a.dtype == tl.bfloat16:
            larger = tl.inline_asm_elementwise(
                "max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2
            )
        else:
            larger = tl.inline_asm_elementwise(
                "max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2
            )
    else:
        larger = tl.maximum(a.to(tl.float32), b.to(tl.float32))
    return larger


@triton.jit
def _activate(raw, softcap, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(x, dx/dz up to the temperature) in float32; a raw -inf stays."""
    x = raw.to(tl.float32)
    slope = 1.0
    if SOFTCAP:
        squashed = tanh(x / softcap)
        slope = 1.0 - squashed * squashed
        x = tl.where(x == float("-inf"), x, softcap * squashed)
    return x, slope


@triton.jit
def _read(source, column, shift, vocab, begin, TILE: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of logits as stored, -inf outside the row."""
    if EVEN:
        raw = tl.load(source + column, mask=column < vocab, other=float("-inf"))
    else:
        # A mask with its edge inside a vector makes loads narrow, so only the tiles at the ends have one.
        if (begin >= shift) & (begin + TILE <= vocab):  # noqa: SIM108
            raw = tl.load(source + column)
        else:
            raw = tl.load(source + column, mask=(column >= shift) & (column < vocab), other=float("-inf"))
    return raw


@triton.jit
def _write(target, values, column, shift, width, begin, TILE: tl.constexpr, EVEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores a tile of the gradient, the padded columns of the row included, nothing outside the row."""
    values = values.to(target.dtype.element_ty)
    if EVEN:
        tl.store(target + column, values, mask=column < width)
    else:
        if (begin >= shift) & (begin + TILE <= width):
            tl.store(target + column, values)
        else:
            tl.store(target + column, values, mask=(column >= shift) & (column < width))


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
    words,
    slots,
    nothing,
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
    SINGLE: tl.constexpr,
    FLAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    SAME_LAYOUT: tl.constexpr,
    EVEN: tl.constexpr,
    VEC: tl.constexpr,
    PACKED: tl.constexpr,
):
    pid = tl.program_id(0)
    row = pid // num_blocks
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

    if live:
        scale = inv_temperature * 1.4426950408889634
        known = (chosen >= shift) & (chosen < vocab)
        raw_chosen = tl.load(source + chosen, mask=known, other=float("-inf"))
        if PHASE == 1 and block == 0:  # the second run may find this logit overwritten
            tl.store(words + (row + 1).to(tl.int64) * slots - 1, _word(raw_chosen.to(tl.float32), scale))
        if PHASE == 2:
            raw_chosen, _ = _halves(words + (row + 1).to(tl.int64) * slots - 1, known | True, False)
        x_chosen, slope_chosen = _activate(raw_chosen, softcap, SOFTCAP)
        raws = ()  # type: ignore[var-annotated]
        for i in tl.static_range(TILES):
            raw = _read(source, lane + i * TILE, shift, vocab, i * TILE, TILE, EVEN)
            raws = raws + (raw,)  # type: ignore[assignment]
        top = raws[0]  # type: ignore[misc]
        for i in tl.static_range(1, TILES):
            top = _larger(top, raws[i], PACKED)
        peak, _ = _activate(tl.max(top.to(tl.float32), 0), softcap, SOFTCAP)
        # `nothing` is 0. Taken in here, the chosen logit has arrived in every thread before this one
        # publishes.
        peak = peak * scale + (x_chosen.to(tl.int32, bitcast=True) & nothing).to(tl.float32)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        sums = tl.zeros((TILE,), tl.float32)
        tilts = tl.zeros((TILE,), tl.float32)
        for i in tl.static_range(TILES):
            x, _ = _activate(_again(raws[i], nothing, PACKED), softcap, SOFTCAP)
            power = tl.exp2(x * scale - base)
            sums += power
            if ENTROPY:
                tilts += power * tl.maximum(x * scale - base, -1e4)
        total = tl.sum(sums, 0)
        tilt = 0.0
        if ENTROPY:
            tilt = tl.sum(tilts, 0)
        at = words
        if not SINGLE:
            at = words + row.to(tl.int64) * slots
            if PHASE != 2:
                # 1e-30: a block without a finite logit counts nothing, but must not look unpublished
                tl.atomic_xchg(at + block, _word(peak, tl.maximum(total, 1e-30)), sem="relaxed")
                if ENTROPY:
                    one = tl.full((), 1.0, tl.float32)
                    tl.atomic_xchg(at + num_blocks + block, _word(tilt, one), sem="relaxed")
        if PHASE != 1 and (WRITE or block == 0):
            advantage = 0.0
            before = 0.0
            other = 0.0
            if LOSS:  # asked for before the wait
                advantage = tl.load(advantages + row)
                if HAS_OLD:
                    before = tl.load(old + row)
                if HAS_REF:
                    other = tl.load(ref + row)
            if not SINGLE:
                base, total, tilt = _merged(at, num_blocks, PAD, ENTROPY, PHASE == 0)
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
                # dz / slope = (g 1[v = a] - p (g + e (ln p + entropy))) / temperature, with p = 2^y / total
                g = slope_logp * inv_temperature
                e = slope_entropy * inv_temperature
                flat = -(g + e * (entropy - log2_total * _LN2)) / total
                steep = -e * _LN2 / total
                for i in tl.static_range(TILES):
                    x, slope = _activate(_again(raws[i], 2 * nothing, PACKED), softcap, SOFTCAP)
                    y = x * scale - base
                    if GIVEN_ENTROPY or ENTROPY_BONUS:
                        dz = tl.exp2(y) * (flat + steep * tl.maximum(y, -1e4))
                    else:
                        dz = tl.exp2(y) * flat
                    if SOFTCAP:
                        dz *= slope
                    _write(target, dz, lane + i * TILE, shift, width, i * TILE, TILE, EVEN)
                if (chosen >= 0) & (chosen < TILE * TILES):
                    tl.debug_barrier()  # the element is written twice, this time last
                    dz_chosen = g + tl.exp2(y_chosen) * (flat + steep * tl.maximum(y_chosen, -1e4))
                    tl.store(target + chosen, (dz_chosen * slope_chosen).to(grad.dtype.element_ty))
    else:
        if PHASE != 1:
            if block == 0:
                if LOSS:
                    tl.store(loss_out + row, 0.0)
                tl.store(logprob_out + row, 0.0)
                if WRITE_ENTROPY:
                    tl.store(entropy_out + row, 0.0)
            if WRITE:
                for i in tl.static_range(TILES):
                    zeros = tl.zeros((TILE,), tl.float32)
                    _write(target, zeros, lane + i * TILE, shift, width, i * TILE, TILE, EVEN)


def default_plan(width: int, element_size: int) -> Plan:
    """Tiles and warps for rows of ``width`` logits; sizes from sweeps on one H200.

    Small programs, so that many wait in turn, and 64 registers, so that 8 of them fit a multiprocessor.
    """
    vector = 16 // element_size
    num_warps = 4
    while num_warps > 1 and 32 * num_warps // 2 * vector >= width:
        num_warps //= 2
    tile = 32 * num_warps * vector
    most = 8 if element_size == 2 else 10
    return Plan(tile, min(most, triton.cdiv(width + vector - 1, tile)), num_warps, registers=64)


def waits_safely(num_blocks: int, device: torch.device) -> bool:
    """Whether a row's programs may wait for each other, see the module docstring."""
    if interpreting() or device.type != "cuda" or torch.version.hip is not None:
        return False
    # at least one program a multiprocessor; halved for a second stream doing the same
    return num_blocks <= torch.cuda.get_device_properties(device).multi_processor_count // 2


def _blocks(logits: Tensor, plan: Plan) -> tuple[int, bool]:
    """(blocks a row is cut into, whether rows start on 16-byte boundaries) of logits (..., rows, V)."""
    width = logits.shape[-1]
    aligned = logits.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in logits.stride()[:-1])
    spare = 0 if aligned else 16 // logits.element_size() - 1
    return triton.cdiv(width + spare, plan.tile * plan.tiles), aligned


def reads_rows_first(logits: Tensor) -> bool:
    """Whether no part of a row's gradient is written before all of the row has been read."""
    plan = default_plan(logits.shape[-1], logits.element_size())
    blocks, _ = _blocks(logits, plan)
    return blocks > 1 and waits_safely(blocks, logits.device)


def logit_rows(
    logits: Tensor,
    ids: Tensor,
    *,
    grad: Tensor | None,
    loss: Tensor,
    logprobs: Tensor,
    entropy: Tensor,
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
    plan: Plan | None = None,
) -> None:
    """Fills ``loss``, ``logprobs``, ``entropy`` (rows,) float32, and ``grad`` where given; see the reference.

    ``logits`` and ``grad`` are (N, T, V) with contiguous rows and may be the same memory. An empty ``loss``
    or ``entropy`` isn't written.
    """
    count, steps, width = logits.shape
    rows = count * steps
    if rows == 0:
        return
    plan = plan or default_plan(width, logits.element_size())
    num_blocks, aligned = _blocks(logits, plan)
    target = logits if grad is None else grad
    same = target.stride() == logits.stride() and (target.data_ptr() - logits.data_ptr()) % 16 == 0
    flat = all(t.stride(0) == steps * t.stride(1) or count == 1 for t in (logits, target))
    bonus = weights is not None and scalars.entropy_coef != 0
    entropy_used = entropy.numel() > 0 or bonus or dentropy is not None
    single = num_blocks == 1
    waits = single or waits_safely(num_blocks, logits.device)
    slots = num_blocks * (2 if entropy_used else 1) + 1
    words = torch.zeros((0 if single else rows, slots), dtype=torch.int64, device=logits.device)
    limit = {} if plan.registers is None or interpreting() else {"maxnreg": plan.registers}
    for phase in (_BOTH,) if waits else (_PUBLISH, _FINISH):
        _logit_rows_kernel[(rows * num_blocks,)](
            logits,
            target,
            ids,
            old,
            advantages,
            weights,
            ref,
            dlogprobs,
            dentropy,
            loss,
            logprobs,
            entropy,
            words,
            slots,
            0,
            num_blocks,
            steps,
            vocab_size,
            width,
            logits.stride(0),
            logits.stride(1),
            target.stride(0),
            target.stride(1),
            1.0 / temperature,
            softcap,
            scalars.epsilon_low,
            scalars.epsilon_high,
            scalars.delta,
            scalars.beta,
            scalars.entropy_coef,
            scalars.cispo_cap,
            TILE=plan.tile,
            TILES=plan.tiles,
            PAD=max(triton.next_power_of_2(num_blocks), 32 * plan.num_warps),
            PHASE=phase,
            LOSS=weights is not None,
            GIVEN=dlogprobs is not None,
            GIVEN_ENTROPY=dentropy is not None,
            HAS_OLD=old is not None,
            HAS_REF=ref is not None,
            ENTROPY=entropy_used,
            WRITE_ENTROPY=entropy.numel() > 0,
            ENTROPY_BONUS=bonus,
            SOFTCAP=softcap != 0,
            CISPO=scalars.cispo,
            WRITE=grad is not None,
            SINGLE=single,
            FLAT=flat,
            ALIGNED=aligned,
            SAME_LAYOUT=same,
            EVEN=aligned and vocab_size % 16 == 0 and width % 16 == 0,
            VEC=16 // logits.element_size(),
            PACKED=logits.element_size() == 2 and not interpreting(),
            num_warps=plan.num_warps,
            **limit,
        )
