"""Launches ``logit_rows_kernel``: how a row is cut into blocks, and when its programs may wait for each other."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels._triton.launch import device_limits, overlap
from grpo_lit.kernels._triton.logit_rows_kernel import logit_rows_kernel
from grpo_lit.kernels.dispatch import interpreting
from grpo_lit.kernels.token_terms import TokenScalars

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


def default_plan(width: int, element_size: int) -> Plan:
    """Tiles and warps for rows of ``width`` logits; sizes from sweeps on one H200.

    Small programs, so that many wait in turn, and 64 registers, so that 8 of them fit a multiprocessor. Of 8 to 10
    tiles, the number that leaves the fewest lanes of the last program without a logit.
    """
    vector = 16 // element_size
    num_warps = 4
    while num_warps > 1 and 32 * num_warps // 2 * vector >= width:
        num_warps //= 2
    tile = 32 * num_warps * vector
    needed = triton.cdiv(width + vector - 1, tile)
    tiles = min((10, 9, 8), key=lambda most: triton.cdiv(needed, most) * most)
    return Plan(tile, min(tiles, needed), num_warps, registers=64)


def waits_safely(num_blocks: int, device: torch.device) -> bool:
    """Whether a row's programs may wait for each other, see the module docstring."""
    if interpreting() or device.type != "cuda" or torch.version.hip is not None:
        return False
    # at least four programs a multiprocessor, where the registers and threads of `default_plan` leave room for eight;
    # halved for a second stream doing the same
    return num_blocks <= 2 * device_limits(device).multiprocessors


def _blocks(logits: Tensor, plan: Plan) -> tuple[int, bool]:
    """(blocks a row is cut into, whether rows start on 16-byte boundaries) of logits (..., rows, V)."""
    width = logits.shape[-1]
    aligned = logits.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in logits.stride()[:-1])
    spare = 0 if aligned else 16 // logits.element_size() - 1
    return triton.cdiv(width + spare, plan.tile * plan.tiles), aligned


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _clear_kernel(words, count, BLOCK: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # the next kernel reads its logits meanwhile
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(words + at, tl.zeros((BLOCK,), tl.int64), mask=at < count)


def _cleared_words(count: int, device: torch.device, early: bool) -> Tensor:
    """(count,) int64 zeros; ``early``: the kernel that follows is launched to overlap with the clearing.

    The clearing itself waits for all that came before, so the kernel that follows may read that at once.
    """
    words = torch.empty(count, dtype=torch.int64, device=device)
    if count:
        _clear_kernel[(triton.cdiv(count, 1024),)](words, count, BLOCK=1024, PDL=early, num_warps=4)
    return words


@functools.cache
def row_step(rows: int) -> int:
    """A step that visits all of ``rows`` rows, neighbours far apart: near the golden section, prime to ``rows``."""
    if rows * rows >= 1 << 31:
        return 1
    return next((step for step in range(int(0.618 * rows), rows) if math.gcd(step, rows) == 1), 1)


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
    zero_masked: bool = True,
    plan: Plan | None = None,
) -> None:
    """Fills ``loss``, ``logprobs``, ``entropy`` (rows,) float32, and ``grad`` where given; see the reference.

    ``logits`` and ``grad`` are (N, T, V) with contiguous rows and may be the same memory. An empty ``loss``
    or ``entropy`` isn't written. Without ``zero_masked`` the gradient of rows that don't count isn't either.
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
    # In 16 bits, where arithmetic is the limit, a wait between reading and computing costs more than it saves.
    early = waits and not single and logits.element_size() == 4
    launch = overlap(logits) if early else {"PDL": False}
    words = _cleared_words(0 if single else rows * slots, logits.device, launch["PDL"])
    limit = {} if plan.registers is None or interpreting() else {"maxnreg": plan.registers}
    for phase in (_BOTH,) if waits else (_PUBLISH, _FINISH):
        logit_rows_kernel[(rows * num_blocks,)](
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
            rows,
            1 if zero_masked else row_step(rows),  # what writes zeros for masked rows keeps the memory busy as it is
            steps,
            1 if advantages is None else rows // len(advantages),
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
            ZEROS=zero_masked,
            SINGLE=single,
            FLAT=flat,
            ALIGNED=aligned,
            SAME_LAYOUT=same,
            EVEN=aligned and vocab_size % 16 == 0 and width % 16 == 0,
            PADDED=vocab_size < width,
            VEC=16 // logits.element_size(),
            PACKED=logits.element_size() == 2 and not interpreting(),
            num_warps=plan.num_warps,
            **launch,
            **limit,
        )
