"""Policy terms: one pure function per objective, each giving a loss per token.

Shared words: r = exp(log_ratio), the probability of the token now over that when it was sampled (or the
sequence's own ratio, see `leveled_log_ratio`); A = advantage; sg = no gradient flows. All arguments
broadcast to (N, T). Tokens with A = 0 give exactly 0 and no gradient, whatever their ratio: inf x 0 is never
formed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.loss.divergences import MAX_LOG_RATIO

# VESPO's own floor for its sequence weight, ln 1e-8
_VESPO_MIN_LOG_WEIGHT = -18.420680743952367


def leveled_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, ratio: str) -> Tensor:
    """Log of the ratio at the chosen level, (N, T).

    - ``token``: logp - logp_old.
    - ``sequence``: its mean over the row's tokens, for every token of the row. GSPO, 2507.18071 eq. 7.
    - ``sequence_token``: the same value, but the gradient of token t is that of its own logp:
      sg(s_i) x pi_t / sg(pi_t). GSPO-token, 2507.18071 eq. 14.

    Args:
        logprobs: (N, T), finite where `mask` is False.
        old_logprobs: (N, T), likewise.
        mask: (N, T) bool.
        ratio: the level.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0)
    if ratio == "token":
        return log_ratio
    mean = log_ratio.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)  # (N, 1)
    if ratio == "sequence_token":
        return mean.detach() + (logprobs - logprobs.detach())
    return mean.expand_as(log_ratio)


def clip_masks(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens the clip holds: below 1 - epsilon_low with A < 0, above 1 + epsilon_high with A > 0, and
    above delta with A < 0. Strict comparisons: at the exact edge the unclipped gradient is used.

    Returns:
        (low, high, dual), bool, shape of the arguments broadcast together.
    """
    ratio = log_ratio.detach().exp()
    low = (advantages < 0) & (ratio < 1 - epsilon_low)
    high = (advantages > 0) & (ratio > 1 + epsilon_high)
    dual = (advantages < 0) & (ratio > delta) if delta is not None else torch.zeros_like(low)
    return low, high, dual


def clip_objective(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> Tensor:
    """-min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A), PPO (1707.06347) eq. 7 in GRPO's use.

    epsilon_high > epsilon_low is DAPO's clip-higher (2503.14476). With `delta`, r is also held at delta from
    above where A < 0 (dual clip, 1912.09729 eq. 5; two-sided clip of INTELLECT-2, 2505.07291).
    """
    low, high, dual = clip_masks(log_ratio, advantages, epsilon_low=epsilon_low, epsilon_high=epsilon_high, delta=delta)
    # The clipped value is a constant. torch.minimum would share the gradient at a tie, and its backward would
    # form 0 x inf where the ratio overflows.
    held = torch.zeros_like(log_ratio)
    held = torch.where(low, 1 - epsilon_low, held)
    held = torch.where(high, 1 + epsilon_high, held)
    held = torch.where(dual, delta if delta is not None else 0.0, held)
    moving = ~(low | high | dual) & (advantages != 0)
    ratio = torch.where(moving, torch.where(moving, log_ratio, 0).exp(), held)
    return -advantages * ratio


def unclipped_objective(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """-r A: importance-weighted policy gradient without a trust region; what KL-Cov (2505.22617) adds to."""
    log_ratio = torch.where(advantages != 0, log_ratio, 0)
    return -advantages * log_ratio.exp()


def reinforce_objective(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-A logp: the plain policy gradient, no ratio at all. GPG, 2504.02546; RLOO, 2402.14740."""
    return -advantages * torch.where(advantages != 0, logprobs, 0)


def cispo_objective(log_ratio: Tensor, logprobs: Tensor, advantages: Tensor, *, cap: float) -> Tensor:
    """-sg(min(r, cap)) A logp. CISPO, 2506.13585 eq. 4; cap 5 in ScaleRL, 2510.13786.

    The cap bounds the weight and never silences a token. It is the bound itself, not 1 + epsilon.
    """
    moving = advantages != 0
    weight = torch.where(moving, log_ratio.detach().exp().clamp(max=cap), 0)
    return -weight * advantages * torch.where(moving, logprobs, 0)


def sapo_objective(log_ratio: Tensor, advantages: Tensor, *, tau_positive: float, tau_negative: float) -> Tensor:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A. SAPO, 2511.20347.

    A soft gate in place of the clip: the gradient at r = 1 is that of r A, and it fades on both sides.
    """
    moving = advantages != 0
    # Held at e^20: the sigmoid is flat there anyway, and exp's overflow would make its gradient 0 x inf.
    ratio = torch.where(moving, log_ratio, 0).clamp(max=MAX_LOG_RATIO).exp()
    positive = torch.full_like(ratio, tau_positive)
    tau = torch.where(advantages > 0, positive, torch.full_like(ratio, tau_negative))
    return torch.where(moving, -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau, 0)


def vespo_weights(
    token_log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    log_correction: Tensor | None = None,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Tensor:
    """phi(w) = w^k e^(lambda (1 - w)), w = product of the row's token ratios; phi(1) = 1. (N, T), detached.

    VESPO, 2602.10693. k and lambda by the sign of the advantage. The exponents are bounded as in its code.
    `log_correction` (N, T) is added to the token log-ratios: ln(p_old / p_rollout), truncated or masked.
    """
    log_ratio = torch.where(mask, token_log_ratio.detach(), 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if log_correction is not None:
        correction = torch.where(mask, log_correction, 0)
        log_ratio = log_ratio + correction.clamp(_VESPO_MIN_LOG_WEIGHT, MAX_LOG_RATIO)
    log_weight = log_ratio.sum(dim=1, keepdim=True).clamp(_VESPO_MIN_LOG_WEIGHT, MAX_LOG_RATIO)  # (N, 1)
    positive = advantages >= 0
    k = torch.where(positive, k_positive, k_negative)
    scale = torch.where(positive, lambda_positive, lambda_negative)
    return (scale + k * log_weight - scale * log_weight.exp()).exp().to(token_log_ratio.dtype)


def vespo_objective(weights: Tensor, logprobs: Tensor, advantages: Tensor) -> Tensor:
    """-sg(phi) A logp with phi from `vespo_weights`."""
    return -weights.detach() * advantages * torch.where(advantages != 0, logprobs, 0)


def gmpo_log_ratio(
    token_log_ratio: Tensor, advantages: Tensor, mask: Tensor, *, epsilon_low: float, epsilon_high: float
) -> Tensor:
    """mean_t of the clipped log-ratios, (N, T), the same along a row. GMPO, 2507.20673.

    Its objective is -A exp of this: the geometric mean of the row's ratios. The log-ratio of each token is
    held at epsilon_high from above where A > 0 and at -epsilon_low from below where A < 0 (the paper uses 0.4
    for both), so one wild token can't carry the row.

    Args:
        token_log_ratio: (N, T).
        advantages: (N, 1), or (N, T) of one sign along the row.
        mask: (N, T) bool.
        epsilon_low: bound in log space.
        epsilon_high: bound in log space.
    """
    log_ratio = torch.where(mask & (advantages != 0), token_log_ratio, 0)
    upper = log_ratio.clamp(max=epsilon_high)
    lower = log_ratio.clamp(min=-epsilon_low)
    held = torch.where(advantages > 0, upper, lower)
    mean = held.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return mean.expand_as(log_ratio)
