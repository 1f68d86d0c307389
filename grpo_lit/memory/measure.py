"""What memory is taken right now, and by what: the measured side of the planner's tables."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from grpo_lit.memory.plan import KINDS, Ledger
from grpo_lit.oom import memory_limit

_STATUS = Path("/proc/self/status")


class Reading(NamedTuple):
    """Bytes now, and the most since `Meter.reset`."""

    allocated: int
    """Live tensors; on the CPU the resident set of the process."""
    reserved: int
    """What the caching allocator holds; on the CPU as `allocated`."""
    peak_allocated: int
    peak_reserved: int

    @property
    def fragmentation(self) -> float:
        """Share of what was reserved at the peak that the live tensors of the peak did not fill, in [0, 1]."""
        return 0.0 if not self.peak_reserved else max(0.0, 1 - self.peak_allocated / self.peak_reserved)


class Meter:
    """Memory of one device; without CUDA that of this process on the host.

    Args:
        device: what is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_cuda = device.type == "cuda"

    def reset(self) -> None:
        """Forget the peaks."""
        if self.on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with suppress(OSError):  # Linux: resets the high-water mark of the resident set
                Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> Reading:
        """Now and the peak."""
        if not self.on_cuda:
            now, peak = host_memory()
            return Reading(now, now, max(now, peak), max(now, peak))
        return Reading(
            torch.cuda.memory_allocated(self.device),
            torch.cuda.memory_reserved(self.device),
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
        )

    def capacity(self) -> int:
        """Bytes this process may take: of the device, less where a per-process limit is set; of the host's memory."""
        if not self.on_cuda:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return memory_limit(self.device)

    def free(self) -> int:
        """Bytes that this process could still take; on Linux without CUDA what the system calls available."""
        if self.on_cuda:
            return self.capacity() - torch.cuda.memory_allocated(self.device)
        with suppress(OSError, KeyError, ValueError):
            lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
            return int(lines["MemAvailable"].split()[0]) * 1024
        return self.capacity() - host_memory()[0]


def host_memory() -> tuple[int, int]:
    """Resident set of this process and its high-water mark, in bytes."""
    with suppress(OSError, KeyError, ValueError):
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        return int(fields["VmRSS"].split()[0]) * 1024, int(fields["VmHWM"].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, peak


def tensor_ledger(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Ledger:
    """Bytes of the tensors that stay, by kind.

    Args:
        model: a transformers causal language model, adapters included.
        optimizer: its moments; None where there is none yet.

    Returns:
        Bytes of each of `grpo_lit.memory.plan.KINDS`; the KV cache and what follows it are no tensors of the model's.
    """
    ledger = dict.fromkeys(KINDS, 0)
    seen: set[tuple[torch.device, int]] = set()

    def add(kind: str, tensors: Iterable[Tensor | None]) -> None:
        for tensor in tensors:
            if tensor is None or not tensor.numel():
                continue
            key = (tensor.device, tensor.data_ptr())
            if key not in seen:
                seen.add(key)
                ledger[kind] += tensor.nbytes

    head, embedding = (
        getattr(model, name, lambda: None)() for name in ("get_output_embeddings", "get_input_embeddings")
    )
    tables = [p for module in (embedding, head) if module is not None for p in _stored(module)]
    add("embedding, head", (t for t in tables if not t.requires_grad))
    for module in model.modules():
        for tensor in _stored(module, recurse=False):
            add("adapters" if tensor.requires_grad else "base weights", [tensor])
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return ledger | moving_ledger(parameters, optimizer)


def moving_ledger(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer | None) -> Ledger:
    """Bytes of what comes and goes between phases: gradients, and moments on the parameters' device."""
    ledger = {"gradients": 0, "optimizer": 0}
    for parameter in parameters:
        if parameter.grad is not None:
            ledger["gradients"] += parameter.grad.nbytes
        if optimizer is not None:
            state = optimizer.state.get(parameter, {}).values()
            own = (v for v in state if isinstance(v, Tensor) and v.device == parameter.device)
            ledger["optimizer"] += sum(value.nbytes for value in own)
    return ledger


def _stored(module: nn.Module, recurse: bool = True) -> Iterable[Tensor]:
    """Parameters and buffers, and the scales of those in 4 bits."""
    for parameter in module.parameters(recurse):
        yield parameter
        state = getattr(parameter, "quant_state", None)
        if state is not None:
            yield from _quant_state(state)
    yield from module.buffers(recurse)


def _quant_state(state: object) -> Iterable[Tensor]:
    for name in ("absmax", "code", "offset"):
        value = getattr(state, name, None)
        if isinstance(value, Tensor):
            yield value
    if (second := getattr(state, "state2", None)) is not None:
        yield from _quant_state(second)
