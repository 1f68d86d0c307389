"""Fused ops at the loss boundary, one a file, each with its torch reference beside the Triton kernels.

Every op takes ``impl="triton" | "torch" | None``; None picks Triton on CUDA and torch elsewhere.
"""

from __future__ import annotations

if __name__ == "kernels":  # reached through the link in the root of a checkout
    from ._root_link import step_aside

    step_aside(__name__)
else:
    from grpo_lit.kernels import scale as _scale  # noqa: F401  (registers grpo_lit::scale_)
    from grpo_lit.kernels.decode_linear import LoraUpdate, RmsNorm, decode_linear
    from grpo_lit.kernels.dispatch import default_impl, triton_available
    from grpo_lit.kernels.entropy_mask import entropy_mask, keep_row_weight
    from grpo_lit.kernels.fused_linear_grpo import fused_linear_grpo
    from grpo_lit.kernels.fused_logits_grpo import TokenStats, fused_logits_grpo
    from grpo_lit.kernels.gated_activation import gated_activation
    from grpo_lit.kernels.grpo_token_loss import grpo_token_loss
    from grpo_lit.kernels.linear_logprobs import linear_logprobs
    from grpo_lit.kernels.lora_linear import lora_linear
    from grpo_lit.kernels.nf4 import Nf4Weight
    from grpo_lit.kernels.nf4_matmul import nf4_matmul
    from grpo_lit.kernels.paged_attention import PAGE, paged_attention
    from grpo_lit.kernels.rms_norm import add_layer_norm, add_rms_norm
    from grpo_lit.kernels.rope_cache import rope_cache
    from grpo_lit.kernels.sample_token import sample_token

    __all__ = [
        "PAGE",
        "LoraUpdate",
        "Nf4Weight",
        "RmsNorm",
        "TokenStats",
        "add_layer_norm",
        "add_rms_norm",
        "decode_linear",
        "default_impl",
        "entropy_mask",
        "fused_linear_grpo",
        "fused_logits_grpo",
        "gated_activation",
        "grpo_token_loss",
        "keep_row_weight",
        "linear_logprobs",
        "lora_linear",
        "nf4_matmul",
        "paged_attention",
        "rope_cache",
        "sample_token",
        "triton_available",
    ]
