"""Which implementation of an op runs: the Triton kernels or plain torch.

Triton is looked up, never imported, until a Triton kernel is really wanted, so that
``import grpo_lit.kernels`` works (and stays quick) on machines that have no Triton.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Mapping
from typing import Literal, get_args

import torch

from grpo_lit.errors import UserError

Impl = Literal["triton", "torch"]

_log = logging.getLogger("grpo_lit.kernels")

OPS = (
    "add_layer_norm",
    "add_rms_norm",
    "advance_rows",
    "decode_linear",
    "decoder_layer",
    "fused_linear_grpo",
    "fused_logits_grpo",
    "gated_activation",
    "grpo_token_loss",
    "linear_logprobs",
    "nf4_dequantize",
    "nf4_matmul",
    "paged_attention",
    "rope_cache",
    "sample_token",
)
"""Ops that have both implementations; ``decoder_layer`` is the small operations of `grpo_lit.fused_layers`."""


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


_overrides: dict[str, Impl] = {}
_used: dict[str, Impl] = {}
_logged: set[tuple[str, ...]] = set()


def check_overrides(overrides: Mapping[str, str], argument: str = "kernels") -> dict[str, Impl]:
    """Ops and implementations as given, once their names are known to be right.

    Raises:
        UserError: an op or an implementation that doesn't exist.
    """
    checked: dict[str, Impl] = {}
    for op, impl in overrides.items():
        if op not in OPS:
            raise UserError(argument, op, ", ".join(OPS))
        if impl not in get_args(Impl):
            raise UserError(f"{argument}.{op}", impl, " or ".join(get_args(Impl)))
        checked[op] = "triton" if impl == "triton" else "torch"
    return checked


def set_impl(overrides: Mapping[str, str], argument: str = "kernels", device: torch.device | None = None) -> None:
    """Implementations of ops whose caller names none, instead of the device's default; replaces earlier ones.

    Args:
        overrides: op to ``"triton"`` or ``"torch"``.
        argument: what the user wrote them under, for the error.
        device: where the ops will run, to learn of an impossible choice now; None waits for the op's first call.

    Raises:
        UserError: as of `check_overrides`, and for ``"triton"`` where ``device`` has none.
    """
    checked = check_overrides(overrides, argument)
    for op, impl in checked.items():
        if device is not None:
            _check_possible(f"{argument}.{op}", impl, device)
    _overrides.clear()
    _overrides.update(checked)
    _used.clear()


def used_impls() -> dict[str, Impl]:
    """The implementation that each op last ran as, since the process began or `set_impl`."""
    return dict(_used)


def _log_choice(op: str, chosen: Impl, device: torch.device, why: str) -> None:
    """One line for each op and device in a process; nothing inside torch.compile, which can't trace it."""
    if torch.compiler.is_compiling():
        return
    _used[op] = chosen
    choice = (op, chosen, device.type, why)
    if choice not in _logged:
        _logged.add(choice)
        _log.info("%s runs as %s on %s (%s)", *choice)


def resolve_impl(op: str, impl: str | None, device: torch.device) -> Impl:
    """Turns the ``impl`` argument of an op into the implementation to run, and logs it once.

    Args:
        op: name of the op, for the log and the error.
        impl: ``"triton"``, ``"torch"`` or None (what `set_impl` says, else by device).
        device: where the op's tensors are.

    Raises:
        UserError: for any other name, for ``"triton"`` without Triton, and for ``"triton"`` on the CPU
            unless Triton's interpreter is on.
    """
    if impl is None and op in _overrides:
        return _checked(op, _overrides[op], device, "as configured")
    if impl is None:
        chosen = default_impl(device)
        _log_choice(op, chosen, device, "by device")
        return chosen
    return _checked(op, impl, device, "as asked")


def _checked(op: str, impl: str, device: torch.device, why: str) -> Impl:
    if impl == "torch":
        _log_choice(op, "torch", device, why)
        return "torch"
    if impl != "triton":
        raise UserError(f"{op}: impl", impl, "'triton', 'torch' or None")
    _check_possible(f"{op}: impl", "triton", device)
    _log_choice(op, "triton", device, why)
    return "triton"


def _check_possible(argument: str, impl: Impl, device: torch.device) -> None:
    if impl == "triton" and not triton_available():
        raise UserError(argument, impl, "'torch' where the package triton is not installed")
    if impl == "triton" and device.type == "cpu" and not interpreting():
        raise UserError(argument, impl, "'torch' on the CPU (or TRITON_INTERPRET=1 for tests)")
