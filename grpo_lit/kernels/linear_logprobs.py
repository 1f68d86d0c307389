"""Selected log-probabilities and entropy straight from hidden states; the (rows, V) logits never exist.

With hidden states h (rows, H), the output layer W (V, H), bias b (V,), chosen tokens a (rows,)::

    z = h W^T + b                 x = cap tanh(z / cap) / temperature   (x = z / temperature without a cap)
    logprob = x_a - logsumexp(x)          entropy = -sum_v p_v ln p_v,   p = softmax(x), in nats

Gradients, with g = dL/dlogprob and e = dL/dentropy of a row (entropy: differentiate -sum p ln p)::

    dL/dx_v = g (1[v = a] - p_v) - e p_v (ln p_v + entropy)
    dL/dz_v = dL/dx_v (1 - tanh^2(z_v / cap)) / temperature
    dL/dh = dL/dz W       dL/dW = dL/dz^T h       dL/db = sum over rows of dL/dz

**Why the backward is free for a frozen head.** g multiplies a whole row, so dL/dh = g J with
J = d logprob / dh of the shape of h, which does not depend on g. The forward pass has the softmax of
a chunk in its hands, so it computes J there with the one extra product any backward would need, and the
backward is a multiplication by g. The logits are recomputed in the backward only when the entropy's
gradient is asked for, or when the head or its bias trains.

Memory over inputs and outputs: one chunk of logits (``chunk_rows`` x V) and J; no buffer for a frozen head.
Products accumulate in float32; the softmax is float32 (float64 for float64 inputs). On CUDA the logits of
16-bit inputs are kept in float32, so log-probs don't carry the rounding of 16-bit logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels import logit_rows
from grpo_lit.kernels.dispatch import resolve_impl
from grpo_lit.kernels.head import (
    HEAD_ARGUMENTS,
    HeadGradients,
    HeadOptions,
    gradient_buffer,
    head_options,
    live_rows,
    project,
    times_weight,
)
from grpo_lit.kernels.logit_rows import RowOptions, RowResults
from grpo_lit.kernels.token_terms import compute_dtype


def linear_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
    num_tokens: int | None = None,
    logits_dtype: torch.dtype | None = None,
    impl: str | None = None,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each chosen token, and the entropy of its distribution, from hidden states.

    The formulas and what the backward costs are at the top of this file. Both outputs are differentiable
    with respect to ``hidden``, and to ``lm_head_weight`` and ``bias`` where these require a gradient. Under
    ``torch.no_grad()`` it is the scoring pass for old and reference log-probs.

    Args:
        hidden: (..., H) last hidden states, such as (N, T, H); float64, float32, bfloat16 or float16.
        lm_head_weight: (V, H) output layer, tied or not. ``hidden`` is cast to its dtype if they differ.
        completion_ids: (...) chosen tokens, of the leading shape of ``hidden``.
        bias: (V,) or None.
        temperature: sampling temperature, > 0.
        softcap: bound of the model's tanh cap on logits, > 0, or None.
        mask: (...) bool, True where the token counts. The others cost nothing, whatever their id, and get
            log-prob and entropy 0 and an exactly zero gradient. None: every token counts.
        num_tokens: how many entries of ``mask`` are True, if the caller knows: saves a wait for the device.
        logits_dtype: dtype a chunk's logits are kept in: None for float32 (float64 for float64), or the
            weight's own, which halves their memory and rounds them as full 16-bit logits are rounded.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.
        chunk_rows: rows of logits alive at a time; None sizes the chunk by memory.

    Returns:
        ``(logprobs, entropy)`` of the leading shape, float32 (float64 for float64 inputs), in nats.

    Raises:
        UserError: for shapes that don't fit, a temperature or cap that isn't positive, an unknown ``impl``.
    """
    options = head_options(
        hidden,
        lm_head_weight,
        completion_ids,
        bias,
        temperature=temperature,
        softcap=softcap,
        logits_dtype=logits_dtype,
        chunk_rows=chunk_rows,
        impl=resolve_impl("linear_logprobs", impl, hidden.device),
    )
    if mask is not None and (mask.shape != completion_ids.shape or mask.dtype != torch.bool):
        raise UserError("mask", (mask.dtype, tuple(mask.shape)), f"bool of shape {tuple(completion_ids.shape)}")
    shape = completion_ids.shape
    rows = hidden.reshape(-1, hidden.shape[-1]).to(lm_head_weight.dtype)
    ids = completion_ids.reshape(-1)
    kept = None if mask is None else live_rows(mask.reshape(-1), num_tokens)
    if kept is not None:
        rows, ids = rows.index_select(0, kept), ids.index_select(0, kept)
    trains = [t is not None and t.requires_grad for t in (rows, lm_head_weight, bias)]
    if torch.is_grad_enabled() and any(trains):
        logprobs, entropy = _LinearLogprobs.apply(rows, lm_head_weight, ids, bias, options)
    else:
        logprobs, entropy, _ = torch.ops.grpo_lit.linear_logprobs(rows, lm_head_weight, ids, bias, *options, False)
    if kept is not None:
        empty = logprobs.new_zeros(completion_ids.numel())
        logprobs, entropy = empty.index_copy(0, kept, logprobs), empty.index_copy(0, kept, entropy)
    return logprobs.reshape(shape), entropy.reshape(shape)


