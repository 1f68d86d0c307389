"""Which implementation of an op runs: the Triton kernels or plain torch.

Triton is looked up, never imported, until a Triton kernel is really wanted, so that
``import grpo_lit.kernels`` works (and stays quick) on machines that have no Triton.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Literal

import torch

from grpo_lit.errors import UserError

Impl = Literal["triton", "torch"]

_log = logging.getLogger("grpo_lit.kernels")


# looked up once: torch.compile can't trace the import system
_TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def triton_available() -> bool:
    """True where the package ``triton`` is installed (it is not imported to find out)."""
    return _TRITON_INSTALLED


def interpreting() -> bool:
    """True where Triton's CPU interpreter is switched on (``TRITON_INTERPRET=1``)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def default_impl(device: torch.device | str) -> Impl:
    """The implementation taken when the caller names none: ``"triton"`` on CUDA, ``"torch"`` elsewhere."""
    return "triton" if torch.device(device).type == "cuda" and triton_available() else "torch"


_logged: set[tuple[str, ...]] = set()


def _log_choice(*choice: str) -> None:
    """One line for each op and device in a process; nothing inside torch.compile, which can't trace it."""
    if not torch.compiler.is_compiling() and choice not in _logged:
        _logged.add(choice)
        _log.info("%s runs as %s on %s (%s)", *choice)


def resolve_impl(op: str, impl: str | None, device: torch.device) -> Impl:
    """Turns the ``impl`` argument of an op into the implementation to run, and logs it once.

    Args:
        op: name of the op, for the log and the error.
        impl: ``"triton"``, ``"torch"`` or None (pick by device).
        device: where the op's tensors are.

    Raises:
        UserError: for any other name, for ``"triton"`` without Triton, and for ``"triton"`` on the CPU
            unless Triton's interpreter is on.
    """
    if impl is None:
        chosen = default_impl(device)
        _log_choice(op, chosen, device.type, "by device")
        return chosen
    if impl == "torch":
        _log_choice(op, impl, device.type, "as asked")
        return "torch"
    if impl != "triton":
        raise UserError(f"{op}: impl", impl, "'triton', 'torch' or None")
    if not triton_available():
        raise UserError(f"{op}: impl", impl, "'torch' where the package triton is not installed")
    if device.type == "cpu" and not interpreting():
        raise UserError(f"{op}: impl", impl, "'torch' on the CPU (or TRITON_INTERPRET=1 for tests)")
    _log_choice(op, impl, device.type, "as asked")
    return "triton"
