"""Fused ops at the loss boundary, one a file, each with its torch reference beside the Triton kernels.

Every op takes ``impl="triton" | "torch" | None``; None picks Triton on CUDA and torch elsewhere.
"""

from __future__ import annotations

from grpo_lit.kernels.dispatch import default_impl, triton_available
from grpo_lit.kernels.linear_logprobs import linear_logprobs

__all__ = ["default_impl", "linear_logprobs", "triton_available"]
