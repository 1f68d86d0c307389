"""The loss and the whole gradient of the logits in one pass over the logits.

Formulas in ``token_terms`` (loss) and ``logit_rows`` (softmax and gradient). The forward pass reads each
row of logits once and writes its gradient once, ``(rows, V)`` in the dtype of the logits, or over the
logits themselves with ``inplace=True``; the backward only multiplies by what comes from above, and not even
that where it is 1. Eager PyTorch keeps float32 logits, their log-softmax and two more tensors of that size
for the same result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels import logit_rows
from grpo_lit.kernels.dispatch import resolve_impl
from grpo_lit.kernels.logit_rows import RowOptions, RowResults
from grpo_lit.kernels.token_terms import (
    LossScalars,
    TokenInputs,
    TokenScalars,
    compute_dtype,
    flat_token_inputs,
    token_scalars,
)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TokenStats(NamedTuple):
    """What a fused loss saw on the way; no gradient. Tokens of weight 0 hold 0.

    Attributes:
        logprobs: log-prob of each chosen token, leading shape of the logits.
        entropy: entropy in nats of each distribution.
    """

    logprobs: Tensor
    entropy: Tensor


def fused_logits_grpo(
    logits: Tensor,
    completion_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    inplace: bool = False,
    masked_rows: str = "zeros",
    return_stats: bool = False,
    config: LossScalars | None = None,
    impl: str | None = None,
) -> Any:
    """GRPO loss from logits: the sum over tokens of weight x (policy + beta k3 - entropy_coef entropy).

    The loss is differentiable with respect to ``logits`` alone, once. Tokens of weight 0 are not read: they
    may hold NaN, and any id; their gradient is exactly 0.

    Args:
        logits: (N, T, V) or (rows, V), last dimension contiguous; float32, bfloat16 or float16, and float64
            in torch.
        completion_ids: leading shape of ``logits``, the chosen tokens.
        old_logprobs: that shape, the ratio's denominator at the same temperature; None for ratio 1 (the
            first pass over a rollout), with the gradient it has there.
        advantages: that shape, or (N,): one a row of tokens.
        weights: that shape, from ``token_weights``; 0 where a token doesn't count.
        ref_logprobs: that shape; needed where ``config.beta`` is not 0.
        temperature: sampling temperature the logits are divided by.
        vocab_size: columns of ``logits`` that are tokens, where the rest is padding; None for all.
        inplace: write the gradient over ``logits``, which then mean nothing to anyone else. Saves a tensor
            of their size.
        masked_rows: "zeros" writes the gradient 0 of tokens of weight 0. "untouched" leaves their rows of the
            gradient as they are (in place: the logits; otherwise whatever the memory held), for a caller that never
            reads those rows: half of them masked is then half of the bytes, and three quarters with "zeros".
        return_stats: also return log-probs and entropy.
        config: a loss configuration the kernels can do (see ``token_terms``); None for the defaults.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.

    Returns:
        The loss, a float32 scalar; with ``return_stats``, ``(loss, TokenStats)``.

    Raises:
        UserError: for shapes or dtypes that don't fit, and a configuration that the kernels don't do.
    """
    scalars = token_scalars(config)
    grid = _grid(logits, inplace)
    vocab = logits.shape[-1] if vocab_size is None else vocab_size
    if not 0 < vocab <= logits.shape[-1]:
        raise UserError("vocab_size", vocab_size, f"1 to the {logits.shape[-1]} columns of logits")
    if not temperature > 0:
        raise UserError("temperature", temperature, "> 0")
    inputs = flat_token_inputs(
        logits.shape[:-1],
        completion_ids,
        old_logprobs,
        advantages,
        weights,
        ref_logprobs,
        scalars,
        compute_dtype(logits.dtype),
        spread=False,
    )
    if masked_rows not in ("zeros", "untouched"):
        raise UserError("masked_rows", masked_rows, "'zeros' or 'untouched'")
    chosen = resolve_impl("fused_logits_grpo", impl, logits.device)
    options = RowOptions(float(temperature), 0.0, vocab, chosen, masked_rows == "zeros")
    if torch.is_grad_enabled() and logits.requires_grad:
        loss, logprobs, entropy = _FusedLogitsGRPO.apply(grid, inputs, scalars, options, return_stats, inplace)
    else:
        loss, logprobs, entropy, _ = torch.ops.grpo_lit.fused_logits_grpo(
            grid, *inputs, list(scalars), *options, return_stats, False
        )
    if not return_stats:
        return loss
    shape = completion_ids.shape
    return loss, TokenStats(logprobs.reshape(shape), entropy.reshape(shape))


def _grid(logits: Tensor, inplace: bool) -> Tensor:
    """(N, T, V) view of the logits with contiguous rows."""
    if logits.dim() not in (2, 3):
        raise UserError("logits", tuple(logits.shape), "(N, T, V) or (rows, V)")
    if logits.dtype not in _FLOATS:
        raise UserError("logits.dtype", logits.dtype, "float32, bfloat16, float16 or float64")
    if logits.stride(-1) != 1:
        if inplace:
            raise UserError("logits.stride()", logits.stride(), "1 in the last dimension with inplace=True")
        logits = logits.contiguous()
    return logits if logits.dim() == 3 else logits[None]


_ARGUMENTS = (
    "Tensor ids, Tensor? old, Tensor advantages, Tensor weights, Tensor? ref, float[] scalars, "
    "float temperature, float softcap, int vocab_size, str impl, bool zero_masked, bool want_entropy"
)


def _run(
    logits: Tensor,
    grad: Tensor | None,
    ids: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    ref: Tensor | None,
    scalars: list[float],
    temperature: float,
    softcap: float,
    vocab_size: int,
    impl: str,
    zero_masked: bool,
    want_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and (logprob, entropy) per row, empty if not wanted; the logits' gradient goes into ``grad``."""
    inputs = TokenInputs(ids, old, advantages, weights, ref)
    options = RowOptions(temperature, softcap, vocab_size, impl, zero_masked)
    out = RowResults.empty(ids, logits.dtype, loss=True, entropy=want_entropy)
    logit_rows.loss_rows(logits, inputs, TokenScalars.unpack(scalars), options, out, grad)
    return logit_rows.total(out.loss, impl), out.logprobs, out.entropy


