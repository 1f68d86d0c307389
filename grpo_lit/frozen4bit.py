"""bitsandbytes' 4-bit linear layer as a frozen base layer: quantized once, never repacked."""

from __future__ import annotations

import bitsandbytes as bnb
import torch
from torch import nn


class FrozenLinear4bit(bnb.nn.Linear4bit):
    """An NF4 linear layer with double quantization whose stored bytes never change.

    bitsandbytes repacks the weight of a layer in eval mode on some CPUs, in place. A base that adapters were
    trained on must stay bit-identical, so this layer always reports training mode.
    """

    @classmethod
    def from_linear(cls, linear: nn.Linear, compute_dtype: torch.dtype, device: torch.device) -> FrozenLinear4bit:
        """Quantize a floating-point layer: weight (out, in) to NF4 blocks of 64 on `device`."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=compute_dtype,
            compress_statistics=True,
            quant_type="nf4",
            device="meta",
        )
        layer.weight = bnb.nn.Params4bit(
            linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer
        )
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.data, requires_grad=False)
        quantized: FrozenLinear4bit = layer.to(device)
        quantized.requires_grad_(False)
        return quantized

    def train(self, mode: bool = True) -> FrozenLinear4bit:
        """Stay in training mode whatever is asked; nothing in this layer behaves differently otherwise."""
        del mode
        super().train(True)
        return self
