"""The inputs of a loss call: checked, and with everything that doesn't count replaced by 0."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.loss import objectives
from grpo_lit.loss.config import LossConfig
from grpo_lit.loss.corrections import rollout_weights


@dataclass(frozen=True)
class LossBatch:
    """(N, T) tensors, float32 or float64; 0 where the mask is False, so that no arithmetic sees what stood there."""

    logprobs: Tensor
    """Of the policy, with graph."""
    old: Tensor
    """Log-probs of the policy that is the ratio's denominator."""
    rollout: Tensor | None
    """Log-probs that the rollout engine reported; `old` where it has none."""
    log_ratio: Tensor
    """At the configured level, with graph."""
    advantages: Tensor
    """0 where a token has no weight, too."""
    mask: Tensor
    """Bool, the tokens that count."""
    live: Tensor
    """Bool, those that also have a weight."""
    correction: Tensor | None
    """Weight of the policy term for the mismatch of `old` and `rollout`, where the configuration asks for it."""

    @property
    def behaviour(self) -> Tensor:
        """Log-probs of whoever sampled: the rollout engine if known, otherwise `old`."""
        return self.old if self.rollout is None else self.rollout


def as_rows(advantages: Tensor) -> Tensor:
    """(N, 1) or (N, T)."""
    return advantages if advantages.dim() == 2 else advantages[:, None]


def loss_batch(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    completion_mask: Tensor,
    rollout_logprobs: Tensor | None,
    config: LossConfig,
) -> LossBatch:
    """The batch of a call; the arguments are those of `grpo_loss`.

    What doesn't count is selected out before any arithmetic: that keeps the gradient of a masked NaN at 0, which a
    product would not.
    """
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    mask = completion_mask.bool()
    live = mask & (weights != 0)
    logp = torch.where(mask, logprobs.to(dtype), 0)
    old = torch.where(mask, old_logprobs.detach().to(dtype), 0)
    rollout = correction = None
    if rollout_logprobs is not None:
        # an engine that could not score a token reports NaN: no evidence of a mismatch
        known = mask & ~torch.isnan(rollout_logprobs)
        rollout = torch.where(known, rollout_logprobs.detach().to(dtype), old)
        if config.rollout_correction != "none":
            mode, cap = config.rollout_correction, config.rollout_correction_cap
            correction = rollout_weights(old, rollout, mask, mode, cap)
    row_advantages = as_rows(advantages).detach().to(dtype)
    if config.objective == "gmpo":
        low, high = config.epsilon_low, config.epsilon_high
        log_ratio = objectives.gmpo_log_ratio(logp - old, row_advantages, mask, epsilon_low=low, epsilon_high=high)
    else:
        log_ratio = objectives.leveled_log_ratio(logp, old, mask, config.ratio)
    kept = torch.where(live, row_advantages, 0)
    return LossBatch(logp, old, rollout, log_ratio, kept, mask, live, correction)


def check_shapes(
    logprobs: Tensor, advantages: Tensor, tensors: tuple[Tensor, ...], optional: dict[str, Tensor | None]
) -> None:
    """Refuse shapes that don't match, `tensors` being old log-probs, weights and mask."""
    shape = logprobs.shape
    if logprobs.dim() != 2:
        raise UserError("logprobs", tuple(shape), "shape (N, T)")
    named = dict(zip(("old_logprobs", "weights", "completion_mask"), tensors, strict=True))
    for name, tensor in {**named, **optional}.items():
        if tensor is not None and tensor.shape != shape:
            raise UserError(name, tuple(tensor.shape), f"shape (N, T) = {tuple(shape)} like logprobs")
    if advantages.shape not in (shape, shape[:1]):
        accepted = f"shape (N,) or (N, T) of logprobs {tuple(shape)}"
        raise UserError("advantages", tuple(advantages.shape), accepted)


def check_needs(optional: dict[str, Tensor | None], config: LossConfig) -> None:
    """Refuse a missing tensor that the configuration needs."""
    needed = {
        "ref_logprobs": (config.beta > 0, f"a tensor, since model.loss.beta={config.beta}"),
        "entropy": (config.needs_entropy, "a tensor, since model.loss.entropy_coef or token_rule needs it"),
        "rollout_logprobs": (
            config.rollout_correction != "none",
            f"a tensor, since model.loss.rollout_correction={config.rollout_correction!r}",
        ),
    }
    for name, (is_needed, accepted) in needed.items():
        if is_needed and optional[name] is None:
            raise UserError(name, None, accepted)
