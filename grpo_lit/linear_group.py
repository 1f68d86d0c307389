"""Frozen linear layers that read the same rows, with their adapters, as two products forward and back.

q, k and v of an attention (or gate and up of a feed-forward layer) have the same input x (rows, K), so their
weights (N_i, K), dequantized one under the other where they are in 4 bits, make one product::

    y = x W^T + b + [s x A_i^T B_i^T]_i      W, b: all weights and biases, A: all A_i, one under the other

and so do their gradients; ``lora_linear`` has the formulas. Dequantized weights are never kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_lit.kernels.lora_linear import wide_product
from grpo_lit.kernels.nf4 import Nf4Weight
from grpo_lit.lora import LoRALinear


class Adapters(NamedTuple):
    """Copies of a group's adapters in the dtype of the computation.

    Attributes:
        a: (sum of ranks, K), the A of each adapter under the other.
        b: (N_i, r_i) of each adapter.
        parts: place of each adapter's layer in the group.
        scaling: of all of them.
    """

    a: Tensor
    b: list[Tensor]
    parts: list[int]
    scaling: float

    def ranks(self) -> list[slice]:
        """Rows of ``a`` that belong to each adapter."""
        ends, start = [], 0
        for b in self.b:
            ends.append(slice(start, start + b.shape[1]))
            start += b.shape[1]
        return ends


class LinearGroup:
    """Layers with one input: `LoRALinear` or bare, over ``nn.Linear`` or bitsandbytes' NF4.

    Args:
        modules: the layers, in the order of their outputs side by side.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # typed loosely: nn.Module's attributes are "Tensor or Module" to a type checker
        self.bases: list[Any] = [m.base_layer if isinstance(m, LoRALinear) else m for m in modules]
        self.loras = [m if isinstance(m, LoRALinear) else None for m in modules]
        self.sizes = [int(base.out_features) for base in self.bases]
        self.width = int(self.bases[0].in_features)
        ends = [sum(self.sizes[:i]) for i in range(len(self.sizes) + 1)]
        self.columns = [slice(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
        self._packed: list[tuple[int, Nf4Weight]] | None = None
        self._bias: tuple[tuple[Any, ...], Tensor] | None = None

    def forget(self) -> None:
        """Drop what was read out of the layers; weights that have moved would be held where they were."""
        self._packed = self._bias = None

    @property
    def quantized(self) -> bool:
        """Whether the weights are in 4 bits."""
        return all(hasattr(base.weight, "quant_state") for base in self.bases)

    def live_loras(self) -> list[tuple[int, LoRALinear]]:
        """Place and module of each adapter that is switched on."""
        return [(i, lora) for i, lora in enumerate(self.loras) if lora is not None and lora.enabled]

    def matrices(self, dtype: torch.dtype) -> list[tuple[slice, Tensor]]:
        """(columns of the output, weight) pairs: one for 4-bit weights, freshly dequantized, else one a layer."""
        if not self.quantized:
            return [(c, b.weight.to(dtype)) for c, b in zip(self.columns, self.bases, strict=True)]
        weights = self._nf4()
        out = torch.empty(sum(self.sizes), self.width, dtype=dtype, device=weights[0].packed.device)
        for columns, weight in zip(self.columns, weights, strict=True):
            weight.dequantize_into(out[columns])
        return [(slice(0, len(out)), out)]

    def _nf4(self) -> list[Nf4Weight]:
        places = [base.weight.data_ptr() for base in self.bases]
        if self._packed is None or [place for place, _ in self._packed] != places:
            made = [Nf4Weight.from_bitsandbytes(b.weight.data, b.weight.quant_state) for b in self.bases]
            self._packed = list(zip(places, made, strict=True))
        return [weight for _, weight in self._packed]

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """All biases side by side, zeros for layers without, or None where no layer has one."""
        biases = [base.bias for base in self.bases]
        if all(b is None for b in biases):
            return None
        if len(biases) == 1:
            return biases[0].to(dtype)  # type: ignore[no-any-return]
        key = (dtype, *(0 if b is None else b.data_ptr() for b in biases))
        if self._bias is None or self._bias[0] != key:
            like = next(b for b in biases if b is not None)
            zeros = [like.new_zeros(n) if b is None else b for b, n in zip(biases, self.sizes, strict=True)]
            self._bias = (key, torch.cat(zeros).to(dtype))
        return self._bias[1]


def product(
    x: Tensor, group: LinearGroup, matrices: list[tuple[slice, Tensor]], adapters: Adapters | None
) -> tuple[Tensor, Tensor | None]:
    """(y, s x A^T) of contiguous x (rows, K)."""
    bias = group.bias(x.dtype)
    if len(matrices) == 1:
        y = nn.functional.linear(x, matrices[0][1], bias)
    else:
        y = x.new_empty(len(x), sum(group.sizes))
        for columns, weight in matrices:
            if bias is None:
                torch.mm(x, weight.t(), out=y[:, columns])
            else:
                torch.addmm(bias[columns], x, weight.t(), out=y[:, columns])
    return y, add_low_rank_(y, x, group, adapters)


def product_into_(
    y: Tensor, x: Tensor, group: LinearGroup, matrices: list[tuple[slice, Tensor]], adapters: Adapters | None
) -> Tensor | None:
    """y += the product, for a group of one layer whose output joins the residual stream; gives s x A^T."""
    y.addmm_(x, matrices[0][1].t())
    bias = group.bias(x.dtype)
    if bias is not None:
        y += bias
    return add_low_rank_(y, x, group, adapters)


def add_low_rank_(y: Tensor, x: Tensor, group: LinearGroup, adapters: Adapters | None) -> Tensor | None:
    """y += s x A^T B^T in each adapter's columns; gives s x A^T (rows, sum of ranks)."""
    if adapters is None:
        return None
    low = x.new_empty(len(x), len(adapters.a))
    low.addmm_(x, adapters.a.t(), beta=0, alpha=adapters.scaling)
    for part, rank, b in zip(adapters.parts, adapters.ranks(), adapters.b, strict=True):
        y[:, group.columns[part]].addmm_(low[:, rank], b.t())
    return low


def product_backward(
    dy: Tensor,
    x: Tensor | None,
    low: Tensor | None,
    group: LinearGroup,
    matrices: list[tuple[slice, Tensor]],
    adapters: Adapters | None,
    grads: list[Tensor],
    *,
    want_dx: bool = True,
) -> Tensor | None:
    """dx (rows, K); adds the gradients of A and B of each adapter to ``grads`` (float32 or their own dtype).

    Args:
        dy: (rows, N), rows contiguous.
        x: (rows, K), needed where there are adapters.
        low: s x A^T from the forward.
        group: the layers.
        matrices: their weights.
        adapters: their adapters.
        grads: A and B of each adapter in turn; filled when empty, added to otherwise.
        want_dx: False where nobody asks for dx.
    """
    dx = None
    if want_dx:
        first, weight = matrices[0]
        dx = dy[:, first] @ weight
        for columns, weight in matrices[1:]:
            dx.addmm_(dy[:, columns], weight)
    if adapters is None:
        return dx
    assert x is not None
    assert low is not None
    dlow = torch.empty_like(low)  # s dy B
    new: list[Tensor] = []
    for part, rank, b in zip(adapters.parts, adapters.ranks(), adapters.b, strict=True):
        dlow[:, rank].addmm_(dy[:, group.columns[part]], b, beta=0, alpha=adapters.scaling)
    if dx is not None:
        dx.addmm_(dlow, adapters.a)
    loras = [group.loras[part] for part in adapters.parts]
    da = wide_product(dlow.t(), x, loras[0].lora_A.dtype)  # type: ignore[union-attr]
    for part, rank, lora in zip(adapters.parts, adapters.ranks(), loras, strict=True):
        db = wide_product(dy[:, group.columns[part]].t(), low[:, rank], lora.lora_B.dtype)  # type: ignore[union-attr]
        new += [da[rank], db]
    if not grads:
        grads += new
    else:
        torch._foreach_add_(grads, new)
    return dx
