"""The named parts of a training step: timed, measured, and announced to callbacks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from lightning.pytorch import LightningModule, Trainer

Phase = Literal["rollout", "reward", "score", "train", "optimizer", "validate"]


class PhaseListener:
    """Mix-in for callbacks that hear when a phase of the step starts and ends."""

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        """Called before the phase's work."""

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, seconds: float) -> None:
        """Called after the phase's work, with its wall-clock time."""


class PhaseRecorder:
    """Times phases and records the peak of allocated CUDA memory in each; a phase may run several times a step.

    Args:
        pl_module: the module whose trainer's callbacks are told.
    """

    def __init__(self, pl_module: LightningModule) -> None:
        self._pl_module = pl_module
        self.seconds: dict[Phase, float] = {}
        self.peak_mib: dict[Phase, float] = {}

    def reset(self) -> None:
        """Start a new step."""
        self.seconds.clear()
        self.peak_mib.clear()

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Run the body as one phase."""
        trainer, module = self._pl_module.trainer, self._pl_module
        listeners = [callback for callback in trainer.callbacks if isinstance(callback, PhaseListener)]  # type: ignore[attr-defined]
        for callback in listeners:
            callback.on_phase_start(trainer, module, phase)
        cuda = module.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(module.device)
            torch.cuda.reset_peak_memory_stats(module.device)
        start = time.perf_counter()
        yield
        if cuda:
            torch.cuda.synchronize(module.device)
            peak = torch.cuda.max_memory_allocated(module.device) / 2**20
            self.peak_mib[phase] = max(peak, self.peak_mib.get(phase, 0.0))
        seconds = time.perf_counter() - start
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        for callback in listeners:
            callback.on_phase_end(trainer, module, phase, seconds)
