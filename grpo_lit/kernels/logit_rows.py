"""What the fused ops share: rows of logits in; loss, log-prob, entropy and the logits' gradient out.

For a row z of V logits with chosen token a, x = z / temperature (or cap tanh(z / cap) / temperature)::

    logprob = x_a - logsumexp(x)          entropy = -sum_v p_v ln p_v,   p = softmax(x)
    dL/dx_v = g (1[v = a] - p_v) - e p_v (ln p_v + entropy)
    dL/dz_v = dL/dx_v (1 - tanh^2(z_v / cap)) / temperature

g and e are either given, or those of the loss in ``token_terms``: g = d loss / d logprob and
e = -weight entropy_coef. Rows with weight 0 (or g = e = 0) read nothing and get exact zeros. The Triton
version reads a row once and writes it once. Softmax and sums are float32 (float64 for float64 logits, torch
only).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_lit.kernels.token_terms import TokenInputs, TokenScalars, compute_dtype, token_terms

_REFERENCE_ROWS = 256
_SUMMED_AT_ONCE = 1 << 16  # by one program, which starts before the rows are ready


class RowOptions(NamedTuple):
    """What stands between the logits and the softmax.

    Attributes:
        temperature: sampling temperature.
        softcap: bound of a tanh cap, 0 for none.
        vocab_size: columns that are tokens; the padded ones after them get a zero gradient.
        impl: "triton" or "torch".
        zero_masked: write zeros for the gradient of rows that don't count; otherwise it is left as it was.
    """

    temperature: float
    softcap: float
    vocab_size: int
    impl: str
    zero_masked: bool = True


class RowResults(NamedTuple):
    """Where the results of rows go, (rows,) each; an empty tensor for what isn't wanted."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor

    @classmethod
    def empty(cls, ids: Tensor, dtype: torch.dtype, *, loss: bool, entropy: bool) -> RowResults:
        """Buffers for the rows of ``ids``, in the dtype that softmaxes of ``dtype`` run in."""
        rows = torch.empty(ids.shape, dtype=compute_dtype(dtype), device=ids.device)
        none = rows.new_empty(0)
        return cls(torch.empty_like(rows) if loss else none, rows, torch.empty_like(rows) if entropy else none)

    def part(self, where: slice) -> RowResults:
        """The buffers of some of the rows."""
        return RowResults(*(buffer[where] for buffer in self))


def loss_rows(
    logits: Tensor,
    inputs: TokenInputs,
    scalars: TokenScalars,
    options: RowOptions,
    out: RowResults,
    grad: Tensor | None,
) -> None:
    """Loss of each row of (N, T, V) ``logits``; its gradient into ``grad`` (maybe ``logits``) if given."""
    ids, old, adv, weights, ref = inputs
    _run(logits, ids, grad, (old, adv, weights, ref, None, None), scalars, options, out)


def total(loss: Tensor, impl: str) -> Tensor:
    """Sum over rows, a scalar."""
    if impl == "triton" and loss.dtype == torch.float32 and 0 < len(loss) <= _SUMMED_AT_ONCE:
        from grpo_lit.kernels._triton.token_loss import ordered_sum

        return ordered_sum(loss)
    return loss.sum()


def given_rows(
    logits: Tensor,
    ids: Tensor,
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    options: RowOptions,
    out: RowResults,
    grad: Tensor,
) -> None:
    """The logits' gradient for given g and e of each row, into ``grad`` (maybe ``logits`` itself)."""
    per_row = (None, None, None, None, dlogprobs, dentropy)
    _run(logits, ids, grad, per_row, TokenScalars(), options, out)


def stat_rows(logits: Tensor, ids: Tensor, options: RowOptions, out: RowResults) -> None:
    """Log-prob and entropy of each row of (N, T, V) ``logits``, no gradient."""
    _run(logits, ids, None, (None,) * 6, TokenScalars(), options, out)


def _run(
    logits: Tensor,
    ids: Tensor,
    grad: Tensor | None,
    per_row: tuple[Tensor | None, ...],
    scalars: TokenScalars,
    options: RowOptions,
    out: RowResults,
) -> None:
    """``per_row``: old, advantages, weights, ref of a loss; or given dlogprobs, dentropy; (rows,) each.

    Advantages may be fewer, each for as many rows one after the other.
    """
    if options.impl == "triton" and logits.dtype != torch.float64:
        from grpo_lit.kernels._triton.logit_rows import logit_rows

        old, advantages, weights, ref, dlogprobs, dentropy = per_row
        logit_rows(
            logits,
            ids,
            grad=grad,
            loss=out.loss,
            logprobs=out.logprobs,
            entropy=out.entropy,
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
            zero_masked=options.zero_masked,
        )
        return
    steps = logits.shape[1]
    for start in range(0, len(ids), _REFERENCE_ROWS):
        where = slice(start, start + _REFERENCE_ROWS)
        rows = torch.arange(len(ids), device=logits.device)[where]
        place = (rows // steps, rows % steps)
        values = [None if t is None else t[rows * len(t) // len(ids)] for t in per_row]
        results, dz = _reference(logits[place], ids[where], values, scalars, options, grad is not None)
        for buffer, result in zip(out.part(where), results, strict=True):
            if buffer.numel():
                buffer.copy_(result)
        if grad is not None and dz is not None:
            live = _live(values)
            if not options.zero_masked and live is not None:
                dz = torch.where(live[:, None], dz.to(grad.dtype), grad[place])
            grad[place] = dz.to(grad.dtype)


def _live(per_row: list[Tensor | None]) -> Tensor | None:
    """(rows,) bool, the rows that count; None for all."""
    _, _, weights, _, dlogprobs, dentropy = per_row
    if weights is not None:
        return weights != 0
    if dlogprobs is None:
        return None
    return dlogprobs != 0 if dentropy is None else (dlogprobs != 0) | (dentropy != 0)


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
    live = _live(per_row)
    if live is None:
        live = torch.ones_like(ids, dtype=torch.bool)
    # selected before the arithmetic, so that whatever a dead row holds can't reach the results
    z = torch.where(live[:, None], logits[:, : options.vocab_size], 0).to(compute_dtype(logits.dtype))
    squashed = torch.tanh(z / options.softcap) if options.softcap else None
    x = (z if squashed is None else options.softcap * squashed) / options.temperature
    # not log_softmax: on the CPU it adds up a long row in float32 term by term, 1e-5 off at 50,000 tokens
    log_p = x - x.amax(-1, keepdim=True)
    p = log_p.exp()
    total = p.sum(-1, keepdim=True)
    log_p -= total.log()
    p /= total
    pick = torch.where(live, ids, 0)[:, None]
    logprobs = log_p.gather(-1, pick).squeeze(-1)
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