# The chunk loops are custom ops, so that torch.compile sees two nodes.


@torch.library.custom_op(
    "grpo_lit::linear_logprobs",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor ids, Tensor? bias, {HEAD_ARGUMENTS}, bool jacobian) "
    "-> (Tensor, Tensor, Tensor)",
)
def _op(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float,
    chunk_rows: int,
    impl: str,
    narrow: bool,
    jacobian: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropy, J) of (rows, H) hidden states; J is empty unless asked for."""
    options = RowOptions(temperature, softcap, len(weight), impl)
    out = RowResults.empty(ids, weight.dtype, loss=False, entropy=True)
    jac = torch.empty_like(hidden) if jacobian else hidden.new_empty(0)
    ones = torch.ones_like(out.logprobs[:chunk_rows])
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), chunk_rows):
            part = slice(start, start + chunk_rows)
            logits = project(hidden[part], weight, bias, narrow)
            if jacobian:
                dlogits = gradient_buffer(logits, weight, impl)
                g = ones[: len(logits)]
                logit_rows.given_rows(logits[None], ids[part], g, None, options, out.part(part), dlogits[None])
                times_weight(dlogits, weight, jac[part])
                del dlogits
            else:
                logit_rows.stat_rows(logits[None], ids[part], options, out.part(part))
            del logits  # before the next chunk's are made
    return out.logprobs, out.entropy, jac


@_op.register_fake
def _(hidden, weight, ids, bias, temperature, softcap, chunk_rows, impl, narrow, jacobian):  # type: ignore[no-untyped-def]
    logprobs = hidden.new_empty(hidden.shape[0], dtype=compute_dtype(weight.dtype))
    return logprobs, torch.empty_like(logprobs), torch.empty_like(hidden) if jacobian else hidden.new_empty(0)


@torch.library.custom_op(
    "grpo_lit::linear_logprobs_backward",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor ids, Tensor? bias, Tensor dlogprobs, Tensor? dentropy, "
    f"{HEAD_ARGUMENTS}, bool[3] wanted) -> (Tensor, Tensor, Tensor)",
)
def _backward_op(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    temperature: float,
    softcap: float,
    chunk_rows: int,
    impl: str,
    narrow: bool,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(d hidden, d weight, d bias) by recomputing the logits; those not wanted are empty."""
    options = RowOptions(temperature, softcap, len(weight), impl)
    out = RowResults.empty(ids, weight.dtype, loss=False, entropy=False)
    total = HeadGradients.start(hidden, weight, wanted)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), chunk_rows):
            part = slice(start, start + chunk_rows)
            logits = project(hidden[part], weight, bias, narrow)
            dlogits = gradient_buffer(logits, weight, impl)
            e = None if dentropy is None else dentropy[part]
            logit_rows.given_rows(logits[None], ids[part], dlogprobs[part], e, options, out.part(part), dlogits[None])
            del logits
            total.add(part, dlogits, hidden[part], weight)
            del dlogits
    return total.finish(weight, bias)


@_backward_op.register_fake
def _(hidden, weight, ids, bias, dlogprobs, dentropy, temperature, softcap, rows, impl, narrow, wanted):  # type: ignore[no-untyped-def]
    none = hidden.new_empty(0)
    return (
        torch.empty_like(hidden) if wanted[0] else none,
        torch.empty_like(weight) if wanted[1] else none,
        torch.empty_like(bias) if wanted[2] else none.to(compute_dtype(weight.dtype)),
    )


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, options: HeadOptions
    ) -> tuple[Tensor, Tensor]:
        frozen_head = not (ctx.needs_input_grad[1] or ctx.needs_input_grad[3])
        logprobs, entropy, jac = torch.ops.grpo_lit.linear_logprobs(hidden, weight, ids, bias, *options, frozen_head)
        ctx.set_materialize_grads(False)  # an entropy nobody differentiates costs nothing
        ctx.options, ctx.frozen_head = options, frozen_head
        ctx.save_for_backward(hidden, weight, ids, bias, jac)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlogprobs: Tensor | None, dentropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, ids, bias, jac = ctx.saved_tensors
        if dlogprobs is None:
            if dentropy is None:
                return (None,) * 5
            dlogprobs = torch.zeros_like(dentropy)
        if ctx.frozen_head and dentropy is None:
            return ((jac * dlogprobs[:, None]).to(hidden.dtype), *(None,) * 4)
        wanted = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
        grads = torch.ops.grpo_lit.linear_logprobs_backward(
            hidden,
            weight,
            ids,
            bias,
            dlogprobs.contiguous(),  # a sum's gradient is one number expanded over all tokens
            None if dentropy is None else dentropy.contiguous(),
            *ctx.options,
            wanted,
        )
        dhidden, dweight, dbias = (grad if want else None for grad, want in zip(grads, wanted, strict=True))
        return dhidden, dweight, None, dbias, None
