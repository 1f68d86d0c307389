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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels.dispatch import resolve_impl

_CHUNK_BYTES = {"cuda": 224 << 20, "cpu": 32 << 20}


class HeadOptions(NamedTuple):
    """What stands between the product with the output layer and the softmax.

    Attributes:
        temperature: the sampling temperature, folded into log-probs, entropy and gradients.
        softcap: bound of the tanh cap some models put on their logits; 0 for none.
        chunk_rows: rows of logits that exist at one time.
    """

    temperature: float
    softcap: float
    chunk_rows: int


def linear_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    completion_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    mask: Tensor | None = None,
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
        impl: ``"triton"``, ``"torch"`` or None for the device's default.
        chunk_rows: rows of logits alive at a time; None sizes the chunk by memory.

    Returns:
        ``(logprobs, entropy)`` of the leading shape, float32 (float64 for float64 inputs), in nats.

    Raises:
        UserError: for shapes that don't fit, a temperature or cap that isn't positive, an unknown ``impl``.
    """
    _check_arguments(hidden, lm_head_weight, completion_ids, bias, temperature, softcap, mask, chunk_rows)
    chosen = resolve_impl("linear_logprobs", impl, hidden.device)
    shape = completion_ids.shape
    rows = hidden.reshape(-1, hidden.shape[-1]).to(lm_head_weight.dtype)
    ids = completion_ids.reshape(-1)
    kept = None if mask is None else mask.reshape(-1).nonzero().squeeze(-1)
    if kept is not None:
        rows, ids = rows.index_select(0, kept), ids.index_select(0, kept)
    options = HeadOptions(
        float(temperature), float(softcap or 0.0), chunk_rows or default_chunk_rows(rows, lm_head_weight)
    )
    trains = [t is not None and t.requires_grad for t in (rows, lm_head_weight, bias)]
    if torch.is_grad_enabled() and any(trains):
        logprobs, entropy = _LinearLogprobs.apply(rows, lm_head_weight, ids, bias, options, chosen)
    else:
        logprobs, entropy, _ = torch.ops.grpo_lit.linear_logprobs(
            rows, lm_head_weight, ids, bias, *options, chosen, False
        )
    if kept is not None:
        empty = logprobs.new_zeros(completion_ids.numel())
        logprobs, entropy = empty.index_copy(0, kept, logprobs), empty.index_copy(0, kept, entropy)
    return logprobs.reshape(shape), entropy.reshape(shape)


def _check_arguments(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    mask: Tensor | None,
    chunk_rows: int | None,
) -> None:
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise UserError("lm_head_weight", tuple(weight.shape), f"(V, H) with H = {hidden.shape[-1]}")
    if ids.shape != hidden.shape[:-1]:
        raise UserError("completion_ids", tuple(ids.shape), f"the shape {tuple(hidden.shape[:-1])} of hidden")
    if mask is not None and (mask.shape != ids.shape or mask.dtype != torch.bool):
        raise UserError("mask", (mask.dtype, tuple(mask.shape)), f"bool of shape {tuple(ids.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError("bias", tuple(bias.shape), f"({weight.shape[0]},)")
    if not temperature > 0:
        raise UserError("temperature", temperature, "> 0")
    if softcap is not None and not softcap > 0:
        raise UserError("softcap", softcap, "> 0, or None for no cap")
    if chunk_rows is not None and chunk_rows < 1:
        raise UserError("chunk_rows", chunk_rows, ">= 1, or None to size it by memory")


def default_chunk_rows(hidden: Tensor, weight: Tensor) -> int:
    """Rows of logits to hold at a time: what fits a fixed number of bytes, in whole tiles of 64 rows.

    A row costs V values of the softmax's dtype, and V of the weight's for the gradient.
    """
    budget = _CHUNK_BYTES["cuda" if hidden.is_cuda else "cpu"]
    row_bytes = weight.shape[0] * (softmax_dtype(weight).itemsize + weight.element_size())
    rows = max(1, budget // row_bytes)
    return rows // 64 * 64 if rows >= 64 else rows


def softmax_dtype(weight: Tensor) -> torch.dtype:
    """float64 for a float64 head, float32 for every other."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


