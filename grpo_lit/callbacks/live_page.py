"""A page about the running job, on this machine: status, metrics, phases, memory, traces."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from grpo_lit.live.server import LiveServer, require_server
from grpo_lit.live.state import LiveState
from grpo_lit.live.trace import TraceControl
from grpo_lit.memory.measure import Meter
from grpo_lit.phases import Phase, PhaseListener

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule


class LivePage(PhaseListener, Callback):
    """Serves http://127.0.0.1:<port>/ while a run goes on; other machines can't reach it.

    Args:
        port: 0 takes a free one.
        history: records kept of each kind.

    Attributes:
        server: None before the run and on ranks other than the first.

    Raises:
        SystemFault: starlette and uvicorn are not installed.
    """

    def __init__(self, port: int = 8550, history: int = 2000) -> None:
        require_server()
        self.port = port
        self.state = LiveState(history)
        self.server: LiveServer | None = None
        self.trace: TraceControl | None = None
        self._meter: Meter | None = None
        self._seconds: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=15))
        self._began = 0.0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to serve."""
        if not trainer.is_global_zero:
            return
        from grpo_lit.live.app import create_app

        module: GRPOModule = pl_module  # type: ignore[assignment]
        self._meter = Meter(trainer.strategy.root_device)
        root = Path(trainer.default_root_dir)
        self.trace = TraceControl(root / "live_trace.json", self._free_bytes, self._seconds_of)
        self.state.set_status(
            run=root.name,
            policy=module.policy_config.path,
            device=_device_name(trainer.strategy.root_device),
            capacity_bytes=self._meter.capacity(),
            total_optimizer_steps=module.total_optimizer_steps(),
            group_size=module.rollout_config.group_size,
            torch=torch.__version__,
            python=platform.python_version(),
            pid=os.getpid(),
        )
        self.server = LiveServer(create_app(self.state, self.trace), self.port)
        print(f"live page: {self.server.url}", flush=True)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A recording that was asked for begins here."""
        self._began = time.perf_counter()
        if self.trace is not None:
            self.trace.step_begins()

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        """Name the phase."""
        self.state.set_status(phase=phase, phase_since=time.time())
        if self.trace is not None:
            self.trace.phase_begins(phase)

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, seconds: float) -> None:
        """Keep its time and memory."""
        module: GRPOModule = pl_module  # type: ignore[assignment]
        self._seconds[phase].append(seconds)
        step = module.rollout_step + (phase != "validate")
        if self.trace is not None:
            self.trace.phase_ends(phase)
        if self._meter is not None:
            self.state.add("phases", {"step": step, "phase": phase, "seconds": seconds, "end": time.time()})
            reading = self._meter.read()
            self.state.add(
                "memory",
                {
                    "step": step,
                    "phase": phase,
                    **reading._asdict(),
                    "fragmentation": reading.fragmentation,
                    "kinds": _kinds(trainer, phase),
                },
            )
        self.state.set_status(phase=None, phase_since=time.time())

    def on_out_of_memory(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, error: Exception) -> bool:
        """Keep what happened; others decide what is done about it."""
        module: GRPOModule = pl_module  # type: ignore[assignment]
        text = " ".join(str(error).split())[:400]
        self.state.add("ooms", {"step": module.rollout_step + 1, "phase": phase, "error": text, "at": time.time()})
        if self.trace is not None:
            self.trace.out_of_memory()
        return False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the step's metrics and sizes."""
        module: GRPOModule = pl_module  # type: ignore[assignment]
        self._seconds["step"].append(time.perf_counter() - self._began)
        if self.trace is not None:
            self.trace.step_ends()
        self.state.add("metrics", {"step": module.rollout_step, **module.step_metrics})
        self.state.add(
            "micro_batching",
            {
                "step": module.rollout_step,
                "micro_batch_size": module.micro_batch_size,
                "micro_batch_tokens": getattr(module, "micro_batch_tokens", None),
                "score_batch_size": getattr(module, "score_batch_size", None),
                "rollout_batch_size": module.engine.batch_size,
            },
        )
        self.state.set_status(step=module.rollout_step, optimizer_step=trainer.global_step)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the accuracy, with the step it belongs to."""
        if trainer.state.fn == "fit" and self._meter is not None:
            module: GRPOModule = pl_module  # type: ignore[assignment]
            self.state.add("metrics", {"step": module.rollout_step, **module.validation_metrics})

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write a trace that still runs, stop to serve; also after an error."""
        self.state.set_status(finished=True, phase=None)
        if self.trace is not None:
            self.trace.close()
        if self.server is not None:
            self.server.close()
            self.server = None

    def _free_bytes(self) -> int:
        assert self._meter is not None
        return self._meter.free()

    def _seconds_of(self, phase: str | None) -> float:
        """The usual time of a step or a phase: the median of the last ones, since a busy machine makes outliers."""
        return statistics.median(self._seconds["step" if phase is None else phase] or [0.0])


def _kinds(trainer: Trainer, phase: str) -> dict[str, int]:
    """The ledger of the phase, where a callback of the run keeps one."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        ledger = getattr(callback, "ledger_of", None)
        if ledger is not None:
            return dict(ledger(phase))
    return {}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
