"""What the decode kernels' launches share: overlapping a kernel's start with the end of the one before it.

A decode step is some 200 short kernels, each of which would wait for the whole previous one before it even
starts. With programmatic dependent launch (CUDA programming guide, since compute capability 9.0) a kernel starts
early, loads what does not depend on the previous one (weights), and waits only then.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from grpo_lit.kernels.dispatch import interpreting

_COUNTERS = 16384


@triton.jit
def wait_for_previous(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Lets the next kernel start, and returns once the previous one's results are visible.

    Every kernel that is launched to overlap must call it, before it reads anything that another kernel wrote and
    before it writes anything.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Asks for the cache lines of ``pointers`` in the second-level cache; called before `wait_for_previous`."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )


@functools.cache
def _overlaps(device: torch.device) -> bool:
    return not interpreting() and torch.cuda.get_device_capability(device) >= (9, 0)


class Device(NamedTuple):
    """What a launch is planned by: multiprocessors, and the bytes of shared memory a program may take."""

    multiprocessors: int
    shared_memory: int


@functools.cache
def device_limits(device: torch.device) -> Device:
    """Of a GPU; an H200's for the interpreter."""
    if device.type != "cuda":
        return Device(132, 232448)
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = driver.active.utils.get_device_properties(index)
    return Device(properties["multiprocessor_count"], properties["max_shared_mem"])


def overlap(tensor: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that calls `wait_for_previous`; PDL is among its parameters."""
    if tensor.is_cuda and _overlaps(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@functools.cache
def arrival_counters(device: torch.device) -> Tensor:
    """(16384,) int32 zeros on ``device``: programs that share a result count their arrivals in them.

    The last to arrive adds the parts up in a fixed order and sets the counter back to 0, so every kernel finds zeros.
    All kernels use the same ones: they must run one after another, on one stream.
    """
    return torch.zeros(_COUNTERS, dtype=torch.int32, device=device)


def counters_for(count: int, device: torch.device) -> Tensor:
    """`arrival_counters`, after a check that there are ``count`` of them."""
    assert count <= _COUNTERS, count
    return arrival_counters(device)
