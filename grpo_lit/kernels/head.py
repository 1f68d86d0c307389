"""The output layer in chunks of tokens: what ``linear_logprobs`` and ``fused_linear_grpo`` share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels.dispatch import Impl
from grpo_lit.kernels.token_terms import compute_dtype

_CHUNK_BYTES = {"cuda": 160 << 20, "cpu": 32 << 20}
_SUMMED_TOKENS = 2048  # by one float32 product


class HeadOptions(NamedTuple):
    """How the output layer is run.

    Attributes:
        temperature: the sampling temperature, folded into log-probs, entropy and gradients.
        softcap: bound of the tanh cap some models put on their logits; 0 for none.
        chunk_rows: rows of logits that exist at one time.
        impl: "triton" or "torch".
        narrow: keep logits in the dtype of the weight, not in float32.
    """

    temperature: float
    softcap: float
    chunk_rows: int
    impl: str
    narrow: bool


HEAD_ARGUMENTS = "float temperature, float softcap, int chunk_rows, str impl, bool narrow"
"""HeadOptions in the schema of a custom op."""


def head_options(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    bias: Tensor | None,
    *,
    temperature: float,
    softcap: float | None,
    logits_dtype: torch.dtype | None,
    chunk_rows: int | None,
    impl: Impl,
) -> HeadOptions:
    """Checks the arguments that the ops on the output layer share.

    Raises:
        UserError: for shapes that don't fit each other and values out of range.
    """
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise UserError("lm_head_weight", tuple(weight.shape), f"(V, H) with H = {hidden.shape[-1]}")
    if ids.shape != hidden.shape[:-1]:
        raise UserError("completion_ids", tuple(ids.shape), f"the shape {tuple(hidden.shape[:-1])} of hidden")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UserError("bias", tuple(bias.shape), f"({weight.shape[0]},)")
    if not temperature > 0:
        raise UserError("temperature", temperature, "> 0")
    if softcap is not None and not softcap > 0:
        raise UserError("softcap", softcap, "> 0, or None for no cap")
    if chunk_rows is not None and chunk_rows < 1:
        raise UserError("chunk_rows", chunk_rows, ">= 1, or None to size it by memory")
    wide = compute_dtype(weight.dtype)
    if logits_dtype not in (None, wide, weight.dtype):
        raise UserError("logits_dtype", logits_dtype, f"None, {wide} or the weight's {weight.dtype}")
    narrow = logits_dtype is not None and logits_dtype != wide
    rows = chunk_rows or default_chunk_rows(weight, weight.dtype if narrow else wide)
    return HeadOptions(float(temperature), float(softcap or 0.0), rows, impl, narrow)


def live_rows(live: Tensor, num_tokens: int | None) -> Tensor | None:
    """Indices of the True entries of a flat mask; None if all are True.

    Counting them waits for the device, once, unless the caller knows their number.
    """
    if num_tokens is None:
        rows = live.nonzero().squeeze(-1)
    elif num_tokens == live.numel():
        return None
    else:
        rows = torch.nonzero_static(live, size=num_tokens).squeeze(-1)
    return None if len(rows) == live.numel() else rows


def default_chunk_rows(weight: Tensor, logits_dtype: torch.dtype) -> int:
    """Rows of logits to hold at a time: what fits a fixed number of bytes, in whole tiles of 64 rows."""
    budget = _CHUNK_BYTES["cuda" if weight.is_cuda else "cpu"]
    rows = max(1, budget // (weight.shape[0] * logits_dtype.itemsize))
    return rows // 64 * 64 if rows >= 64 else rows


def project(hidden: Tensor, weight: Tensor, bias: Tensor | None, narrow: bool) -> Tensor:
    """(rows, V) logits before cap and temperature, in float32 (float64 for float64) unless ``narrow``."""
    if narrow or weight.dtype in (torch.float32, torch.float64):
        logits = hidden @ weight.t()
    elif hidden.is_cuda:
        # straight from the float32 accumulator: no rounding to 16 bits on the way
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = (hidden @ weight.t()).float()
    return logits if bias is None else logits.add_(bias)


def times_weight(dlogits: Tensor, weight: Tensor, out: Tensor) -> None:
    """``out`` (rows, H) = ``dlogits`` (rows, V) times ``weight`` (V, H), a sum over the vocabulary.

    In float32 in pieces of it, each summed by itself: over all of it at once cuBLAS (at some numbers of rows) and MKL
    add up term by term, which put a gradient of SmolLM2 on an H200 1.1e-5 off the one in float64; so it is 0.4e-5.
    """
    size = _SUMMED_TOKENS if weight.dtype == torch.float32 else len(weight)
    torch.mm(dlogits[:, :size], weight[:size], out=out)
    for start in range(size, len(weight), size):
        out += dlogits[:, start : start + size] @ weight[start : start + size]


def gradient_buffer(logits: Tensor, weight: Tensor, impl: str) -> Tensor:
    """(rows, V) in the weight's dtype for the logits' gradient: over the logits wherever that is safe.

    A 16-bit gradient fits in the front half of its own row of float32 logits. The Triton kernel may write it
    there, since it reads a row to its end before it writes any of it.
    """
    if logits.dtype == weight.dtype:
        return logits
    if impl == "triton":
        from grpo_lit.kernels._triton.logit_rows import reads_rows_first

        if reads_rows_first(logits):
            return logits.view(weight.dtype)[:, : logits.shape[1]]
    return torch.empty_like(logits, dtype=weight.dtype)


class HeadGradients(NamedTuple):
    """Gradients of the head's inputs, empty if not wanted; summed over chunks in the softmax's dtype."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor

    @classmethod
    def start(cls, hidden: Tensor, weight: Tensor, wanted: list[bool]) -> HeadGradients:
        """Buffers for d hidden, d weight, d bias, as far as ``wanted``."""
        dtype = compute_dtype(weight.dtype)
        dweight = torch.zeros(weight.shape if wanted[1] else (0,), dtype=dtype, device=weight.device)
        dhidden = torch.empty_like(hidden) if wanted[0] else hidden.new_empty(0)
        return cls(dhidden, dweight, dweight.new_zeros(len(weight) if wanted[2] else 0))

    def add(self, part: slice, dlogits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Takes in the chunk ``part`` of tokens: ``dlogits`` (rows, V) and ``hidden`` (rows, H)."""
        if self.hidden.numel():
            times_weight(dlogits, weight, self.hidden[part])
        if self.weight.numel():
            if dlogits.is_cuda and dlogits.dtype != self.weight.dtype:
                self.weight.add_(torch.mm(dlogits.t(), hidden, out_dtype=self.weight.dtype))
            else:
                self.weight.add_(dlogits.t() @ hidden)
        if self.bias.numel():
            self.bias.add_(dlogits.sum(0, dtype=self.bias.dtype))

    def finish(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """In the dtypes of what they are gradients of."""
        dbias = self.bias if bias is None else self.bias.to(bias.dtype)
        return self.hidden, self.weight.to(weight.dtype), dbias
