"""What the fused ops share: rows of logits in; loss, log-prob, entropy and the logits' gradient out.

For a row z of V logits with chosen token a, x = z / temperature (or cap tanh(z / cap) / temperature)::

    logprob = x_a - logsumexp(x)          entropy = -sum_v p_v ln p_v,   p = softmax(x)
    dL/dx_v = g (1[v = a] - p_v) - e p_v (ln p_v + entropy)
    dL/dz_v = dL/dx_v (1 - tanh^2(z_v / cap)) / temperature

g and e are either given, or those of the loss in ``token_terms``: g = d loss / d logprob and
e = -weight entropy_coef. Rows with weight 0 (or g = e = 0) read nothing and get exact zeros. The Triton version
reads a row once and writes it once. Softmax and sums are float32 (float64 for float64 logits, torch only).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_lit.kernels.token_terms import TokenInputs, TokenScalars, compute_dtype, token_terms

_REFERENCE_ROWS = 256


class RowOptions(NamedTuple):
    """What stands between the logits and the softmax, and what to return.

    Attributes:
        temperature: sampling temperature.
        softcap: bound of a tanh cap, 0 for none.
        vocab_size: columns that are tokens; the padded ones after them get a zero gradient.
        want_entropy: return the entropy too (empty otherwise).
        impl: "triton" or "torch".
    """

    temperature: float
    softcap: float
    vocab_size: int
    want_entropy: bool
    impl: str


class RowResults(NamedTuple):
    """Flat results of a call; ``loss`` is empty without loss inputs, ``entropy`` unless wanted or needed."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor


def loss_rows(
    logits: Tensor, inputs: TokenInputs, scalars: TokenScalars, options: RowOptions, grad: Tensor | None
) -> RowResults:
    """Per-row loss of (N, T, V) ``logits``, and its gradient into ``grad`` (which may be ``logits`` itself) if given."""
    ids, old, adv, weights, ref = inputs
    return _run(logits, ids, grad, old, adv, weights, ref, None, None, scalars, options)


def given_rows(
    logits: Tensor, ids: Tensor, dlogprobs: Tensor, dentropy: Tensor | None, options: RowOptions, grad: Tensor
) -> RowResults:
    """The logits' gradient for given g and e of each row, into ``grad`` (which may be ``logits`` itself)."""
    return _run(logits, ids, grad, None, None, None, None, dlogprobs, dentropy, TokenScalars(), options)


def stat_rows(logits: Tensor, ids: Tensor, options: RowOptions) -> RowResults:
    """Log-prob and entropy of each row of (N, T, V) ``logits``, no gradient."""
    return _run(logits, ids, None, None, None, None, None, None, None, TokenScalars(), options)


def _run(
    logits: Tensor,
    ids: Tensor,
    grad: Tensor | None,
    old: Tensor | None,
    advantages: Tensor | None,
    weights: Tensor | None,
    ref: Tensor | None,
    dlogprobs: Tensor | None,
    dentropy: Tensor | None,
    scalars: TokenScalars,
    options: RowOptions,
) -> RowResults:
    if options.impl == "triton" and logits.dtype != torch.float64:
        from grpo_lit.kernels._triton.logit_rows import logit_rows

        return RowResults(
            *logit_rows(
                logits,
                ids,
                grad=grad,
                old=old,
                advantages=advantages,
                weights=weights,
                ref=ref,
                dlogprobs=dlogprobs,
                dentropy=dentropy,
                scalars=scalars,
                temperature=options.temperature,
                softcap=options.softcap,
                vocab_size=options.vocab_size,
                want_entropy=options.want_entropy,
            )
        )
    per_row = (old, advantages, weights, ref, dlogprobs, dentropy)
    steps = logits.shape[1]
    parts = []
    for start in range(0, len(ids), _REFERENCE_ROWS):
        rows = torch.arange(start, min(start + _REFERENCE_ROWS, len(ids)), device=logits.device)
        place = (rows // steps, rows % steps)
        result, dz = _reference(
            logits[place],
            ids[rows],
            [None if t is None else t[rows] for t in per_row],
            scalars,
            options,
            grad is not None,
        )
        parts.append(result)
        if grad is not None and dz is not None:
            grad[place] = dz.to(grad.dtype)
    empty = logits.new_empty(0, dtype=compute_dtype(logits.dtype))
    return (
        RowResults(*(torch.cat(column) for column in zip(*parts, strict=True)))
        if parts
        else RowResults(*[empty] * 3)
    )


def _reference(
    logits: Tensor,
    ids: Tensor,
    per_row: list[Tensor | None],
    scalars: TokenScalars,
    options: RowOptions,
    want_grad: bool,
) -> tuple[RowResults, Tensor | None]:
    """The formulas above in plain torch, on (rows, V) logits."""
    old, advantages, weights, ref, dlogprobs, dentropy = per_row
    live = torch.ones_like(ids, dtype=torch.bool)
    if weights is not None:
        live = weights != 0
    elif dlogprobs is not None:
        live = dlogprobs != 0 if dentropy is None else (dlogprobs != 0) | (dentropy != 0)
    # selected before the arithmetic, so that whatever a dead row holds can't reach the results
    z = torch.where(live[:, None], logits[:, : options.vocab_size], 0).to(compute_dtype(logits.dtype))
    squashed = torch.tanh(z / options.softcap) if options.softcap else None
    x = (z if squashed is None else options.softcap * squashed) / options.temperature
    log_p = x.log_softmax(-1)
    pick = torch.where(live, ids, 0)[:, None]
    logprobs = log_p.gather(-1, pick).squeeze(-1)
    p = log_p.exp()
    log_p.masked_fill_(p == 0, 0.0)  # 0 ln 0 = 0
    entropy = -(p * log_p).sum(-1)
    loss, g, e = x.new_empty(0), dlogprobs, dentropy
    if weights is not None and advantages is not None:
        before = logprobs if old is None else old
        loss, g = token_terms(logprobs, before, advantages, weights, ref, scalars)
        if scalars.entropy_coef:
            loss = loss - weights * scalars.entropy_coef * entropy
            e = -weights * scalars.entropy_coef
    results = RowResults(loss, torch.where(live, logprobs, 0), torch.where(live, entropy, 0))
    if not want_grad or g is None:
        return results, None
    dx = -p * g[:, None]
    if e is not None:
        dx -= e[:, None] * p * (log_p + entropy[:, None])
    dx.scatter_add_(1, pick, g[:, None])
    if squashed is not None:
        dx *= 1 - squashed.square()
    dz = torch.where(live[:, None], dx / options.temperature, 0)
    return results, torch.nn.functional.pad(dz, (0, logits.shape[1] - options.vocab_size))
