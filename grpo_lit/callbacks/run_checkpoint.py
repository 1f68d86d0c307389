"""Keep the last checkpoint and the best one by validation accuracy."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from grpo_lit.callbacks._schedule import validation_follows
from grpo_lit.errors import UserError


class RunCheckpoint(ModelCheckpoint):
    """Writes ``checkpoints/last.ckpt`` after every n-th rollout step and the best by a validation metric.

    Where a validation follows the step, the checkpoint is written after it: what is saved is a complete step, so that a
    resumed run repeats nothing and skips nothing.

    Args:
        every_n_rollout_steps: how often ``last.ckpt`` is written; it is also written after every validation and at the
            end of the run.
        monitor: metric that decides which checkpoint is best.
        mode: ``max`` where larger is better.
        save_top_k: how many of the best are kept; 0 keeps only the last, -1 all.

    Raises:
        UserError: a number is out of range, or there is no such mode.
    """

    def __init__(
        self,
        every_n_rollout_steps: int = 1,
        monitor: str = "val/accuracy",
        mode: str = "max",
        save_top_k: int = 1,
    ) -> None:
        if every_n_rollout_steps < 1:
            raise UserError("checkpoint.every_n_rollout_steps", every_n_rollout_steps, "at least 1")
        if mode not in ("max", "min"):
            raise UserError("checkpoint.mode", mode, "max or min")
        if save_top_k < -1:
            raise UserError("checkpoint.save_top_k", save_top_k, "-1 (all), 0 (only the last) or more")
        super().__init__(
            filename="step={step}-" + monitor.rpartition("/")[2] + "={" + monitor + ":.4f}",
            monitor=monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=True,
            auto_insert_metric_name=False,
            enable_version_counter=False,
        )
        self.every_n_rollout_steps = every_n_rollout_steps
        self._saved_at = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the checkpoints into the run's folder."""
        if self.dirpath is None:
            self.dirpath = f"{trainer.default_root_dir}/checkpoints"
        super().setup(trainer, pl_module, stage)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save the last checkpoint, unless a validation belongs to this step."""
        step = int(pl_module.rollout_step)  # type: ignore[arg-type]
        if step % self.every_n_rollout_steps == 0 and not validation_follows(trainer, batch_idx):
            self._save_last(trainer, step)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the best where this is one, and the last.

        Raises:
            UserError: validation does not measure ``monitor``; found at the validation before training.
        """
        if trainer.state.fn != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        measured: dict[str, float] = pl_module.validation_metrics  # type: ignore[assignment]
        assert self.monitor is not None
        if self.monitor.startswith("val/") and self.monitor not in measured:
            raise UserError("checkpoint.monitor", self.monitor, f"one of {', '.join(measured)}")
        if trainer.sanity_checking:
            return
        candidates = self._monitor_candidates(trainer)
        candidates |= {name: torch.tensor(value) for name, value in measured.items()}
        if self.monitor in candidates:
            self._save_topk_checkpoint(trainer, candidates)
        self._save_last(trainer, int(pl_module.rollout_step))  # type: ignore[arg-type]

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Nothing: epochs mean little here."""

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, if it is not saved yet."""
        self._save_last(trainer, int(pl_module.rollout_step))  # type: ignore[arg-type]

    def _save_last(self, trainer: Trainer, rollout_step: int) -> None:
        if rollout_step == self._saved_at or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._saved_at = rollout_step
        self._save_last_checkpoint(trainer, self._monitor_candidates(trainer))
