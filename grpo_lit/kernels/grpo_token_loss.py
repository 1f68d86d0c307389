"""The loss from log-probs of the chosen tokens, with its derivative computed in the same pass.

Formulas in ``token_terms``. The Triton version reads each token once, writes d loss / d logprob once, and
adds the losses up in two steps, a block at a time, in a fixed order: the same inputs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels.dispatch import resolve_impl
from grpo_lit.kernels.token_terms import LossScalars, TokenScalars, compute_dtype, token_scalars, token_terms


def grpo_token_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    config: LossScalars | None = None,
    impl: str | None = None,
) -> Tensor:
    """GRPO loss from selected log-probs: the sum over tokens of weight x (policy + beta k3).

    Differentiable with respect to ``logprobs`` alone, once. Tokens of weight 0 give exactly 0 and a
    gradient of exactly 0, whatever they hold.

    Args:
        logprobs: (N, T) or (T,), the policy's; computed in float32, or float64 (torch) if given so.
        old_logprobs: that shape, the ratio's denominator; None for ratio 1, the first pass over a rollout.
        advantages: that shape, or (N,): one a row.
        weights: that shape, from ``token_weights``; 0 where a token doesn't count.
        ref_logprobs: that shape; needed where ``config.beta`` is not 0.
        config: a loss configuration the kernels can do; None for the defaults. Its entropy bonus must be 0:
            there is no entropy here.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.

    Returns:
        The loss, a float32 scalar.

    Raises:
        UserError: for shapes that don't fit, and a configuration that this op doesn't do.
    """
    scalars = token_scalars(config)
    if scalars.entropy_coef != 0:
        raise UserError("config.entropy_coef", scalars.entropy_coef, "0 without logits; fused_logits_grpo has it")
    shape = logprobs.shape
    for name, value in (("old_logprobs", old_logprobs), ("weights", weights), ("ref_logprobs", ref_logprobs)):
        if value is not None and value.shape != shape:
            raise UserError(name, tuple(value.shape), f"the shape {tuple(shape)} of logprobs")
    if advantages.shape not in (shape, shape[:1]):
        raise UserError("advantages", tuple(advantages.shape), f"{tuple(shape[:1])} or {tuple(shape)}")
    if scalars.beta != 0 and ref_logprobs is None:
        raise UserError("ref_logprobs", None, f"given with beta={scalars.beta}")
    chosen = resolve_impl("grpo_token_loss", impl, logprobs.device)
    dtype = compute_dtype(logprobs.dtype)
    # one row of tokens, so that (T,) works too
    two_d = (lambda t: t) if logprobs.dim() == 2 else (lambda t: t[None])
    others = [
        None if t is None else two_d(t.detach()).to(dtype).contiguous()
        for t in (old_logprobs, weights, ref_logprobs if scalars.beta != 0 else None)
    ]
    adv = advantages.detach().to(dtype)
    adv = adv.contiguous() if adv.shape != shape else two_d(adv).contiguous()
    tokens = two_d(logprobs).to(dtype).contiguous()
    loss: Tensor = _GRPOTokenLoss.apply(tokens, others[0], adv, others[1], others[2], scalars, chosen)
    return loss


@torch.library.custom_op(
    "grpo_lit::grpo_token_loss",
    mutates_args=(),
    schema="(Tensor logprobs, Tensor? old, Tensor advantages, Tensor weights, Tensor? ref, float[] scalars, "
    "str impl) -> (Tensor, Tensor)",
)
def _op(
    logprobs: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    ref: Tensor | None,
    scalars: list[float],
    impl: str,
) -> tuple[Tensor, Tensor]:
    """(loss, d loss / d logprobs) of (N, T) tokens."""
    unpacked = TokenScalars.unpack(scalars)
    if impl == "triton" and logprobs.dtype == torch.float32:
        from grpo_lit.kernels._triton.token_loss import token_loss

        return token_loss(logprobs, old, advantages, weights, ref, unpacked)
    adv = advantages if advantages.dim() == 2 else advantages[:, None]
    before = logprobs if old is None else old
    loss, slope = token_terms(logprobs, before, adv, weights, ref, unpacked)
    return loss.sum(), slope


@_op.register_fake
def _(logprobs, old, advantages, weights, ref, scalars, impl):  # type: ignore[no-untyped-def]
    return logprobs.new_empty(()), torch.empty_like(logprobs)


class _GRPOTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        old: Tensor | None,
        advantages: Tensor,
        weights: Tensor,
        ref: Tensor | None,
        scalars: TokenScalars,
        impl: str,
    ) -> Tensor:
        loss: Tensor
        loss, slope = torch.ops.grpo_lit.grpo_token_loss(logprobs, old, advantages, weights, ref, list(scalars), impl)
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # Scaling in place marks the saved tensor as changed, so a second backward through it fails, loudly.
        grad = ctx.saved_tensors[0].detach()
        torch.ops.grpo_lit.scale_(grad, dloss)
        return grad, *(None,) * 6
