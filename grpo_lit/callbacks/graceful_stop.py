"""Ctrl-C and SIGTERM finish the step, save and stop; a second Ctrl-C stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from grpo_lit.callbacks._schedule import validation_follows

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GracefulStop(Callback):
    """Turns the first SIGINT or SIGTERM into a stop after the current rollout step.

    The step is completed, with its validation where one belongs to it, recorded and saved, so that ``--ckpt_path last``
    goes on with the next prompt. With several ranks the stop is agreed by all.
    """

    def __init__(self) -> None:
        self.requested: str | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the signals, where this is the main thread; Lightning gives them back at the end."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.requested is not None and number == signal.SIGINT:
            print("\nstopping at once, this step is lost", flush=True)
            raise KeyboardInterrupt
        self.requested = name
        print(f"\n{name}: finishing this step, then saving; press Ctrl-C again to stop at once", flush=True)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Agree on the stop."""
        if trainer.strategy.reduce_boolean_decision(self.requested is not None, all=False):
            if trainer.is_global_zero:
                print("stopping as asked; resume with --ckpt_path last", flush=True)
            if not validation_follows(trainer, batch_idx):  # Lightning would make one; the run it is part of would not
                trainer.limit_val_batches = 0
            trainer.should_stop = True