# --- one chunk in plain torch: the reference ------------------------------------------------------------


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(rows, V) logits before cap and temperature, in the softmax's dtype."""
    dtype = softmax_dtype(weight)
    if weight.dtype in (torch.float32, torch.float64):
        logits = hidden @ weight.t()
    elif hidden.is_cuda:
        # float32 out of the float32 accumulator: no rounding to 16 bits on the way
        logits = torch.mm(hidden, weight.t(), out_dtype=dtype)
    else:
        logits = (hidden @ weight.t()).to(dtype)
    return logits if bias is None else logits.add_(bias)


def _activate(logits: Tensor, options: HeadOptions) -> tuple[Tensor, Tensor | None]:
    """(x, dx/dz up to the temperature) of the module docstring; overwrites ``logits``."""
    slope = None
    if options.softcap:
        squashed = logits.div_(options.softcap).tanh_()
        slope = 1 - squashed.square()
        logits = squashed.mul_(options.softcap)
    return logits.div_(options.temperature), slope


def _chunk_forward(
    hidden: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, options: HeadOptions, jacobian: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """logprob, entropy and, if asked, J = d logprob / d hidden of one chunk."""
    x, slope = _activate(project(hidden, weight, bias), options)
    x -= x.logsumexp(-1, keepdim=True)  # (rows, V) ln p
    logprobs = x.gather(-1, ids[:, None]).squeeze(-1)
    p = x.exp()
    # 0 ln 0 = 0, where ln p is -inf too (a bias of -inf forbids a token)
    entropy = -(x.masked_fill_(p == 0, 0.0) * p).sum(-1)
    if not jacobian:
        return logprobs, entropy, None
    dz = p.neg_()
    dz[torch.arange(len(ids), device=ids.device), ids] += 1
    if slope is not None:
        dz *= slope
    return logprobs, entropy, dz.div_(options.temperature).to(weight.dtype) @ weight


def _chunk_dlogits(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    dlogprobs: Tensor | None,
    dentropy: Tensor | None,
    options: HeadOptions,
) -> Tensor:
    """dL/dz (rows, V) of one chunk in the weight's dtype, from recomputed logits."""
    x, slope = _activate(project(hidden, weight, bias), options)
    x -= x.logsumexp(-1, keepdim=True)
    p = x.exp()
    if dentropy is None:
        dx = torch.zeros_like(p)
    else:
        x.masked_fill_(p == 0, 0.0)
        entropy = -(x * p).sum(-1, keepdim=True)
        dx = x.add_(entropy).mul_(p).mul_(-dentropy[:, None])
    if dlogprobs is not None:
        dx.addcmul_(p, dlogprobs[:, None], value=-1)
        dx[torch.arange(len(ids), device=ids.device), ids] += dlogprobs
    if slope is not None:
        dx *= slope
    return dx.div_(options.temperature).to(weight.dtype)


# --- the chunk loop, registered as custom ops so that torch.compile sees two nodes ------------------------


@torch.library.custom_op(
    "grpo_lit::linear_logprobs",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor ids, Tensor? bias, float temperature, float softcap, "
    "int chunk_rows, str impl, bool jacobian) -> (Tensor, Tensor, Tensor)",
)
def _linear_logprobs_op(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float,
    chunk_rows: int,
    impl: str,
    jacobian: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprobs, entropy, J); J is empty unless asked for."""
    options = HeadOptions(temperature, softcap, chunk_rows)
    logprobs = torch.empty(len(hidden), dtype=softmax_dtype(weight), device=hidden.device)
    entropy = torch.empty_like(logprobs)
    jac = torch.empty_like(hidden) if jacobian else hidden.new_empty(0)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), chunk_rows):
            part = slice(start, start + chunk_rows)
            lp, ent, j = _chunk_forward(hidden[part], weight, ids[part], bias, options, jacobian)
            logprobs[part], entropy[part] = lp, ent
            if j is not None:
                jac[part] = j
    return logprobs, entropy, jac


@_linear_logprobs_op.register_fake
def _(hidden, weight, ids, bias, temperature, softcap, chunk_rows, impl, jacobian):  # type: ignore[no-untyped-def]
    logprobs = hidden.new_empty(hidden.shape[0], dtype=softmax_dtype(weight))
    return logprobs, torch.empty_like(logprobs), torch.empty_like(hidden) if jacobian else hidden.new_empty(0)


@torch.library.custom_op(
    "grpo_lit::linear_logprobs_backward",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor ids, Tensor? bias, Tensor? dlogprobs, Tensor? dentropy, "
    "float temperature, float softcap, int chunk_rows, str impl, bool[3] wanted) -> (Tensor, Tensor, Tensor)",
)
def _linear_logprobs_backward_op(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    dlogprobs: Tensor | None,
    dentropy: Tensor | None,
    temperature: float,
    softcap: float,
    chunk_rows: int,
    impl: str,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(d hidden, d weight, d bias) by recomputing the logits; those not wanted are empty.

    d weight and d bias are summed over chunks in the softmax's dtype.
    """
    options = HeadOptions(temperature, softcap, chunk_rows)
    dhidden = torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0)
    dweight = torch.zeros(
        weight.shape if wanted[1] else (0,), dtype=softmax_dtype(weight), device=weight.device
    )
    dbias = dweight.new_zeros(len(weight) if wanted[2] else 0)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), chunk_rows):
            part = slice(start, start + chunk_rows)
            lp_part = None if dlogprobs is None else dlogprobs[part]
            ent_part = None if dentropy is None else dentropy[part]
            dz = _chunk_dlogits(hidden[part], weight, ids[part], bias, lp_part, ent_part, options)
            add_head_gradients(dz, hidden[part], weight, dhidden[part], dweight, dbias, wanted)
    out_bias = dbias if bias is None else dbias.to(bias.dtype)
    return dhidden, dweight.to(weight.dtype), out_bias


