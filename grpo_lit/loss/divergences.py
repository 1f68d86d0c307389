"""Distances between policies, estimated from the log-probs of the sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Above it exp() goes on as a straight line (k3) or is held (metrics): e^20 = 4.9e8, and e^89 overflows."""


def k3_kl(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """k3 estimate of KL(policy || other), per token: expm1(d) - d with d = other_logprobs - logprobs.

    Schulman, "Approximating KL divergence" (2020); GRPO, 2402.03300 eq. 4. Never negative. expm1, since
    exp(d) - d - 1 has lost every digit at d = 1e-6 in float32. The derivative with respect to `logprobs` is
    -expm1(d).

    For d > 20 the curve is continued by its tangent at 20: finite in float32, with a gradient that still
    pulls back to the reference where the policy is furthest from it (a clamp would let go just there).
    """
    difference = other_logprobs - logprobs
    still = difference.detach()
    bounded = still.clamp(max=MAX_LOG_RATIO)
    slope = torch.expm1(bounded)
    value = slope - bounded + slope * (still - bounded)
    # The last term is 0 and carries the gradient. Autograd's own would be exp(d) - 1, without expm1's digits.
    return value + slope * (difference - still)


def k1_kl(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """k1 estimate of KL(old || policy), per token: -(logprobs - old_logprobs). Unbiased, may be negative."""
    return old_logprobs - logprobs


def adapt_entropy_coef(
    coef: float, entropy: float, *, target: float, delta: float = 0.005, low: float = 0.0, high: float = 1.0
) -> float:
    """Next entropy coefficient: up by `delta` while the entropy is at or below its target, otherwise down.

    Skywork-OR1, 2505.22312, section 4. Entropies in nats per token.
    """
    step = delta if entropy <= target else -delta
    return min(max(coef + step, low), high)
