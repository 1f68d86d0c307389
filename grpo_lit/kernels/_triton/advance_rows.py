"""The end of a decode step in one program; formulas in ``grpo_lit.kernels.advance_rows``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_lit.kernels.advance_rows import RowState

_SLOTS = 32  # of a program


@triton.jit(do_not_specialize=["slots", "spare", "width"])  # type: ignore[untyped-decorator]
def _advance_kernel(  # type: ignore[no-untyped-def]
    ids,
    logprobs,
    token,
    position,
    length,
    count,
    row,
    uniform,
    table,
    out_ids,
    out_logprobs,
    eos,
    slots,
    spare,
    width,
    NUM_EOS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < slots
    where = tl.load(position + slot, mask=inside, other=-1)
    active = where >= 0
    drawn = tl.load(ids + slot, mask=inside, other=0)
    logprob = tl.load(logprobs + slot, mask=inside, other=0.0)
    target = tl.where(active, tl.load(row + slot, mask=inside, other=0), spare).to(tl.int64) * width
    done = tl.load(count + slot, mask=inside, other=0)
    tl.store(out_ids + target + tl.minimum(done, width - 1), drawn, mask=active)
    tl.store(out_logprobs + target + tl.minimum(done, width - 1), logprob, mask=active)
    done = done + active.to(tl.int32)
    ended = done >= width
    for index in range(NUM_EOS):  # a loop: there may be hundreds
        ended = ended | (drawn == tl.load(eos + index))
    where = tl.where(active & (ended == 0), where + 1, -1)
    following = tl.load(table + target + tl.minimum(done, width - 1), mask=inside, other=0.0)
    tl.store(position + slot, where, mask=inside)
    tl.store(length + slot, where + 1, mask=inside)
    tl.store(count + slot, done, mask=inside)
    tl.store(token + slot, drawn, mask=active)
    tl.store(uniform + slot, following, mask=inside)


def advance(ids: Tensor, logprobs: Tensor, state: RowState, eos_token_ids: Tensor) -> None:
    """See ``advance_rows``: one program for each 32 slots."""
    slots = len(ids)
    with torch.cuda.device_of(ids):
        _advance_kernel[(triton.cdiv(slots, _SLOTS),)](
            ids,
            logprobs,
            *state,
            eos_token_ids,
            slots,
            state.table.shape[0] - 1,
            state.table.shape[1],
            NUM_EOS=len(eos_token_ids),
            SLOTS=_SLOTS,
        )
