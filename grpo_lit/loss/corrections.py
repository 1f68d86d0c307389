"""Corrections for tokens that another policy sampled: an older one, or an engine that rounds otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.loss.divergences import MAX_LOG_RATIO


def rollout_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, mode: str, cap: float) -> Tensor:
    """p_old / p_rollout, made safe to multiply with; no gradient. (N, T)

    The trainer's log-probs of a token differ from those of the engine that sampled it, so samples come from a
    slightly other policy. Truncated importance sampling (``*_truncate``; Yao et al. 2025, "Your efficient RL
    framework secretly brings you off-policy RL training") holds the weight at the cap; masked importance
    sampling (``*_mask``; IcePop, 2025) drops what lies above it. Per token, or for the whole row by the
    product of its tokens' ratios.

    Args:
        old_logprobs: (N, T), finite where `mask` is False.
        rollout_logprobs: (N, T), likewise.
        mask: (N, T) bool.
        mode: "token_truncate", "token_mask", "sequence_truncate" or "sequence_mask".
        cap: the largest weight, > 0.
    """
    log_weight = torch.where(mask, old_logprobs - rollout_logprobs, 0).detach()
    if mode.startswith("sequence"):
        log_weight = log_weight.sum(dim=1, keepdim=True).expand_as(log_weight)
    weight = log_weight.clamp(max=MAX_LOG_RATIO).exp()
    if mode.endswith("truncate"):
        return weight.clamp(max=cap)
    return torch.where(weight > cap, 0, weight)


def off_policy_keep(
    logprobs: Tensor, behaviour_logprobs: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """False on rows with negative advantage that the policy has moved away from. Bool, broadcasts to (N, T).

    Off-policy sequence masking, DeepSeek-V3.2 (2512.02556): drop where A < 0 and the row's mean of
    logp_behaviour - logp exceeds the threshold (nats per token).

    Args:
        logprobs: (N, T) of the policy, finite where `mask` is False.
        behaviour_logprobs: (N, T) of the policy that sampled the rows.
        advantages: (N, 1) or (N, T).
        mask: (N, T) bool.
        threshold: nats per token.
    """
    moved = torch.where(mask, behaviour_logprobs - logprobs, 0).detach().sum(dim=1, keepdim=True)
    mean = moved / mask.sum(dim=1, keepdim=True).clamp(min=1)  # (N, 1)
    return (advantages >= 0) | (mean <= threshold)
