"""Where a step's memory goes: peaks of each phase, a ledger by kind, predicted against measured."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from grpo_lit.errors import UserError
from grpo_lit.files import append_line
from grpo_lit.memory.measure import Meter, Reading, moving_ledger, tensor_ledger
from grpo_lit.memory.plan import MIB, Ledger, PhasePlan, plan_step
from grpo_lit.memory.settings import formats_of, step_sizes_of
from grpo_lit.memory.sizes import ModelSizes
from grpo_lit.phases import Phase, PhaseListener

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule

_log = logging.getLogger("grpo_lit.memory")


@dataclass
class PhaseMemory:
    """What one phase took in one rollout step; the largest of its runs where it ran several times."""

    phase: str
    reading: Reading
    seconds: float = 0.0
    kinds: Ledger = field(default_factory=dict)
    """Bytes at the peak by kind; what is no tensor that stays is under activations, with logits and
    workspaces (without CUDA under process)."""
    predicted: int | None = None
    """Bytes that the planner expects for the rows of this step; None on the CPU."""

    def to_json(self) -> dict[str, Any]:
        """As plain numbers."""
        return {
            "phase": self.phase,
            "seconds": self.seconds,
            **self.reading._asdict(),
            "fragmentation": self.reading.fragmentation,
            "kinds": self.kinds,
            "predicted": self.predicted,
        }


class VRAMProfiler(PhaseListener, Callback):
    """Measures memory phase by phase and says what took it.

    Every rollout step adds ``vram/reserved_<phase>_mib``, ``vram/fragmentation`` and ``vram/predicted_<phase>_mib`` to
    the metrics, a line to ``memory.jsonl`` and points to the loggers' ``memory/`` timeline. Without CUDA it is the
    process's resident memory that is measured, and nothing is predicted.

    Args:
        warn_at: share of the device's memory (or of the process's limit) from which a phase's peak is warned about.
        snapshot_steps: rollout steps, from 1, whose allocations are recorded: ``memory_snapshot_<step>.pickle``, for
            https://pytorch.org/memory_viz. CUDA only.
        trace_steps: rollout steps, from 1, whose operations are recorded: ``trace_<step>.json``, for
            https://ui.perfetto.dev.

    Attributes:
        phases: of the last finished step, by name.
        load: of the model's loading.
    """

    def __init__(
        self,
        warn_at: float = 0.85,
        snapshot_steps: list[int] | None = None,
        trace_steps: list[int] | None = None,
    ) -> None:
        if not 0 < warn_at <= 1:
            raise UserError("warn_at", warn_at, "a share of the memory, above 0 and at most 1")
        for name, steps in (("snapshot_steps", snapshot_steps), ("trace_steps", trace_steps)):
            if any(step < 1 for step in steps or []):
                raise UserError(name, steps, "rollout steps, counted from 1")
        self.warn_at = warn_at
        self.snapshot_steps, self.trace_steps = frozenset(snapshot_steps or []), frozenset(trace_steps or [])
        self.phases: dict[str, PhaseMemory] = {}
        self.load: PhaseMemory | None = None
        self.warnings: list[str] = []
        self._meter: Meter | None = None
        self._running: dict[str, PhaseMemory] = {}
        self._still: Ledger = {}
        self._trained: list[torch.nn.Parameter] = []
        self._sizes: ModelSizes | None = None
        self._trace: torch.profiler.profile | None = None
        self._boundary = 0

    # ---- hooks ------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Begin to measure before the model is loaded."""
        self._meter = Meter(trainer.strategy.root_device)
        self._meter.reset()

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep what loading took."""
        module: GRPOModule = pl_module  # type: ignore[assignment]
        reading = self.meter.read()
        self.load = PhaseMemory("load", reading, kinds=self._ledger(module, "load", reading))
        self._sizes = ModelSizes.of(module.live_policy.model.config)
        if self.meter.on_cuda:
            self.load.predicted = self._plan(module)["load"].total

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the recordings that were asked for."""
        self._running = {}
        step = int(pl_module.rollout_step) + 1  # type: ignore[arg-type]
        if step in self.snapshot_steps and self.meter.on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=200_000)
        if step in self.trace_steps:
            self._trace = torch.profiler.profile(profile_memory=True)
            self._trace.start()

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        """A new peak begins."""
        self.meter.reset()

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, seconds: float) -> None:
        """Read the peak and who stood in it."""
        module: GRPOModule = pl_module  # type: ignore[assignment]
        reading = self.meter.read()
        found = PhaseMemory(phase, reading, seconds, self._ledger(module, phase, reading))
        before = self._running.get(phase)
        if before is None or reading.peak_allocated > before.reading.peak_allocated:
            found.seconds += 0.0 if before is None else before.seconds
            self._running[phase] = found
        else:
            before.seconds += seconds
        self._timeline(trainer, reading)
        self._warn(phase, reading)

    def step_metrics(self) -> dict[str, float]:
        """Figures of the step that ends."""
        metrics: dict[str, float] = {}
        for phase, memory in self._running.items():
            metrics[f"vram/reserved_{phase}_mib"] = memory.reading.peak_reserved / MIB
            if not self.meter.on_cuda:  # on CUDA the phases themselves record it
                metrics[f"vram/peak_{phase}_mib"] = memory.reading.peak_allocated / MIB
        if self._running:
            metrics["vram/fragmentation"] = max(m.reading.fragmentation for m in self._running.values())
        return metrics

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Set the prediction beside the measurement, write both, end recordings."""
        module: GRPOModule = pl_module  # type: ignore[assignment]
        root = Path(trainer.default_root_dir)
        if self.meter.on_cuda and module.step_rows is not None:
            for phase, plan in self._plan(module).items():
                if phase in self._running:
                    self._running[phase].predicted = plan.total
                    module.step_metrics[f"vram/predicted_{phase}_mib"] = plan.total / MIB
        self.phases, self._running = self._running, {}
        self._end_recordings(root, module.rollout_step)
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            line = {"step": module.rollout_step, "phases": [m.to_json() for m in self.phases.values()]}
            append_line(root / "memory.jsonl", line)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave no recording running, also after an error."""
        if self._trace is not None:
            with suppress(RuntimeError):
                self._trace.stop()
            self._trace = None

    def ledger_of(self, phase: str) -> Ledger:
        """Bytes by kind at the peak of a phase: of this step, else of the last one."""
        found = self._running.get(phase) or self.phases.get(phase)
        return {} if found is None else found.kinds

    # ---- parts ------------------------------------------------------------------------------------------------------

    @property
    def meter(self) -> Meter:
        """Of the trainer's device."""
        assert self._meter is not None, "setup has not run"
        return self._meter

    def _ledger(self, module: GRPOModule, phase: str, reading: Reading) -> Ledger:
        if module.policy is None:
            return {}
        optimizers = module.trainer.optimizers
        optimizer = optimizers[0] if optimizers else None
        if not self._still:
            self._still = tensor_ledger(module.policy.model)
            self._trained = [parameter for _, parameter in module.policy.trainable_parameters()]
        ledger = self._still | moving_ledger(self._trained, optimizer)
        if phase in ("rollout", "validate"):  # freed again by now, but there at the peak
            ledger["KV cache"] = getattr(module.engine, "cache_bytes", 0)
        # On the host the rest is mostly the process itself: interpreter, libraries, workers' share.
        rest = "activations" if self.meter.on_cuda else "process"
        ledger[rest] = max(0, reading.peak_allocated - sum(ledger.values()))
        return ledger

    def _plan(self, module: GRPOModule) -> dict[str, PhasePlan]:
        assert self._sizes is not None
        formats = formats_of(module, on_cuda=self.meter.on_cuda)
        rows = module.step_rows
        if rows is None:
            sizes = step_sizes_of(module, prompt_tokens=1, prompts=1)
            return plan_step(self._sizes, formats, sizes)
        rollout = rows.rollout
        largest = step_sizes_of(
            module,
            prompt_tokens=int(rollout.prompt_mask.sum(1).max()),
            prompts=len(set(rows.prompt_indices)),
            rows=rollout.num_rows,
        )
        # Pages are set aside for the longest completion that may come; the passes see the longest that came.
        plans = plan_step(self._sizes, formats, largest)
        seen = largest.with_completions(int(rollout.lengths.max()))
        later = plan_step(self._sizes, formats, seen)
        return plans | {phase: later[phase] for phase in ("score", "train") if phase in later}

    def _timeline(self, trainer: Trainer, reading: Reading) -> None:
        """A point for every phase boundary, on an axis of its own."""
        self._boundary += 1
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                for name in Reading._fields:
                    logger.experiment.add_scalar(f"memory/{name}_mib", getattr(reading, name) / MIB, self._boundary)

    def _warn(self, phase: str, reading: Reading) -> None:
        capacity = self.meter.capacity()
        share = reading.peak_allocated / capacity  # what is reserved beyond it is given back when it is needed
        if share < self.warn_at or any(text.startswith(f"{phase}:") for text in self.warnings):
            return
        text = (
            f"{phase}: {reading.peak_allocated / MIB:.0f} of {capacity / MIB:.0f} MiB in live tensors ({share:.0%}), "
            f"{reading.peak_reserved / MIB:.0f} reserved; grpo-lit check says what would fit"
        )
        self.warnings.append(text)
        _log.warning(text)

    def _end_recordings(self, root: Path, step: int) -> None:
        if step in self.snapshot_steps and self.meter.on_cuda:
            torch.cuda.memory._dump_snapshot(str(root / f"memory_snapshot_{step}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        if self._trace is not None:
            self._trace.stop()
            root.mkdir(parents=True, exist_ok=True)
            self._trace.export_chrome_trace(str(root / f"trace_{step}.json"))
            self._trace = None
