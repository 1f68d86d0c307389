"""Exact copies of weights and optimizer state, to put back where work on them broke off half-way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from grpo_lit.oom import memory_limit


class _Group(NamedTuple):
    tensors: list[Tensor]
    flat: Tensor


class Snapshot:
    """The values of tensors at one moment, one flat copy per dtype and device.

    Args:
        tensors: whose values to keep; they stay where they are.
        on_host: keep the copy in host memory; None decides by what is free on the device.
    """

    def __init__(self, tensors: Sequence[Tensor], *, on_host: bool | None = None) -> None:
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
        self._groups = [
            _Group(group, _flat_copy(group, _belongs_on_host(group) if on_host is None else on_host))
            for group in by_kind.values()
        ]

    def to_host(self) -> None:
        """Give up the device memory of the copy."""
        self._groups = [group._replace(flat=group.flat.cpu()) for group in self._groups]

    def restore(self) -> None:
        """Put the values back; takes no memory on the device."""
        with torch.no_grad():
            for group in self._groups:
                pieces = group.flat.split([tensor.numel() for tensor in group.tensors])
                for tensor, piece in zip(group.tensors, pieces, strict=True):
                    tensor.copy_(piece.view(tensor.shape))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have the old values in the tensors for a while; the present ones come back after it."""
        present = Snapshot([tensor for group in self._groups for tensor in group.tensors], on_host=True)
        try:
            self.restore()
            yield
        finally:
            present.restore()


def _flat_copy(tensors: Sequence[Tensor], on_host: bool) -> Tensor:
    if on_host and tensors[0].is_cuda:
        return torch.cat([tensor.cpu().reshape(-1) for tensor in tensors])
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _belongs_on_host(tensors: Sequence[Tensor]) -> bool:
    """Whether a copy would take a good part of what is left on the device."""
    device = tensors[0].device
    if device.type != "cuda":
        return False
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return size > (memory_limit(device) - torch.cuda.memory_allocated(device)) / 8


class OptimizerSnapshot:
    """Weights, gradients and optimizer state before a step, so that a step that broke off can be taken again.

    Args:
        optimizer: its state may be empty still; what a broken step added goes away again.
        parameters: what it trains.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        state = optimizer.state
        self._before: dict[Tensor, dict[str, Any]] = {p: dict(state[p]) for p in parameters if p in state}
        self._steps = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        kept = [value for values in self._before.values() for value in values.values() if isinstance(value, Tensor)]
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._values = Snapshot([*parameters, *gradients, *kept])

    def restore(self) -> None:
        """Everything as it was; the copy moves to the host, for it may be what left no room."""
        for parameter in self._parameters:
            if parameter in self._before:
                self._optimizer.state[parameter] = dict(self._before[parameter])
            else:
                self._optimizer.state.pop(parameter, None)
        for group, before in zip(self._optimizer.param_groups, self._steps, strict=True):
            group.update(before)
        self._values.restore()
        self._values.to_host()
