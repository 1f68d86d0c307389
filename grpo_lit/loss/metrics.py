"""Figures of a loss call that come out the same however the batch was split.

A call keeps a pair (sum, count) for every metric. Merging adds the pairs and divides once at the end, so a
micro-batch with one token doesn't count as much as one with a thousand. Three kinds, told by the name:

- ``*_max``: the largest;
- ``loss``, ``*_loss`` and ``*_count``: the sum, since the weights already hold the global divisor;
- all others: sum / count, a mean over counted tokens or rows; 0 when nothing counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossOutput:
    """What `grpo_loss` returns.

    Args:
        loss: scalar with its graph; add those of the micro-batches up, never average them.
        totals: for each metric a float64 tensor (2,), its sum and its count, detached.
    """

    loss: Tensor
    totals: dict[str, Tensor]

    @property
    def metrics(self) -> dict[str, Tensor]:
        """The metrics of this call alone, detached scalars."""
        return {name: _value(name, pair) for name, pair in self.totals.items()}


def merge_totals(totals: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Pairs of several calls (micro-batches, ranks) as those of one call over all their rows.

    Args:
        totals: the `LossOutput.totals` of each call, on one device.
    """
    merged: dict[str, Tensor] = {}
    for pairs in totals:
        for name, pair in pairs.items():
            if name not in merged:
                merged[name] = pair
            elif name.endswith("_max"):
                merged[name] = torch.maximum(merged[name], pair)
            else:
                merged[name] = merged[name] + pair
    return merged


def totals_to_metrics(totals: Mapping[str, Tensor]) -> dict[str, float]:
    """Plain numbers from pairs, in one transfer from the device."""
    if not totals:
        return {}
    values = torch.stack([_value(name, pair) for name, pair in totals.items()]).tolist()
    return dict(zip(totals, values, strict=True))


def merge_metrics(outputs: Sequence[LossOutput]) -> dict[str, float]:
    """Metrics over all rows of the calls: the same numbers for every split of a batch."""
    return totals_to_metrics(merge_totals([output.totals for output in outputs]))


def _value(name: str, pair: Tensor) -> Tensor:
    if name.endswith(("_max", "_count", "_loss")) or name == "loss":
        return pair[0]
    return pair[0] / pair[1].clamp(min=torch.finfo(pair.dtype).tiny)
