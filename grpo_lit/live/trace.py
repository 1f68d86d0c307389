"""Recording a trace of a running job on request, and when that is refused.

A recording costs time and memory in the job it watches, so a start is refused while one runs, while memory is short
or has just run out, and where the file would be too large to open.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from grpo_lit.errors import UserError
from grpo_lit.memory.plan import GIB

EVENT_BYTES = 350
"""Bytes of one event in a Chrome trace, measured on traces of this project's runs."""
EVENTS_PER_SECOND = 25_000
"""Events of a busy second before any trace has been measured: an operation every 40 microseconds."""
SAFE_BYTES, MOST_BYTES = 20_000_000, 100_000_000
SAFE_FREE, LEAST_FREE = int(1.5 * GIB), int(0.8 * GIB)
OOM_QUIET_S = 120.0
PHASES = ("rollout", "reward", "score", "train", "optimizer", "validate")
State = Literal["idle", "requested", "recording", "done", "failed"]


class Refused(Exception):
    """A start or stop that is not possible now.

    Attributes:
        status: HTTP status, 409 for a conflict with what goes on, 413 for a trace that would be too large.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class TraceRequest:
    """What to record."""

    steps: int = 1
    """Whole rollout steps, from the next one on."""
    phase: str | None = None
    """Only this phase of them."""
    shapes: bool = False
    """Shapes of the operations' inputs."""
    stacks: bool = False
    """Python stacks."""
    memory: bool = False
    """Allocations."""
    safe: bool = True
    """Keep to the smaller file and to more free memory."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= 50:
            raise UserError("steps", self.steps, "from 1 to 50 rollout steps")
        if self.phase is not None and self.phase not in PHASES:
            raise UserError("phase", self.phase, f"null or one of {', '.join(PHASES)}")

    def estimate(self, seconds_per_step: float, events_per_second: float) -> int:
        """Bytes of the file: steps x events x bytes; shapes add half, stacks as much again, memory three tenths."""
        extra = 1 + 0.5 * self.shapes + 1.0 * self.stacks + 0.3 * self.memory
        return int(self.steps * seconds_per_step * events_per_second * EVENT_BYTES * extra)


@dataclass
class TraceControl:
    """Starts, stops and keeps one recording; requests come from the server, the work is done by the training thread.

    Args:
        file: where the trace goes; one file, overwritten by the next.
        free_bytes: memory that is free right now.
        seconds: seconds of a rollout step, or of one of its phases; 0 where unknown.
    """

    file: Path
    free_bytes: Callable[[], int]
    seconds: Callable[[str | None], float]
    state: State = "idle"
    request: TraceRequest | None = None
    estimate: int = 0
    message: str = ""
    size: int = 0
    events_per_second: float = float(EVENTS_PER_SECOND)
    last_oom: float = float("-inf")
    _profiler: torch.profiler.profile | None = None
    _stop: bool = False
    _steps_left: int = 0
    _recorded_s: float = 0.0
    _resumed: float = 0.0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    # ---- the server's side ------------------------------------------------------------------------------------------

    def start(self, request: TraceRequest) -> dict[str, Any]:
        """Ask for a recording from the next step on.

        Raises:
            Refused: 409 while one is active, memory is short or ran out lately; 413 for a trace too large.
        """
        with self._lock:
            if self.state in ("requested", "recording"):
                raise Refused(409, f"a trace is {self.state} already; stop it first")
            quiet = time.monotonic() - self.last_oom
            if quiet < OOM_QUIET_S:
                raise Refused(409, f"memory ran out {quiet:.0f} s ago; wait {OOM_QUIET_S - quiet:.0f} s more")
            least, most = (SAFE_FREE, SAFE_BYTES) if request.safe else (LEAST_FREE, MOST_BYTES)
            free = self.free_bytes()
            if free < least:
                raise Refused(409, f"{free / GIB:.2f} GiB of memory are free, a trace needs {least / GIB:.2f}")
            estimate = request.estimate(self.seconds(request.phase), self.events_per_second)
            if estimate > most:
                hint = "choose a phase or fewer steps" + (", or safe=false" if request.safe else "")
                raise Refused(413, f"about {estimate / 1e6:.0f} MB, the limit is {most / 1e6:.0f} MB: {hint}")
            self.state, self.request, self.estimate, self.message = "requested", request, estimate, ""
            self._stop, self._steps_left, self._recorded_s = False, request.steps, 0.0
            return self.status()

    def stop(self) -> dict[str, Any]:
        """End the recording at the next boundary between phases and write what there is.

        Raises:
            Refused: 409 where none is active.
        """
        with self._lock:
            if self.state == "requested":
                self.state, self.message = "idle", "stopped before it began"
            elif self.state == "recording":
                self._stop = True
            else:
                raise Refused(409, "no trace is being recorded")
            return self.status()

    def status(self) -> dict[str, Any]:
        """State, estimate, and what the last recording gave."""
        with self._lock:
            return {
                "state": self.state,
                "stopping": self._stop and self.state == "recording",
                "estimated_bytes": self.estimate,
                "file_bytes": self.size,
                "steps_left": self._steps_left if self.state in ("requested", "recording") else 0,
                "message": self.message,
            }

    # ---- the training thread's side ---------------------------------------------------------------------------------

    def step_begins(self) -> None:
        """A rollout step begins."""
        with self._lock:
            if self.state == "requested":
                assert self.request is not None
                self._begin(self.request)
            if self.state == "recording" and self.request is not None and self.request.phase is None:
                self._resume()

    def phase_begins(self, phase: str) -> None:
        """Record where this phase is the one that was asked for."""
        with self._lock:
            if self.state == "recording" and self.request is not None and self.request.phase == phase:
                self._resume()

    def phase_ends(self, phase: str) -> None:
        """Pause where only this phase was asked for; end where a stop was."""
        with self._lock:
            if self.state != "recording" or self.request is None:
                return
            if self.request.phase == phase:
                self._pause()
            if self._stop:
                self._finish()

    def step_ends(self) -> None:
        """A rollout step ends: write the file after the last one."""
        with self._lock:
            if self.state != "recording":
                return
            self._pause()
            self._steps_left -= 1
            if self._steps_left <= 0 or self._stop:
                self._finish()

    def out_of_memory(self) -> None:
        """Give the recording up: it holds memory itself."""
        with self._lock:
            self.last_oom = time.monotonic()
            if self.state in ("requested", "recording"):
                self._drop("memory ran out; the recording was given up")

    def close(self) -> None:
        """The run ends: write what was recorded."""
        with self._lock:
            if self.state == "recording":
                self._finish()
            elif self.state == "requested":
                self.state, self.message = "idle", "the run ended first"

    def _begin(self, request: TraceRequest) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            record_shapes=request.shapes,
            with_stack=request.stacks,
            profile_memory=request.memory,
        )
        self.state = "recording"
        self._resumed = 0.0
        self._profiler.start()
        if request.phase is not None:
            self._switch(False)

    def _resume(self) -> None:
        if self._resumed == 0.0:
            self._resumed = time.perf_counter()
            self._switch(True)

    def _pause(self) -> None:
        if self._resumed:
            self._recorded_s += time.perf_counter() - self._resumed
            self._resumed = 0.0
            if self.request is not None and self.request.phase is not None:
                self._switch(False)

    def _switch(self, on: bool) -> None:
        """Collect operations or not, within one recording."""
        assert self._profiler is not None
        if self.request is not None and self.request.phase is not None:
            self._profiler.toggle_collection_dynamic(on, self._profiler.activities)

    def _finish(self) -> None:
        self._pause()
        profiler, self._profiler = self._profiler, None
        assert profiler is not None
        try:
            profiler.stop()
            self.file.parent.mkdir(parents=True, exist_ok=True)
            tmp = self.file.with_suffix(".tmp")
            profiler.export_chrome_trace(str(tmp))
            tmp.replace(self.file)
            self.size = self.file.stat().st_size
        except (OSError, RuntimeError) as error:
            self.state, self.message = "failed", " ".join(str(error).split())[:300]
            return
        if self._recorded_s > 0:
            assert self.request is not None
            extra = self.request.estimate(1, 1) / self.request.steps / EVENT_BYTES
            self.events_per_second = max(1.0, self.size / EVENT_BYTES / extra / self._recorded_s)
        self.state, self.message = "done", f"{self._recorded_s:.2f} s recorded"

    def _drop(self, message: str) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            with suppress(RuntimeError):
                profiler.stop()
        self.state, self.message = "failed", message
