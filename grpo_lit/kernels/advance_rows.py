"""End of a decode step: note each row's token, see whether it ended, and set the row up for the next step.

For every slot i with ``position[i] >= 0`` (a row in flight), r = row[i], c = num_drawn[i] and t the token drawn::

    out_ids[r, c] = t,   out_logprobs[r, c] = log-prob of t,   num_drawn[i] = c + 1
    ended       = t is an EOS, or c + 1 = T
    position[i] = -1 if ended else position[i] + 1
    length[i]   = position[i] + 1                            what attention reads in the next step, 0 once ended
    token[i]    = t,   uniform[i] = table[r, c + 1]          what the next step feeds and draws with

Slots with a negative position are idle: they write to the last row of the tables, which is nobody's, and stay idle.
Written as torch operations this is a dozen launches of two
microseconds of work each; the Triton version is one, and neither waits for the host.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_lit.kernels.dispatch import resolve_impl


class RowState(NamedTuple):
    """Slots of a decode step (S of them) and the rows of the whole rollout (N, up to T tokens each).

    Attributes:
        token: (S,) long, the token each slot feeds next.
        position: (S,) int32, its position; negative where the slot is idle.
        length: (S,) int32, position + 1.
        num_drawn: (S,) int32, tokens sampled so far.
        row: (S,) int32, number of the row in the slot.
        uniform: (S,) float64, the number the next token is drawn with.
        table: (N + 1, T) float64, all such numbers; the last row of this and the next two is spare.
        out_ids: (N + 1, T) long.
        out_logprobs: (N + 1, T) float32.
    """

    token: Tensor
    position: Tensor
    length: Tensor
    num_drawn: Tensor
    row: Tensor
    uniform: Tensor
    table: Tensor
    out_ids: Tensor
    out_logprobs: Tensor

    def first(self, num_slots: int) -> RowState:
        """Views of the first slots; the rows stay whole."""
        return RowState(*[*(tensor[:num_slots] for tensor in self[:6]), *self[6:]])


def advance_rows(
    ids: Tensor, logprobs: Tensor, state: RowState, eos_token_ids: Tensor, *, impl: str | None = None
) -> None:
    """Write the sampled tokens and move on, in place; the formula is in the module's docstring.

    Args:
        ids: (S,) long, tokens just sampled.
        logprobs: (S,) float32, their log-probs.
        state: slots and rows, changed in place.
        eos_token_ids: (E,) long, tokens that end a row.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.
    """
    if resolve_impl("advance_rows", impl, ids.device) == "triton":
        from grpo_lit.kernels._triton.advance_rows import advance

        advance(ids, logprobs, state, eos_token_ids)
    else:
        _advance_reference(ids, logprobs, state, eos_token_ids)


def _advance_reference(ids: Tensor, logprobs: Tensor, state: RowState, eos_token_ids: Tensor) -> None:
    spare, width = state.table.shape[0] - 1, state.table.shape[1]
    active = state.position >= 0
    row = torch.where(active, state.row.long(), spare)
    at = row * width + state.num_drawn.long().clamp_max(width - 1)  # (S,)
    state.out_ids.view(-1).index_copy_(0, at, ids)
    state.out_logprobs.view(-1).index_copy_(0, at, logprobs)
    count = state.num_drawn + active.to(state.num_drawn.dtype)
    ended = torch.isin(ids, eos_token_ids) | (count >= width)
    state.position.copy_(torch.where(active & ~ended, state.position + 1, -1))
    state.length.copy_(state.position + 1)
    state.num_drawn.copy_(count)
    state.token.copy_(torch.where(active, ids, state.token))
    state.uniform.copy_(state.table[row, count.long().clamp_max(width - 1)])
