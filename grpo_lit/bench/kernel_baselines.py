"""What the kernels are measured against: eager torch, kernels that aren't fused, and Liger and TRL if
installed.

Nothing here is used in training. ``import`` this only where Triton may be imported.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels._triton.math import token_terms

EPSILON = 0.2


def eager_token_loss(logp: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """Clipped loss from log-probs (N, T) in plain torch, as a trainer would write it."""
    ratio = (logp - old).exp()
    adv = advantages[:, None]
    return -(torch.minimum(ratio * adv, ratio.clamp(1 - EPSILON, 1 + EPSILON) * adv) * weights).sum()


def eager_logits_loss(logits: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """The same from logits (N, T, V): float32 log-softmax over all of them."""
    logp = torch.log_softmax(logits.float(), -1).gather(-1, ids[..., None]).squeeze(-1)
    return eager_token_loss(logp, old, advantages, weights)


@triton.jit
def _selected_logprob_kernel(  # type: ignore[no-untyped-def]
    logits, ids, logprobs, normalisers, vocab, BLOCK: tl.constexpr, UNROLL: tl.constexpr
):
    """One program a row: a pass for the maximum, a pass for the sum."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK * UNROLL):
        for i in tl.static_range(UNROLL):
            column = start + i * BLOCK + lane
            x = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf"))
            top = tl.maximum(top, x.to(tl.float32))
    peak = tl.max(top, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK * UNROLL):
        for i in tl.static_range(UNROLL):
            column = start + i * BLOCK + lane
            x = tl.load(logits + row * vocab + column, mask=column < vocab, other=float("-inf"))
            total += tl.exp(x.to(tl.float32) - peak)
    normaliser = peak + tl.log(tl.sum(total, 0))
    chosen = tl.load(logits + row * vocab + tl.load(ids + row)).to(tl.float32)
    tl.store(logprobs + row, chosen - normaliser)
    tl.store(normalisers + row, normaliser)


