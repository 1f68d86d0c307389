"""One record per rollout step, in metrics.jsonl and in every logger."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from grpo_lit.callbacks._schedule import validation_follows
from grpo_lit.files import append_line, read_lines

TIMING_PREFIXES = ("perf/", "vram/", "oom/", "micro_batch/")


class MetricsFile(Callback):
    """Appends one JSON object per rollout step to ``metrics.jsonl`` and hands the same to the trainer's loggers.

    The record of a step is written when the step is complete: its validation, if one follows, is part of it. ``step``
    is the rollout step, 0 for the validation before training. A resumed run never writes a step twice: where it
    repeats one that an interrupted run had recorded, the recorded line stays and the new one goes to
    ``metrics.repeated.jsonl`` if it differs in more than timings.
    """

    def __init__(self) -> None:
        self._recorded: dict[int, dict[str, Any]] = {}
        self._pending: dict[str, Any] | None = None

    @staticmethod
    def path(trainer: Trainer) -> Path:
        """The file of a run."""
        return Path(trainer.default_root_dir) / "metrics.jsonl"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read what an earlier run recorded, dropping a torn last line."""
        if stage == "fit" and trainer.is_global_zero:
            self._recorded = {line["step"]: line for line in read_metrics(self.path(trainer), repair=True)}

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step, or wait for its validation."""
        self._pending = {"step": pl_module.rollout_step, **pl_module.step_metrics}  # type: ignore[dict-item]
        if not validation_follows(trainer, batch_idx):
            self._write(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the step with its validation."""
        if trainer.state.fn != "fit":
            return
        if self._pending is None:
            self._pending = {"step": pl_module.rollout_step}
        self._pending |= pl_module.validation_metrics  # type: ignore[arg-type]
        self._write(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record what still waits."""
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        record, self._pending = self._pending, None
        if record is not None:  # JSON has no NaN; the count of skipped steps says why a value is missing
            record = {name: value if math.isfinite(value) else None for name, value in record.items()}
        if record is None or not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        step = record["step"]
        earlier = self._recorded.get(step)
        if earlier is None:
            self._recorded[step] = record
            append_line(self.path(trainer), record)
        elif without_timings(earlier) != without_timings(json.loads(json.dumps(record))):
            append_line(self.path(trainer).with_name("metrics.repeated.jsonl"), record)
        for logger in trainer.loggers:
            known = {name: float(value) for name, value in record.items() if name != "step" and value is not None}
            logger.log_metrics(known, step=step)
            logger.save()


def without_timings(record: dict[str, Any]) -> dict[str, Any]:
    """A metrics record without the figures that depend on the clock or the allocator."""
    return {name: value for name, value in record.items() if not name.startswith(TIMING_PREFIXES)}


def read_metrics(path: Path, *, repair: bool = False) -> list[dict[str, Any]]:
    """Records of a metrics file; a last line torn by a crash is left out, and cut off with `repair`.

    Raises:
        SystemFault: another line is no record.
    """
    return read_lines(path, {"step": int}, repair=repair)
