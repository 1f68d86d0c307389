"""One weight per token: the reduction of the loss, written out once for the whole global batch.

The loss is sum over tokens of weight x per-token loss. The weights are computed before the batch is split
into micro-batches or over ranks, so no split can change what a token counts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.errors import UserError

REDUCTIONS = ("sequence_mean", "token_mean", "alpha", "fixed_length")


def token_weights(
    completion_mask: Tensor,
    group_ids: Tensor,
    *,
    reduction: str = "sequence_mean",
    alpha: float | None = None,
    max_completion_length: int | None = None,
    num_rows: int | Tensor | None = None,
    num_tokens: int | Tensor | None = None,
) -> Tensor:
    """Weight of each token in the loss.

    With R = rows that have at least one token and L_i = tokens of row i:

    - ``sequence_mean``: 1 / (R L_i). GRPO, 2402.03300 eq. 3.
    - ``token_mean``: 1 / sum_j L_j. DAPO, 2503.14476 eq. 8.
    - ``alpha``: L_i^(alpha - 1) / R. The length family, 2607.23364; alpha 0 is sequence_mean, and only
      alpha 1 (the plain sum over tokens) leaves the policy gradient unbiased.
    - ``fixed_length``: 1 / (R max_completion_length). Dr.GRPO, 2503.20783: alpha 1 times a constant.

    A row without tokens (truncated, abstained) is out of the numerator and of R.

    Args:
        completion_mask: (N, T) bool, True where the token counts.
        group_ids: (N,) prompt of each row. These four reductions weigh rows, not prompts, so only its length
            is checked; a prompt with more completions counts for more.
        reduction: see above.
        alpha: exponent in [0, 1], read by "alpha" only.
        max_completion_length: tokens, read by "fixed_length" only.
        num_rows: R over all ranks and micro-batches, when this call sees only part of the batch.
        num_tokens: number of tokens over all of them, likewise.

    Returns:
        (N, T) float32, computed in float64, 0 where the mask is False.

    Raises:
        UserError: for an unknown reduction, or one that lacks its argument.
    """
    if reduction not in REDUCTIONS:
        raise UserError("model.loss.reduction", reduction, " | ".join(REDUCTIONS))
    if completion_mask.dim() != 2 or group_ids.shape != completion_mask.shape[:1]:
        shapes = (tuple(completion_mask.shape), tuple(group_ids.shape))
        raise UserError("completion_mask, group_ids", shapes, "shapes (N, T) and (N,)")
    lengths = completion_mask.bool().sum(dim=1).double()  # (N,)
    rows = _total(num_rows, (lengths > 0).sum(), "num_rows")
    tokens = _total(num_tokens, lengths.sum(), "num_tokens")
    safe_lengths = lengths.clamp(min=1)
    if reduction == "sequence_mean":
        row_weights = 1 / (rows * safe_lengths)
    elif reduction == "token_mean":
        row_weights = (1 / tokens).expand_as(lengths)
    elif reduction == "alpha":
        if alpha is None or not 0 <= alpha <= 1:
            raise UserError("model.loss.alpha", alpha, "a number in [0, 1] with reduction='alpha'")
        row_weights = safe_lengths.pow(alpha - 1) / rows
    else:
        if max_completion_length is None or max_completion_length < 1:
            raise UserError("max_completion_length", max_completion_length, ">= 1 with reduction='fixed_length'")
        row_weights = (1 / (rows * max_completion_length)).expand_as(lengths)
    return torch.where(completion_mask.bool(), row_weights[:, None], 0).float()


def _total(given: int | Tensor | None, here: Tensor, name: str) -> Tensor:
    """The divisor: the global total if given, otherwise the one counted here; at least 1."""
    if given is None:
        return here.double().clamp(min=1)
    total = torch.as_tensor(given, dtype=torch.float64, device=here.device)
    if bool(total < here):
        raise UserError(name, given, f"the total over all ranks, so at least the {int(here)} counted here")
    return total.clamp(min=1)
