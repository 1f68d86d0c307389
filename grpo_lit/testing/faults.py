"""Out-of-memory errors on demand: raised at the n-th allocation or forward of a chosen phase."""

from __future__ import annotations

from typing import Any, Literal, cast, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from grpo_lit.errors import UserError
from grpo_lit.phases import Phase, PhaseListener

_TOO_MUCH = 2**50  # bytes; no device has them


class FaultInjector(PhaseListener, Callback):
    """Lets memory run out at a chosen moment, so that a run can prove that it loses nothing.

    On CUDA the error is the allocator's own, from an allocation that no device can serve; on the CPU the same class of
    error is raised in its place. Works as a callback in a configuration::

        trainer:
          callbacks:
            - class_path: grpo_lit.callbacks.OOMReplay
            - class_path: grpo_lit.testing.FaultInjector
              init_args: {phase: train, at: 40, rollout_step: 1, rank: 1}

    Args:
        phase: rollout, reward, score, train, optimizer or validate.
        at: which event of the phase fails, counted from 1; a replay counts from 1 again.
        event: allocation counts every operation that makes a new tensor, in forward and backward; forward counts
            passes through the model (in a rollout, those that are not replayed from a CUDA graph).
        rollout_step: the rollout step in which it happens, counted from 0; null is any.
        occurrence: which run of that phase within the step, from 1, such as the second pass of several; null is any.
        times: how often in all.
        rank: only on this rank; null is on all.

    Attributes:
        raised: how many errors it has raised so far.
    """

    def __init__(
        self,
        phase: str,
        at: int = 1,
        event: Literal["allocation", "forward"] = "allocation",
        rollout_step: int | None = None,
        occurrence: int | None = None,
        times: int = 1,
        rank: int | None = None,
    ) -> None:
        if phase not in get_args(Phase):
            raise UserError("FaultInjector.phase", phase, " | ".join(get_args(Phase)))
        for name, value in (("at", at), ("times", times), ("occurrence", occurrence or 1)):
            if value < 1:
                raise UserError(f"FaultInjector.{name}", value, "at least 1")
        self.phase, self.at, self.event = phase, at, event
        self.rollout_step, self.occurrence, self.times, self.rank = rollout_step, occurrence, times, rank
        self.raised = 0
        self._step = -1
        self._seen = 0
        self._mode: _AllocationCounter | None = None
        self._hook: RemovableHandle | None = None
        self._events = 0
        self._module: Any = None

    @override
    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        """Start to count, where this is the phase."""
        module = cast(Any, pl_module)
        if phase != self.phase or self.raised >= self.times or self.rank not in (None, trainer.global_rank):
            return
        if self._step != module.rollout_step:
            self._step, self._seen = module.rollout_step, 0
        self._seen += 1
        if self.rollout_step not in (None, self._step) or self.occurrence not in (None, self._seen):
            return
        self._events, self._module = 0, module
        if self.event == "forward":
            # whichever way the layers are run, the tokens are embedded first
            embedding = module.live_policy.model.get_input_embeddings()
            self._hook = embedding.register_forward_pre_hook(lambda *_: self.count())
        else:
            self._mode = _AllocationCounter(self)
            self._mode.__enter__()

    @override
    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, seconds: float) -> None:
        """Stop to count."""
        self._stop()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop to count."""
        self._stop()

    def _stop(self) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def count(self) -> None:
        """One more event; the n-th fails.

        Raises:
            torch.OutOfMemoryError: by the allocator on CUDA, in its place on the CPU.
        """
        if self.raised >= self.times or self._module is None or not self._module.phase.attempting:
            return
        self._events += 1
        if self._events < self.at:
            return
        self.raised += 1
        self._events = 0
        raise_out_of_memory(self._module.device)


class _AllocationCounter(TorchDispatchMode):
    """Tells the injector about every operation whose result is a new tensor."""

    def __init__(self, injector: FaultInjector) -> None:
        super().__init__()
        self._injector = injector

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(result.alias_info is None for result in func._schema.returns):
            self._injector.count()
        return func(*args, **(kwargs or {}))


def raise_out_of_memory(device: torch.device) -> None:
    """Let an allocation fail.

    Raises:
        torch.OutOfMemoryError: always.
    """
    if device.type == "cuda":
        torch.empty(_TOO_MUCH, dtype=torch.uint8, device=device)
    raise torch.OutOfMemoryError(
        "stand-in for CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 8.00 GiB of which "
        "512.00 MiB is free."
    )