@triton.jit
def _entropy_kernel(logits, entropies, vocab, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program a row: a pass for the maximum, a pass for normaliser and entropy sum."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits + row * vocab + start + lane, mask=start + lane < vocab, other=float("-inf"))
        top = tl.maximum(top, x.to(tl.float32))
    peak = tl.max(top, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    tilt = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = tl.load(logits + row * vocab + start + lane, mask=start + lane < vocab, other=float("-inf"))
        gap = tl.maximum(x.to(tl.float32) - peak, -1e4)
        total += tl.exp(gap)
        tilt += tl.exp(gap) * gap
    sums = tl.sum(total, 0)
    tl.store(entropies + row, tl.log(sums) - tl.sum(tilt, 0) / sums)


@triton.jit
def _logits_gradient_kernel(  # type: ignore[no-untyped-def]
    logits, grad, ids, slopes, normalisers, vocab, BLOCK: tl.constexpr, UNROLL: tl.constexpr
):
    """One program a row: reads it again and writes slope (onehot - softmax)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    slope = tl.load(slopes + row)
    normaliser = tl.load(normalisers + row)
    chosen = tl.load(ids + row)
    for start in range(0, vocab, BLOCK * UNROLL):
        for i in tl.static_range(UNROLL):
            column = start + i * BLOCK + lane
            inside = column < vocab
            x = tl.load(logits + row * vocab + column, mask=inside, other=float("-inf")).to(tl.float32)
            dx = -slope * tl.exp(x - normaliser) + tl.where(column == chosen, slope, 0.0)
            tl.store(grad + row * vocab + column, dx.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def _atomic_token_loss_kernel(  # type: ignore[no-untyped-def]
    logprobs, old, advantages, weights, dlogprobs, sums, count, steps, epsilon, BLOCK: tl.constexpr
):
    """Token loss that adds every token to three global sums with an atomic each."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    weight = tl.load(weights + at, mask=inside, other=0.0)
    logp = tl.load(logprobs + at, mask=inside, other=0.0)
    before = tl.load(old + at, mask=inside, other=0.0)
    adv = tl.load(advantages + at // steps, mask=inside, other=0.0)
    loss, slope = token_terms(logp, before, adv, weight, logp, epsilon, epsilon, float("inf"), 0.0, 0.0, False, False)
    tl.store(dlogprobs + at, slope, mask=inside)
    active = inside & (weight != 0.0)
    tl.atomic_add(sums + tl.zeros_like(at), loss, mask=active, sem="relaxed")
    tl.atomic_add(sums + 1 + tl.zeros_like(at), slope, mask=active, sem="relaxed")
    tl.atomic_add(sums + 2 + tl.zeros_like(at), weight, mask=active, sem="relaxed")


def atomic_token_loss(logp: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, d loss / d logp) with three atomics per active token."""
    sums, slopes = logp.new_zeros(3), torch.empty_like(logp)
    block = 256
    _atomic_token_loss_kernel[(triton.cdiv(logp.numel(), block),)](
        logp,
        old,
        advantages,
        weights,
        slopes,
        sums,
        logp.numel(),
        logp.shape[1],
        EPSILON,
        BLOCK=block,
        num_warps=8,
    )
    return sums[0], slopes


def separate_kernels(
    logits: Tensor,
    ids: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    entropy: bool = False,
    vectors: bool = True,
) -> tuple[Tensor, Tensor]:
    """(loss, logits' gradient) by separate kernels: selected log-prob, token loss, gradient of the logits.

    As in grpo.cpp (``selected_logp_kernel``, ``grpo_loss_block_kernel``, ``logits_backward_kernel``): 256 threads a row
    read the logits three times (maximum, sum, gradient) and write the gradient once; the row's normaliser is kept and
    no log-softmax is written. There a thread takes one element at a time, unrolled by four (``vectors=False``); with
    ``vectors`` it takes 16 bytes at a time, which those kernels would gain from before any fusion. With ``entropy`` a
    kernel of its own reads the logits twice more.
    """
    from grpo_lit.kernels._triton.token_loss import token_loss
    from grpo_lit.kernels.token_terms import TokenScalars

    vocab = logits.shape[-1]
    logp, normalisers = (torch.empty(ids.shape, device=logits.device) for _ in range(2))
    grad = torch.empty_like(logits)
    launch: dict[str, Any] = {"BLOCK": 2048 if vectors else 256, "num_warps": 8}
    unroll = 1 if vectors else 4
    grid = (ids.numel(),)
    _selected_logprob_kernel[grid](logits, ids, logp, normalisers, vocab, UNROLL=unroll, **launch)
    loss, slopes = token_loss(logp, old, advantages, weights, None, TokenScalars())
    if entropy:
        _entropy_kernel[grid](logits, torch.empty_like(logp), vocab, **launch)
    _logits_gradient_kernel[grid](logits, grad, ids, slopes, normalisers, vocab, UNROLL=unroll, **launch)
    return loss, grad


def installed(package: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _optional(module: str) -> Any:
    """The module, or None where it or something it needs isn't installed."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        if installed(module.split(".")[0].replace("_", "-")):
            print(f"{module} is installed but can't be imported: {error}", file=sys.stderr)
        return None


def liger_logits_loss() -> Callable[..., Tensor] | None:
    """Liger's GRPO loss on logits (N, T + 1, V), our weights on its per-token losses; None if missing."""
    module = _optional("liger_kernel.transformers.grpo_loss")
    if module is None:
        return None

    def loss(logits: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
        per_token = module.triton_grpo_loss(
            logits,
            old,
            None,
            ids,
            advantages,
            (weights != 0).int(),
            temperature=1.0,
            beta=0.0,
            eps_low=EPSILON,
            eps_high=EPSILON,
            inplace=False,
            loss_type="grpo",
            reduce=False,
        )[0]
        total: Tensor = (per_token * weights).sum()
        return total

    return loss


def trl_head_loss() -> Callable[..., Tensor] | None:
    """TRL's chunked output layer under the eager token loss; None if TRL isn't installed."""
    kernels, utils = _optional("trl.kernels"), _optional("trl.trainer.utils")
    if kernels is None or utils is None:
        return None
    chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE

    def loss(hidden: Tensor, weight: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        logp = kernels.ChunkedLogProbFunction.apply(rows, weight, None, ids.reshape(-1), 1.0, chunk, None, 1.0, ())[0]
        return eager_token_loss(logp.view(ids.shape), old, advantages, weights)

    return loss


def liger_head_loss(weight: Tensor) -> Callable[..., Tensor] | None:
    """Liger's fused-linear GRPO loss (its own token mean); None if not installed."""
    module = _optional("liger_kernel.chunked_loss")
    if module is None:
        return None
    fused = module.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="bnpo")

    def loss(hidden: Tensor, ids: Tensor, old: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
        mask = (weights != 0).int()
        value: Tensor = fused(hidden, weight, ids, mask, advantages, old_per_token_logps=old)[0]
        return value

    return loss
