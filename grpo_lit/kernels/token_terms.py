"""The part of the loss that the kernels can do: per-token loss and its derivative, in closed form.

With r = exp(logprob - old_logprob), A the advantage, w the token's weight, d = ref_logprob - logprob::

    clip     policy = -min(r A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A), r <= delta where A < 0
             d policy / d logprob = -A r, or 0 on a token held by the clip
    cispo    policy = -min(r, cap) A logprob          d policy / d logprob = -min(r, cap) A
    k3       kl = expm1(d) - d                        d kl / d logprob = -expm1(d)
    loss = w (policy + beta kl - entropy_coef entropy)

PPO 1707.06347 eq. 7, GRPO 2402.03300 eq. 3-4, CISPO 2506.13585 eq. 4. A token with w = 0 gives 0 whatever
else it holds; one with A = 0 has no policy term (no 0 x inf); beyond d = 20 the KL continues along its
tangent. Any other choice of the loss configuration runs through ``linear_logprobs`` and the plain loss on
(N, T).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from grpo_lit.errors import UserError

MAX_LOG_RATIO = 20.0

_ELSEWHERE = "the kernels do 'clip' and 'cispo' with token ratios; use linear_logprobs and grpo_loss for the others"
# what a configuration may also hold, and the one value of it that the kernels honour
_ONLY = {
    "ratio": "token",
    "kl_weighted": False,
    "off_policy_threshold": None,
    "token_rule": "none",
    "rollout_correction": "none",
}


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that softmax and loss run in: float64 for float64, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class LossScalars(Protocol):
    """What the kernels read from a loss configuration (``grpo_lit.loss.LossConfig`` has it all)."""

    @property
    def epsilon_low(self) -> float: ...
    @property
    def epsilon_high(self) -> float: ...
    @property
    def beta(self) -> float: ...


class TokenScalars(NamedTuple):
    """The scalars of the formulas above, checked. ``delta`` is inf where there is no dual clip."""

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    delta: float = float("inf")
    beta: float = 0.0
    entropy_coef: float = 0.0
    cispo_cap: float = 5.0
    cispo: bool = False

    @classmethod
    def unpack(cls, numbers: list[float]) -> TokenScalars:
        """Back from the list of floats that a custom op can take."""
        values = dict(zip(cls._fields, numbers, strict=True))
        return cls(**values | {"cispo": bool(numbers[-1])})  # type: ignore[arg-type]


def token_scalars(config: LossScalars | None) -> TokenScalars:
    """Reads a loss configuration; None means the defaults.

    Raises:
        UserError: if the configuration asks for something the kernels don't do.
    """
    if config is None:
        return TokenScalars()
    objective = getattr(config, "objective", "clip")
    if objective not in ("clip", "cispo"):
        raise UserError("config.objective", objective, _ELSEWHERE)
    for name, only in _ONLY.items():
        value = getattr(config, name, only)
        if value != only:
            raise UserError(f"config.{name}", value, f"{only!r}; {_ELSEWHERE}")
    delta = getattr(config, "delta", None)
    return TokenScalars(
        epsilon_low=float(config.epsilon_low),
        epsilon_high=float(config.epsilon_high),
        delta=float("inf") if delta is None else float(delta),
        beta=float(config.beta),
        entropy_coef=float(getattr(config, "entropy_coef", 0.0)),
        cispo_cap=float(getattr(config, "cispo_cap", 5.0)),
        cispo=objective == "cispo",
    )


def token_terms(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    ref_logprobs: Tensor | None,
    scalars: TokenScalars,
) -> tuple[Tensor, Tensor]:
    """(loss, d loss / d logprob) of each token without the entropy term, in plain torch.

    Args:
        logprobs: any shape, float32 or float64; the others broadcast to it.
        old_logprobs: log-probs of the policy that is the ratio's denominator.
        advantages: relative rewards.
        weights: weight of each token, 0 where it doesn't count.
        ref_logprobs: reference policy, or None for no KL term.
        scalars: the loss's scalars.
    """
    live = weights != 0
    logp = torch.where(live, logprobs, 0)
    adv = torch.where(live, advantages.to(logp.dtype), 0)
    ratio = torch.where(live & (adv != 0), logp - old_logprobs, 0).exp()
    if scalars.cispo:
        slope = -ratio.clamp(max=scalars.cispo_cap) * adv
        policy = torch.where(adv != 0, slope * logp, 0)
    else:
        held = torch.where(adv > 0, ratio > 1 + scalars.epsilon_high, ratio < 1 - scalars.epsilon_low)
        held |= (adv < 0) & (ratio > scalars.delta)
        from_above = ratio.clamp(max=1 + scalars.epsilon_high)
        policy = -adv * torch.where(adv > 0, from_above, ratio.clamp(1 - scalars.epsilon_low, scalars.delta))
        slope = torch.where(held | (adv == 0), 0, -adv * ratio)
    if ref_logprobs is not None and scalars.beta != 0:
        difference = torch.where(live, ref_logprobs - logp, 0)
        bounded = difference.clamp(max=MAX_LOG_RATIO)
        growth = torch.expm1(bounded)
        policy = policy + scalars.beta * (growth - bounded + growth * (difference - bounded))
        slope = slope - scalars.beta * growth
    live_weights = torch.where(live, weights, 0).to(logp.dtype)
    return live_weights * policy, live_weights * slope


class TokenInputs(NamedTuple):
    """The per-token inputs of a loss, checked and laid flat: (rows,) each, contiguous.

    ``advantages`` may have fewer, each for as many rows that follow one another (one a completion, say).
    ``old_logprobs`` None stands for the policy itself before any update: ratio 1, gradient as usual.
    """

    ids: Tensor
    old_logprobs: Tensor | None
    advantages: Tensor
    weights: Tensor
    ref_logprobs: Tensor | None


def flat_token_inputs(
    shape: torch.Size,
    completion_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    ref_logprobs: Tensor | None,
    scalars: TokenScalars,
    dtype: torch.dtype,
    spread: bool = True,
) -> TokenInputs:
    """Checks the inputs of the fused losses against the token shape and flattens them.

    Args:
        shape: leading shape of the logits or hidden states, such as (N, T) or (rows,).
        completion_ids: of that shape.
        old_logprobs: of that shape, or None for ratio 1.
        advantages: of that shape, or one a row: (N,).
        weights: of that shape.
        ref_logprobs: of that shape; needed where beta is not 0.
        scalars: the loss's scalars.
        dtype: the dtype the loss runs in.
        spread: copy advantages of one a row to all of its tokens.

    Raises:
        UserError: for a shape that doesn't fit, or a missing reference.
    """
    named: dict[str, Any] = {"completion_ids": completion_ids, "weights": weights}
    named |= {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    for name, value in named.items():
        if value is not None and value.shape != shape:
            raise UserError(name, tuple(value.shape), f"the shape {tuple(shape)} of the tokens")
    if advantages.shape != shape:
        if advantages.shape != shape[:1]:
            accepted = f"{tuple(shape[:1])}, one a row, or {tuple(shape)}, one a token"
            raise UserError("advantages", tuple(advantages.shape), accepted)
        if spread:
            advantages = advantages.reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)
    if scalars.beta != 0 and ref_logprobs is None:
        raise UserError("ref_logprobs", None, f"given with beta={scalars.beta}")

    def flat(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.detach().reshape(-1).to(dtype).contiguous()

    old, ref = flat(old_logprobs), flat(ref_logprobs) if scalars.beta != 0 else None
    adv, wgt = flat(advantages), flat(weights)
    assert adv is not None
    assert wgt is not None
    return TokenInputs(completion_ids.reshape(-1).contiguous(), old, adv, wgt, ref)
