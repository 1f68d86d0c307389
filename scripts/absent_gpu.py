"""A GPU that isn't there: CUDA code runs up to its Triton launches, which compile their kernels for it and stop.

Tensors are torch's fake CUDA ones, which have a shape and no memory, and Triton's driver is one that names the card.
All that is patched for it is patched here.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from grpo_lit.kernels._triton import launch


class Card(NamedTuple):
    """Compute capability, multiprocessors, and bytes of shared memory that a program may take."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int


# CUDA programming guide, technical specifications by compute capability
CARDS = {
    "a100": Card((8, 0), 108, 166912),
    "3060ti": Card((8, 6), 38, 101376),
    "4060": Card((8, 9), 24, 101376),
    "h200": Card((9, 0), 132, 232448),
    "5060ti": Card((12, 0), 36, 101376),
}


class Kernel(NamedTuple):
    """A kernel as compiled. ``verdict`` says "fits" or what is wrong."""

    name: str
    shape: str
    ptx: str
    registers: int
    spilled: int
    shared: int
    verdict: str


class Compiled:
    """Kernels of one card; what is launched is noted under ``shape``."""

    def __init__(self, card: Card) -> None:
        self.card, self.shape = card, ""
        self.kernels: dict[tuple[str, str], Kernel] = {}
        self.launches: dict[tuple[str, str], int] = {}

    def note(self, name: str, compiled: Any) -> None:
        """Of a launch: what the compiler made, or the error that it ended with."""
        failed = isinstance(compiled, Exception)
        source = str(compiled) if failed else compiled.asm["ptx"]
        key = name, hashlib.sha256(source.encode()).hexdigest()[:8]
        self.launches[key] = self.launches.get(key, 0) + 1
        if key in self.kernels:
            return
        if failed:
            verdict = f"does not compile: {type(compiled).__name__}: {source.strip().splitlines()[-1][:200]}"
            self.kernels[key] = Kernel(name, self.shape, key[1], 0, 0, 0, verdict)
            return
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(compiled.asm["cubin"])
            command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = (int(n) for n in re.findall(r"REG:(\d+) STACK:(\d+)", text)[0])
        shared = compiled.metadata.shared
        verdict = "fits" if shared <= self.card.shared_memory else "takes too much shared memory"
        self.kernels[key] = Kernel(name, self.shape, key[1], registers, stack, shared, verdict)


def _getitem(self: Tensor, index: Any) -> Tensor:
    """Indexing by the dispatcher: a torch without CUDA refuses its own to fake CUDA tensors (and `copy_`)."""
    dim = 0
    for i in index if isinstance(index, tuple) else (index,):
        if isinstance(i, int):
            self = self.select(dim, i)
            continue
        if isinstance(i, slice):
            self = torch.ops.aten.slice(self, dim, i.start, i.stop)
        else:
            self = self.unsqueeze(dim) if i is None else self.index_select(dim, i)
        dim += 1
    return self


@contextlib.contextmanager
def absent_gpu(card: Card) -> Iterator[Compiled]:
    """Inside, CUDA tensors are fake ones on ``card`` and launches compile only. All that is patched is patched here."""
    compiled, run, number = Compiled(card), JITFunction.run, 10 * card.capability[0] + card.capability[1]
    properties = {"multiprocessor_count": card.multiprocessors, "max_shared_mem": card.shared_memory}
    fake_driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", number, 32),
        get_current_device=lambda: number,  # Triton keeps kernels by device
        get_current_stream=lambda _: 0,
        utils=SimpleNamespace(get_device_properties=lambda _: properties),
    )

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            compiled.note(self.fn.__name__, run(self, *args, **kwargs | {"warmup": True}))
        except Exception as error:  # whatever stops the compiler is a line of the table
            compiled.note(self.fn.__name__, error)

    patches = [
        (JITFunction, "run", compile_only),
        (FakeTensor, "data_ptr", lambda self: (1 << 20) + self.storage_offset() * self.element_size()),
        (FakeTensor, "__getitem__", _getitem),
        (FakeTensor, "copy_", lambda self, _: self),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "get_device_capability", lambda _=None: card.capability),
        (torch.cuda, "_exchange_device", lambda _: 0),
        (torch.cuda, "_maybe_exchange_device", lambda _: 0),
        (triton.knobs.compilation, "disable_line_info", True),  # the hash is of instructions alone
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.callback(driver.set_active, driver._active)
        driver.set_active(fake_driver)
        for cache in (launch._overlaps, launch.device_limits, launch.arrival_counters):
            cache.cache_clear()
            stack.callback(cache.cache_clear)
        stack.enter_context(torch.no_grad())
        stack.enter_context(FakeTensorMode())
        yield compiled
