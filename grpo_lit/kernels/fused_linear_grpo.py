"""The loss, and the gradient of the hidden states, straight from hidden states and the output layer.

Formulas in ``token_terms`` (loss) and ``logit_rows`` (softmax and gradient). For each chunk of tokens the
forward pass makes the logits (one product), turns them into their own gradient (``fused_logits_grpo`` without
a second tensor), and takes that through the layer at once (a second product). So a step costs two products
instead of the three of a recomputing backward, the (tokens, V) logits never exist, a frozen head gets no
gradient buffer, and memory doesn't grow with the number of tokens. Tokens of weight 0 are left out of the
products altogether.

With ``linear_logprobs`` and any loss on (N, T) the two products are the same; this op saves the passes over
(N, T) in between and can train the head without a third product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_lit.kernels import logit_rows
from grpo_lit.kernels.dispatch import resolve_impl
from grpo_lit.kernels.fused_logits_grpo import TokenStats
from grpo_lit.kernels.head import (
    HEAD_ARGUMENTS,
    HeadGradients,
    HeadOptions,
    gradient_buffer,
    head_options,
    live_rows,
    project,
)
from grpo_lit.kernels.logit_rows import RowOptions, RowResults
from grpo_lit.kernels.token_terms import (
    LossScalars,
    TokenInputs,
    TokenScalars,
    compute_dtype,
    flat_token_inputs,
    token_scalars,
)


def fused_linear_grpo(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    num_tokens: int | None = None,
    logits_dtype: torch.dtype | None = None,
    return_stats: bool = False,
    config: LossScalars | None = None,
    impl: str | None = None,
    chunk_rows: int | None = None,
) -> Any:
    """GRPO loss from hidden states: the sum over tokens of weight x (policy + beta k3 - entropy_coef
    entropy).

    Differentiable, once, with respect to ``hidden``, and to ``lm_head_weight`` and ``bias`` where these
    require a gradient.

    Args:
        hidden: (..., H) last hidden states, such as (N, T, H); float64, float32, bfloat16 or float16.
        lm_head_weight: (V, H) output layer, tied or not. ``hidden`` is cast to its dtype if they differ.
        completion_ids: (...) chosen tokens, of the leading shape of ``hidden``.
        old_logprobs: that shape, the ratio's denominator at the same temperature; None for ratio 1 (the first
            pass over a rollout), with the gradient it has there.
        advantages: that shape, or (N,): one a row of tokens.
        weights: that shape, from ``token_weights``; 0 where a token doesn't count.
        ref_logprobs: that shape; needed where ``config.beta`` is not 0.
        bias: (V,) or None.
        temperature: sampling temperature.
        softcap: bound of the model's tanh cap on logits, > 0, or None.
        num_tokens: how many weights aren't 0, if the caller knows: saves a wait for the device.
        logits_dtype: dtype a chunk's logits are kept in: None for float32 (float64 for float64), or the
            weight's own, which halves their memory and rounds them as full 16-bit logits are rounded.
        return_stats: also return log-probs and entropy.
        config: a loss configuration the kernels can do (see ``token_terms``); None for the defaults.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.
        chunk_rows: rows of logits alive at a time; None sizes the chunk by memory.

    Returns:
        The loss, a float32 scalar; with ``return_stats``, ``(loss, TokenStats)``.

    Raises:
        UserError: for shapes that don't fit, and a configuration that the kernels don't do.
    """
    scalars = token_scalars(config)
    options = head_options(
        hidden,
        lm_head_weight,
        completion_ids,
        bias,
        temperature=temperature,
        softcap=softcap,
        logits_dtype=logits_dtype,
        chunk_rows=chunk_rows,
        impl=resolve_impl("fused_linear_grpo", impl, hidden.device),
    )
    inputs = flat_token_inputs(
        hidden.shape[:-1],
        completion_ids,
        old_logprobs,
        advantages,
        weights,
        ref_logprobs,
        scalars,
        compute_dtype(lm_head_weight.dtype),
    )
    kept = live_rows(inputs.weights != 0, num_tokens)
    rows = hidden.reshape(-1, hidden.shape[-1]).to(lm_head_weight.dtype)
    if kept is not None:
        rows = rows.index_select(0, kept)
        inputs = TokenInputs(*(None if t is None else t.index_select(0, kept) for t in inputs))  # type: ignore[arg-type]
    result = _FusedLinearGRPO.apply(
        rows, lm_head_weight, bias, inputs, scalars, options, return_stats, torch.is_grad_enabled()
    )
    if not return_stats:
        return result[0]
    stats = result[1:]
    if kept is not None:
        empty = result[1].new_zeros(completion_ids.numel())
        stats = [empty.index_copy(0, kept, t) for t in stats]
    return result[0], TokenStats(*(t.reshape(completion_ids.shape) for t in stats))


@torch.library.custom_op(
    "grpo_lit::fused_linear_grpo",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor ids, Tensor? old, Tensor advantages, "
    f"Tensor weights, Tensor? ref, float[] scalars, {HEAD_ARGUMENTS}, bool want_entropy, bool[3] wanted) "
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    old: Tensor | None,
    advantages: Tensor,
    weights: Tensor,
    ref: Tensor | None,
    scalars: list[float],
    temperature: float,
    softcap: float,
    chunk_rows: int,
    impl: str,
    narrow: bool,
    want_entropy: bool,
    wanted: list[bool],
) -> tuple[Tensor, ...]:
    """(loss, logprobs, entropy) per row, then d hidden, d weight, d bias; what isn't wanted is empty."""
    options = RowOptions(temperature, softcap, len(weight), impl)
    out = RowResults.empty(ids, weight.dtype, loss=True, entropy=want_entropy)
    unpacked = TokenScalars.unpack(scalars)
    inputs = (ids, old, advantages, weights, ref)
    total = HeadGradients.start(hidden, weight, wanted)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), chunk_rows):
            part = slice(start, start + chunk_rows)
            chunk = TokenInputs(*(None if t is None else t[part] for t in inputs))  # type: ignore[arg-type]
            logits = project(hidden[part], weight, bias, narrow)
            dlogits = gradient_buffer(logits, weight, impl) if any(wanted) else None
            grad = None if dlogits is None else dlogits[None]
            logit_rows.loss_rows(logits[None], chunk, unpacked, options, out.part(part), grad)
            del logits  # before the next chunk's are made
            if dlogits is not None:
                total.add(part, dlogits, hidden[part], weight)
            del dlogits, grad
    return *out, *total.finish(weight, bias)


