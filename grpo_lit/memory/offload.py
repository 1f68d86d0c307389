"""Layer inputs of checkpointed layers in pinned host memory: copied out behind the forward, back ahead of the backward.

Gradient checkpointing keeps one hidden state (rows, tokens, H) per layer: 28 of them are 1.4 GB for one row of 16,384
tokens at H = 1536. They are used once, in reverse order, half a step later; a PCIe 4.0 x16 link moves one in the time
the layer takes to compute. The idea is Unsloth's "gradient checkpointing with offload" (unsloth.ai/blog/grpo).
"""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class ActivationOffload:
    """Hooks for saved tensors that move the large ones to the host and back, on a stream of their own.

    At most ``ahead + 1`` of them are on the device in the forward, two in the backward (the one in use and the next),
    so the peak does not depend on how fast the copies are.

    Args:
        min_bytes: smaller tensors stay on the device.
        ahead: copies that may still run while the forward goes on.
        from_cpu: move tensors of the CPU too, to a second place there: for tests of the bookkeeping.
    """

    def __init__(self, min_bytes: int = 1 << 20, ahead: int = 1, *, from_cpu: bool = False) -> None:
        self.min_bytes, self.ahead, self.from_cpu = min_bytes, ahead, from_cpu
        self.moved_bytes = 0
        """Bytes sent to the host since the object was made."""
        self._leaving: deque[tuple[Tensor, torch.cuda.Event | None, _Slot]] = deque()
        self._last: weakref.ref[_Slot] | None = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationOffload:
        return ActivationOffload(self.min_bytes, self.ahead, from_cpu=self.from_cpu)

    def start(self) -> None:
        """A new forward pass begins: nothing of an earlier one is fetched ahead any more."""
        self._leaving.clear()
        self._last = None

    def hooks(self) -> AbstractContextManager[None]:
        """Within the context, saved tensors go through this object."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | _Slot:
        if tensor.nbytes < self.min_bytes or not (tensor.is_cuda or self.from_cpu):
            return tensor
        slot = _Slot(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda), tensor.device)
        slot.before, self._last = self._last, weakref.ref(slot)
        event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            stream = self._stream(tensor.device)
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(stream):
                slot.host.copy_(tensor, non_blocking=True)
                event = torch.cuda.Event()
                event.record(stream)
        else:
            slot.host.copy_(tensor)
        self.moved_bytes += tensor.nbytes
        self._leaving.append((tensor, event, slot))
        while len(self._leaving) > self.ahead:
            _, copied, _ = self._leaving.popleft()
            if copied is not None:  # from here on the device memory may be given to others
                torch.cuda.current_stream(tensor.device).wait_event(copied)
        return slot

    def _unpack(self, packed: Tensor | _Slot) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        here = [tensor for tensor, _, slot in self._leaving if slot is packed]
        tensor = here[0] if here else self._fetch(packed)
        # The backward needs no more of the forward's own tensors, and goes through the layers from the last.
        self._leaving.clear()
        packed.fetched = None
        before = packed.before() if packed.before is not None else None
        if before is not None and before.fetched is None:
            self._prefetch(before)
        return tensor

    def _fetch(self, slot: _Slot) -> Tensor:
        if slot.fetched is None:
            self._prefetch(slot)
        assert slot.fetched is not None
        tensor, event = slot.fetched
        if event is not None:
            torch.cuda.current_stream(slot.device).wait_event(event)
        return tensor

    def _prefetch(self, slot: _Slot) -> None:
        tensor = torch.empty(slot.host.shape, dtype=slot.host.dtype, device=slot.device)
        if slot.device.type != "cuda":
            slot.fetched = (tensor.copy_(slot.host), None)
            return
        stream = self._stream(slot.device)
        stream.wait_stream(torch.cuda.current_stream(slot.device))  # who had this memory before is done with it
        with torch.cuda.stream(stream):
            tensor.copy_(slot.host, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        slot.fetched = (tensor, event)

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]


class _Slot:
    """One tensor on the host, and its copy on the device while that is on its way."""

    __slots__ = ("__weakref__", "before", "device", "fetched", "host")

    def __init__(self, host: Tensor, device: torch.device) -> None:
        self.host, self.device = host, device
        self.before: weakref.ref[_Slot] | None = None
        self.fetched: tuple[Tensor, torch.cuda.Event | None] | None = None