@_linear_logprobs_backward_op.register_fake
def _(hidden, weight, ids, bias, dlogprobs, dentropy, temperature, softcap, chunk_rows, impl, wanted):  # type: ignore[no-untyped-def]
    none = hidden.new_empty(0)
    return (
        torch.empty_like(hidden) if wanted[0] else none,
        torch.empty_like(weight) if wanted[1] else weight.new_empty(0),
        torch.empty_like(bias) if wanted[2] else weight.new_empty(0, dtype=softmax_dtype(weight)),
    )


def add_head_gradients(
    dlogits: Tensor,
    hidden: Tensor,
    weight: Tensor,
    dhidden: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    wanted: list[bool],
) -> None:
    """Writes a chunk's d hidden and adds its d weight and d bias to the running sums, where wanted."""
    if wanted[0]:
        torch.mm(dlogits, weight, out=dhidden)
    if wanted[1]:
        if dlogits.is_cuda and dlogits.dtype != dweight.dtype:
            dweight += torch.mm(dlogits.t(), hidden, out_dtype=dweight.dtype)
        else:
            dweight += dlogits.t() @ hidden
    if wanted[2]:
        dbias += dlogits.sum(0, dtype=dbias.dtype)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        bias: Tensor | None,
        options: HeadOptions,
        impl: str,
    ) -> tuple[Tensor, Tensor]:
        frozen_head = not (ctx.needs_input_grad[1] or ctx.needs_input_grad[3])
        logprobs, entropy, jac = torch.ops.grpo_lit.linear_logprobs(
            hidden, weight, ids, bias, *options, impl, frozen_head
        )
        ctx.set_materialize_grads(False)  # an entropy nobody differentiates costs nothing
        ctx.options, ctx.impl, ctx.frozen_head = options, impl, frozen_head
        ctx.save_for_backward(hidden, weight, ids, bias, jac)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dlogprobs: Tensor | None, dentropy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, ids, bias, jac = ctx.saved_tensors
        if dentropy is None:
            if dlogprobs is None:
                return (None,) * 6
            if ctx.frozen_head:
                return ((jac * dlogprobs[:, None]).to(hidden.dtype), *(None,) * 5)
        wanted = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
        dhidden, dweight, dbias = torch.ops.grpo_lit.linear_logprobs_backward(
            hidden, weight, ids, bias, dlogprobs, dentropy, *ctx.options, ctx.impl, wanted
        )
        return (
            dhidden if wanted[0] else None,
            dweight if wanted[1] else None,
            None,
            dbias if wanted[2] else None,
            None,
            None,
        )
