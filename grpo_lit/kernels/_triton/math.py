"""Device functions shared by the kernels; formulas in ``grpo_lit.kernels.token_terms``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def k3_terms(difference):  # type: ignore[no-untyped-def]
    """(expm1(d) - d, expm1(d)) with the tangent at 20 beyond 20.

    A power series up to |d| = 1/4 (its first left-out term is below 1e-12): exp(d) - 1 - d has lost every
    digit near 0, and Triton has no expm1.
    """
    d = tl.minimum(difference, 20.0)
    series = 1 / 5040 + d * (1 / 40320 + d * (1 / 362880))
    series = 1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d * (1 / 720 + d * series))))
    near = tl.abs(d) < 0.25
    value = tl.where(near, d * d * series, tl.exp(d) - 1.0 - d)
    growth = value + d
    return value + growth * (difference - d), growth


@triton.jit
def token_terms(  # type: ignore[no-untyped-def]
    logp,
    old,
    advantage,
    weight,
    ref,
    epsilon_low,
    epsilon_high,
    delta,
    beta,
    cispo_cap,
    CISPO: tl.constexpr,
    HAS_REF: tl.constexpr,
):
    """(loss, d loss / d logprob) of tokens, scalars or blocks alike, without the entropy term."""
    live = weight != 0.0
    logp = tl.where(live, logp, 0.0)
    adv = tl.where(live, advantage, 0.0)
    ratio = tl.exp(tl.where(adv != 0.0, logp - old, 0.0))
    if CISPO:
        slope = -tl.minimum(ratio, cispo_cap) * adv
        policy = tl.where(adv != 0.0, slope * logp, 0.0)
    else:
        upper = 1.0 + epsilon_high
        lower = 1.0 - epsilon_low
        high = (adv > 0.0) & (ratio > upper)
        low = (adv < 0.0) & (ratio < lower)
        dual = (adv < 0.0) & (ratio > delta)
        value = tl.where(high, upper, tl.where(low, lower, tl.where(dual, delta, ratio)))
        policy = tl.where(adv != 0.0, -adv * value, 0.0)
        slope = tl.where((adv == 0.0) | high | low | dual, 0.0, -adv * ratio)
    if HAS_REF:
        kl, growth = k3_terms(tl.where(live, ref - logp, 0.0))
        policy += beta * kl
        slope -= beta * growth
    return tl.where(live, weight * policy, 0.0), tl.where(live, weight * slope, 0.0)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """tanh through exp, saturating without overflow; absolute error about 1e-7."""
    return 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(x, 20.0)) + 1.0)
