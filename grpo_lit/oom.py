"""Out of memory: how to recognise it, what its message says was missing, and how much a process may use."""

from __future__ import annotations

import re
import traceback
from typing import NamedTuple

import torch

from grpo_lit.errors import SystemFault

_UNITS = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_SIZE = r"(\d+(?:\.\d+)?) ?(bytes|B|KiB|MiB|GiB|TiB|PiB)\b"
# What allocations of libraries under torch say; torch's own allocator on the GPU raises torch.OutOfMemoryError.
_TEXTS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
    "not enough memory",
    "can't allocate memory",
    "failed to allocate memory",
)


class PeerOutOfMemory(RuntimeError):
    """Another rank ran out of memory; this one replays the phase with it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the GPU or the host, or was raised from one that does.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"))
    True
    >>> is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    False
    """
    return out_of_memory_in(error) is not None


def out_of_memory_in(error: BaseException | None) -> BaseException | None:
    """The error itself or the first of its causes that says that memory ran out."""
    while error is not None and not isinstance(error, SystemFault):  # whoever raised that has given up
        if isinstance(error, torch.OutOfMemoryError | MemoryError | PeerOutOfMemory):
            return error
        if isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS):
            return error
        error = error.__cause__
    return None


class Shortage(NamedTuple):
    """What an allocator's message says, in bytes; None where it does not."""

    wanted: int | None
    """Size of the allocation that failed."""
    free: int | None
    """What was free for this process: on the device, or under its limit."""

    @property
    def missing(self) -> int | None:
        """Bytes more that this allocation would have needed; at least 0."""
        if self.wanted is None or self.free is None:
            return None
        return max(self.wanted - self.free, 0)

    def __str__(self) -> str:
        """In words, for a message."""
        if self.wanted is None:
            return "the message does not say how much was missing"
        if self.missing is None:
            return f"{mebibytes(self.wanted)} more were wanted"
        return f"{mebibytes(self.wanted)} more were wanted, {mebibytes(self.missing)} of them missing"


def shortage(error: BaseException | str) -> Shortage:
    """Read the message of torch's allocator.

    >>> text = ("CUDA out of memory. Tried to allocate 600.00 MiB. GPU 0 has a total capacity of 7.65 GiB of which "
    ...         "1.00 GiB is free. Including non-PyTorch memory, this process has 6.00 GiB memory in use. 6.30 GiB "
    ...         "allowed; Of the allocated memory 5.70 GiB is allocated by PyTorch, and 100.00 MiB is reserved")
    >>> str(shortage(text))
    '600 MiB more were wanted, 293 MiB of them missing'
    """
    text = str(error)
    wanted = _size(rf"[Tt]r(?:ied|ying) to allocate {_SIZE}", text)
    free = _size(rf"of which {_SIZE} is free", text)
    in_use = _size(rf"this process has {_SIZE} memory in use", text)
    allowed = _size(rf"{_SIZE} allowed", text)
    if in_use is not None and allowed is not None:
        room = max(allowed - in_use, 0)
        free = room if free is None else min(free, room)
    return Shortage(wanted, free)


def _size(pattern: str, text: str) -> int | None:
    match = re.search(pattern, text)
    return None if match is None else int(float(match.group(1)) * _UNITS[match.group(2)])


def mebibytes(num_bytes: int) -> str:
    """Bytes as a short text, rounded up to whole MiB."""
    return f"{-(-num_bytes // 2**20)} MiB"


def without_frames(error: BaseException) -> Exception:
    """The out-of-memory error in it with nothing hanging on it: a traceback's frames keep their tensors alive."""
    found = out_of_memory_in(error)
    assert isinstance(found, Exception)
    drop_frames(error)
    return found


def drop_frames(error: BaseException) -> None:
    """Take tracebacks and causes off an exception, and what their frames hold."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        following = seen.__cause__ or seen.__context__
        seen.__traceback__ = seen.__cause__ = seen.__context__ = None
        seen = following


def memory_limit(device: torch.device) -> int:
    """Bytes of a CUDA device that this process may hold: its share, less what others use just now."""
    index = torch.cuda.current_device() if device.index is None else device.index
    free, total = torch.cuda.mem_get_info(index)
    share = int(total * torch.cuda.get_per_process_memory_fraction(index))  # which takes no "cuda" without an index
    return min(share, free + torch.cuda.memory_reserved(device))
