"""A progress bar that says what the step is doing and what came of the last one."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from typing_extensions import override

from grpo_lit.phases import Phase, PhaseListener


def columns() -> list[ProgressColumn]:
    """Of the bar. A narrow terminal cuts the texts at the end: rich narrows first what may wrap or has a ratio."""

    def fixed(width: int) -> Column:
        return Column(min_width=width, no_wrap=True)

    def rest() -> Column:
        return Column(ratio=1, no_wrap=True)

    return [
        TextColumn("rollout step", table_column=fixed(12)),
        MofNCompleteColumn(table_column=fixed(9)),
        BarColumn(bar_width=8, table_column=fixed(8)),
        TimeElapsedColumn(table_column=fixed(7)),
        TextColumn("[cyan]{task.fields[phase]:<9}", table_column=fixed(9)),
        TextColumn("{task.fields[rows]}", table_column=rest()),
        TextColumn("{task.description}", table_column=rest()),
    ]


class StepProgress(PhaseListener, ProgressBar):
    """Shows rollout steps, phase, reward, completion length, tokens per second and validation accuracy.

    On a terminal it is a rich progress bar; elsewhere a line is printed every so often.

    Args:
        seconds_between_lines: at most one plain line in this time, where there is no terminal.
    """

    def __init__(self, seconds_between_lines: float = 5.0) -> None:
        super().__init__()
        self.seconds_between_lines = seconds_between_lines
        self._enabled = True
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._last_line = self._phase_start = self._validation_line = 0.0
        self._text = ""

    @override
    def disable(self) -> None:
        """Show nothing: Lightning calls this on all ranks but the first."""
        self._enabled = False

    @override
    def enable(self) -> None:
        """Show again."""
        self._enabled = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the bar."""
        if not self._enabled or not sys.stdout.isatty():
            return
        self._bar = Progress(
            *columns(),
            expand=True,
        )
        steps = pl_module.total_optimizer_steps() // pl_module.ppo_passes  # type: ignore[operator]
        done = int(pl_module.rollout_step)  # type: ignore[arg-type]
        self._task = self._bar.add_task("", total=max(steps, 1), completed=done, phase="", rows="")
        self._bar.start()

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        """Name the phase."""
        self._phase_start = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, phase=phase, rows="")

    def on_rollout_progress(
        self, trainer: Trainer, pl_module: LightningModule, rows_done: int, num_rows: int, num_tokens: int
    ) -> None:
        """Show how far the rollout is; without a terminal only where a single one takes long."""
        text = f"{rows_done}/{num_rows} rows, {num_tokens} tokens"
        if self._bar is not None:
            self._bar.update(self._task, rows=text)
        elif (
            self._enabled
            and time.monotonic() - max(self._last_line, self._phase_start) > 6 * self.seconds_between_lines
        ):
            self._last_line = time.monotonic()
            print(f"rollout step {int(pl_module.rollout_step) + 1}: sampling, {text}", flush=True)  # type: ignore[arg-type]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show what came of the step."""
        self._text = describe(pl_module.step_metrics)  # type: ignore[arg-type]
        step = int(pl_module.rollout_step)  # type: ignore[arg-type]
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=self._text)
        elif self._enabled and time.monotonic() - self._last_line >= self.seconds_between_lines:
            self._last_line = time.monotonic()
            print(f"rollout step {step}: {self._text}", flush=True)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from here: a validation that is quick is only told when it is done."""
        self._validation_line = time.monotonic()

    @override
    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Show how far the validation is; without a terminal only where it takes long."""
        text = f"{batch_idx + 1}/{trainer.num_val_batches[0]} batches"
        if self._bar is not None:
            self._bar.update(self._task, rows=text)
        elif self._enabled and time.monotonic() - self._validation_line > 6 * self.seconds_between_lines:
            self._validation_line = time.monotonic()
            print(f"validation after rollout step {pl_module.rollout_step}: {text}", flush=True)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the validation accuracy on a line of its own."""
        metrics: Any = pl_module.validation_metrics
        if not self._enabled or "val/accuracy" not in metrics:
            return
        line = f"validation after rollout step {pl_module.rollout_step}: accuracy {metrics['val/accuracy']:.3f}"
        if self._bar is not None:
            self._bar.console.print(line)
        else:
            print(line, flush=True)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar: after Ctrl-C there is no teardown, and an open one hides the cursor and what is said last."""
        self.teardown(trainer, pl_module, "fit")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    @override
    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above the bar."""
        text = sep.join(map(str, args))
        if self._bar is not None:
            self._bar.console.print(text)
        else:
            print(text, flush=True)


def describe(metrics: dict[str, float]) -> str:
    """A step's reward, length, truncation and speed in a few words."""
    parts = [
        f"reward {metrics['rollout/reward_mean']:.3f}",
        f"length {metrics['rollout/completion_length']:.0f}",
        f"flat {metrics['rollout/zero_variance_groups']:.0%}",
        f"{metrics['perf/tokens_per_sec']:.0f} tok/s",
    ]
    return "  ".join(parts)
