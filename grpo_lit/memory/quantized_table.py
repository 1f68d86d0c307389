"""Token embedding and output layer in 4 or 8 bits: two tables of (V, H), half of a small quantized model's memory.

NF4 (QLoRA, 2305.14314) with a float32 scale for 64 weights takes 0.5625 bytes a weight; int8 with a scale for each row
takes 1. Rows are turned into numbers when they are looked up. The output layer's are multiplied a tile of the
vocabulary at a time in sampling, and as a whole, for the moment of the product, in scoring.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.kernels.nf4 import BLOCK, Nf4Weight

Kind = Literal["nf4", "int8"]
BYTES_PER_WEIGHT: dict[str, float] = {"nf4": 0.5 + 4 / BLOCK, "int8": 1.0}
TILE_ROWS = 8192
"""Rows that are quantized, or multiplied in sampling, at once."""


class QuantizedTable(nn.Module):
    """A frozen (V, H) matrix in few bits.

    Args:
        weight: (V, H) floating point, on any device.
        kind: nf4 or int8.
        dtype: of the numbers that come out.
        device: where the table stays.

    Raises:
        UserError: NF4 of rows that do not hold whole blocks of 64.
        SystemFault: bitsandbytes is not installed.
    """

    def __init__(self, weight: Tensor, kind: Kind, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        self.shape = torch.Size(weight.shape)
        if kind == "nf4" and weight.shape[1] % BLOCK:
            raise UserError("model.policy.head_quantization", kind, f"int8 or null: rows of {weight.shape[1]} weights")
        quantize = _to_nf4 if kind == "nf4" else _to_int8
        tiles = [
            quantize(weight[start : start + TILE_ROWS].detach().to(device))
            for start in range(0, len(weight), TILE_ROWS)
        ]
        self.register_buffer("packed", torch.cat([packed for packed, _, _ in tiles]), persistent=False)
        self.register_buffer("scales", torch.cat([scales for _, scales, _ in tiles]), persistent=False)
        self.register_buffer("code", tiles[0][2], persistent=False)
        self.packed: Tensor  # (V, H / 2) uint8, two weights a byte, or (V, H) int8
        self.scales: Tensor  # (V, H / 64) or (V, 1) float32
        self.code: Tensor  # (16,) float32 quantiles, or empty

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of ids (...), as numbers (..., H)."""
        packed = nn.functional.embedding(ids, self.packed)
        return self._numbers(packed, nn.functional.embedding(ids, self.scales))

    def tile(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` as numbers (n, H)."""
        return self._numbers(self.packed[start:stop], self.scales[start:stop])

    def matrix(self) -> Tensor:
        """All rows as numbers (V, H), made anew at every call."""
        if self.kind == "nf4":
            return self.nf4().dequantize(self.dtype)
        out = torch.empty(self.shape, dtype=self.dtype, device=self.packed.device)
        for start in range(0, len(out), TILE_ROWS):
            out[start : start + TILE_ROWS] = self.tile(start, start + TILE_ROWS)
        return out

    def nf4(self) -> Nf4Weight:
        """As the kernels on NF4 take it; shares this table's memory."""
        assert self.kind == "nf4"
        none = self.scales.new_empty(0)
        parts = (self.packed.flatten(), self.scales.flatten(), none, none, none.new_zeros(()), self.code)
        return Nf4Weight(*parts, out_features=self.shape[0], in_features=self.shape[1])

    def _numbers(self, packed: Tensor, scales: Tensor) -> Tensor:
        if self.kind == "int8":
            return (packed.float() * scales).to(self.dtype)
        indices = torch.stack([packed >> 4, packed & 15], dim=-1).flatten(-2)  # (..., H)
        values: Tensor = self.code[indices.int()].unflatten(-1, (-1, BLOCK)) * scales.unsqueeze(-1)
        return values.flatten(-2).to(self.dtype)


class QuantizedEmbedding(nn.Module):
    """A token embedding over a `QuantizedTable`."""

    def __init__(self, table: QuantizedTable) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        """(..., H) rows of token ids (...)."""
        return self.table.rows(ids)

    @property
    def weight(self) -> Tensor:
        """A tensor of no rows, for code that asks an embedding for its dtype and device."""
        return torch.empty(0, self.table.shape[1], dtype=self.table.dtype, device=self.table.packed.device)


class QuantizedHead(nn.Module):
    """An output layer over a `QuantizedTable`, which it may share with the embedding."""

    def __init__(self, table: QuantizedTable, bias: Tensor | None) -> None:
        super().__init__()
        self.table = table
        self.out_features, self.in_features = table.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., V) logits of hidden states (..., H), in the dtype of the table."""
        tiles = [
            x.to(self.table.dtype) @ self.table.tile(start, start + TILE_ROWS).t()
            for start in range(0, self.out_features, TILE_ROWS)
        ]
        logits = torch.cat(tiles, dim=-1)
        return logits if self.bias is None else logits + self.bias

    @property
    def weight(self) -> Tensor:
        """(V, H) numbers, made anew at every use."""
        return self.table.matrix()


def _to_int8(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (weight.float() / scales).round().to(torch.int8), scales, scales.new_empty(0)


def _to_nf4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    try:
        from bitsandbytes.functional import quantize_4bit
    except ImportError as error:
        raise SystemFault("model.policy.head_quantization=nf4 needs bitsandbytes: pip install bitsandbytes") from error
    packed, state = quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=False)
    rows, columns = weight.shape
    return packed.view(torch.uint8).view(rows, columns // 2), state.absmax.view(rows, columns // BLOCK), state.code


def quantize_tables(model: nn.Module, kind: Kind, dtype: torch.dtype, device: torch.device) -> None:
    """Replace a model's embedding and output layer by quantized ones, in place; a tied table is held once.

    Args:
        model: a transformers causal language model.
        kind: nf4 or int8.
        dtype: of the computation.
        device: where the tables stay.

    Raises:
        UserError: an embedding that does more than look up rows (Gemma scales them).
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        raise UserError("model.policy.head_quantization", kind, f"null for a {type(embedding).__name__}")
    table = QuantizedTable(embedding.weight, kind, dtype, device)
    own = table if head.weight is embedding.weight else QuantizedTable(head.weight, kind, dtype, device)
    bias = None if head.bias is None else head.bias.to(device)
    for before, after in ((embedding, QuantizedEmbedding(table)), (head, QuantizedHead(own, bias))):
        for name, module in list(model.named_modules()):
            if module is before:
                model.set_submodule(name, after)
