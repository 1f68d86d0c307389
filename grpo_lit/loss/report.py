"""The figures that `grpo_loss` logs, as (sum, count) pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.loss.batch import LossBatch
from grpo_lit.loss.config import LossConfig
from grpo_lit.loss.divergences import MAX_LOG_RATIO, k1_kl, k3_kl
from grpo_lit.loss.objectives import clip_masks


@torch.no_grad()
def loss_totals(
    batch: LossBatch, parts: dict[str, Tensor], means: dict[str, Tensor | None], config: LossConfig
) -> dict[str, Tensor]:
    """Pairs (sum, count), float64, for every metric of a call.

    Means are over counted tokens. With a sequence ratio, the clip fractions and the ratio's mean are over
    rows (each token counts 1 / L_i of a row). Exponents are held at 20, so that a log file never holds an
    infinity that hides the other values; `nonfinite_count` says how many counted log-probs were not finite.

    Args:
        batch: inputs of the call.
        parts: scalars that are sums already: the loss and its parts.
        means: further (N, T) tensors to average over counted tokens.
        config: for the clip bounds.
    """
    logp, old, mask, advantages = batch.logprobs, batch.old, batch.mask, batch.advantages
    log_ratio = batch.log_ratio.detach()
    lengths = mask.sum(dim=1, keepdim=True)
    share = mask.double() if config.ratio == "token" else mask.double() / lengths.clamp(min=1)
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    totals = {name: _single(part) for name, part in parts.items()}
    low, high, dual = _clipped(log_ratio, logp - old, advantages, config)
    clipped = {"": low | high | dual, "_low": low, "_high": high, "_dual": dual}
    totals |= {f"clip_fraction{suffix}": _mean(which, share) for suffix, which in clipped.items()}
    totals["ratio_mean"] = _mean(ratio, share)
    totals["ratio_max"] = _max(ratio, mask)
    tokens = mask.double()
    totals["approx_kl"] = _mean(k3_kl(old, logp), tokens)  # samples come from the old policy: KL(old || new)
    totals["approx_kl_k1"] = _mean(k1_kl(logp, old), tokens)
    totals["advantage_abs"] = _mean(advantages.abs(), tokens)
    totals |= {name: _mean(value, tokens) for name, value in means.items() if value is not None}
    if batch.rollout is not None:
        distance = (old - batch.rollout).abs()
        totals["logprob_mismatch"] = _mean(distance, tokens)
        totals["logprob_mismatch_max"] = _max(distance, mask)
    totals["token_count"] = _single(tokens.sum())
    totals["row_count"] = _single((lengths > 0).sum())
    totals["nonfinite_count"] = _single((mask & ~(torch.isfinite(logp) & torch.isfinite(old))).sum())
    return totals


def _clipped(
    log_ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor, config: LossConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """(low, high, dual): where the objective holds the ratio."""
    never = torch.zeros_like(advantages, dtype=torch.bool)
    if config.objective == "clip":
        return clip_masks(
            log_ratio,
            advantages,
            epsilon_low=config.epsilon_low,
            epsilon_high=config.epsilon_high,
            delta=config.delta,
        )
    if config.objective == "cispo":
        return never, (advantages != 0) & (log_ratio.exp() > config.cispo_cap), never
    if config.objective == "gmpo":
        low = (advantages < 0) & (token_log_ratio < -config.epsilon_low)
        return low, (advantages > 0) & (token_log_ratio > config.epsilon_high), never
    return never, never, never


def _mean(values: Tensor, share: Tensor) -> Tensor:
    counted = torch.where(share > 0, values.detach().double(), 0)
    return torch.stack([(counted * share).sum(), share.sum()])


def _max(values: Tensor, mask: Tensor) -> Tensor:
    """Largest of the counted values (none of them negative); 0 if none counted."""
    return _single(torch.where(mask, values, 0).max() if mask.numel() else values.new_zeros(()))


def _single(value: Tensor) -> Tensor:
    value = value.detach().double()
    return torch.stack([value, torch.ones_like(value)])