@torch.library.custom_op(
    "grpo_lit::fused_logits_grpo",
    mutates_args=(),
    schema=f"(Tensor logits, {_ARGUMENTS}, bool want_grad) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _op(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """What `_run` gives, and the logits' gradient, empty if not wanted."""
    *others, want_grad = arguments
    grad = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device) if want_grad else None
    return *_run(logits, grad, *others), logits.new_empty(0) if grad is None else grad


@torch.library.custom_op(
    "grpo_lit::fused_logits_grpo_",
    mutates_args=("logits",),
    schema=f"(Tensor(a!) logits, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def _op_inplace(logits: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """The same with the gradient written over the logits."""
    return _run(logits, logits, *arguments)


def _fake_rows(logits: Tensor, ids: Tensor, want_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.new_empty(ids.shape, dtype=compute_dtype(logits.dtype))
    return rows.new_empty(()), rows, torch.empty_like(rows) if want_entropy else rows.new_empty(0)


@_op.register_fake
def _(logits, ids, old, adv, w, ref, scalars, tau, cap, vocab, impl, zero, want_entropy, want_grad):  # type: ignore[no-untyped-def]
    grad = logits.new_empty(logits.shape) if want_grad else logits.new_empty(0)
    return (*_fake_rows(logits, ids, want_entropy), grad)


@_op_inplace.register_fake
def _(logits, ids, old, adv, w, ref, scalars, tau, cap, vocab, impl, zero, want_entropy):  # type: ignore[no-untyped-def]
    return _fake_rows(logits, ids, want_entropy)


class _FusedLogitsGRPO(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        inputs: TokenInputs,
        scalars: TokenScalars,
        options: RowOptions,
        want_entropy: bool,
        inplace: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        arguments = (logits, *inputs, list(scalars), *options, want_entropy)
        if inplace:
            loss, logprobs, entropy = torch.ops.grpo_lit.fused_logits_grpo_(*arguments)
            grad = logits
        else:
            loss, logprobs, entropy, grad = torch.ops.grpo_lit.fused_logits_grpo(*arguments, True)
        ctx.set_materialize_grads(False)  # no zeros for the other two
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(logprobs, entropy)
        return loss, logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if dloss is None:
            return (None,) * 6
        # Scaling in place marks the saved tensor as changed, so a second backward through it fails, loudly.
        grad = ctx.saved_tensors[0].detach()
        torch.ops.grpo_lit.scale_(grad, dloss)
        return grad, *(None,) * 5
