"""What an evaluation ran on: versions and device, for the record."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

from grpo_lit import __version__

_PACKAGES = ("torch", "transformers", "lightning", "vllm", "triton", "bitsandbytes", "math-verify", "peft", "numpy")


def versions() -> dict[str, str]:
    """Versions of what is installed, Python, and the device's name."""
    found = {"grpo-lit": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU ({platform.machine()})"
    return found
