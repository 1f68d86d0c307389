"""Segments that grow: torch's CUDA allocator without gaps between blocks of different sizes."""

from __future__ import annotations

import os
import sys

import torch

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def expand_segments() -> bool:
    """Have CUDA memory mapped into segments that grow, where the user has not set the allocator up.

    Rollouts and passes over long and short rows want blocks of ever new sizes; an allocator that asks the driver for
    each keeps those that fit nothing any more. The setting is made in this process, not in its environment: child
    processes (vLLM, whose memory pools do without) start as they always do. ``PYTORCH_ALLOC_CONF``, set to anything,
    is left alone: ``expandable_segments:False`` switches it off.

    Returns:
        Whether the setting was made.
    """
    if not sys.platform.startswith("linux") or torch.version.cuda is None:
        return False
    if any(os.environ.get(name) for name in _VARIABLES):
        return False
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True