@_op.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    want_entropy, wanted = rest[-2:]
    row = hidden.new_empty(hidden.shape[0], dtype=compute_dtype(weight.dtype))
    return (
        row,
        torch.empty_like(row),
        torch.empty_like(row) if want_entropy else row.new_empty(0),
        torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0),
        torch.empty_like(weight) if wanted[1] else hidden.new_empty(0),
        torch.empty_like(bias) if bias is not None and wanted[2] else row.new_empty(0),
    )


class _FusedLinearGRPO(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        inputs: TokenInputs,
        scalars: TokenScalars,
        options: HeadOptions,
        want_entropy: bool,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wanted = [with_grad and needed for needed in ctx.needs_input_grad[:3]]
        loss, logprobs, entropy, *grads = torch.ops.grpo_lit.fused_linear_grpo(
            hidden, weight, bias, *inputs, list(scalars), *options, want_entropy, wanted
        )
        ctx.wanted = wanted
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(logprobs, entropy)
        return loss.sum(), logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        # Scaling in place marks the saved tensors as changed, so a second backward through them fails,
        # loudly.
        grads = [grad.detach() for grad in ctx.saved_tensors]
        for grad, want in zip(grads, ctx.wanted, strict=True):
            if want:
                torch.ops.grpo_lit.scale_(grad, dloss)
        return *(g if want else None for g, want in zip(grads, ctx.wanted, strict=True)), *(None,) * 5
