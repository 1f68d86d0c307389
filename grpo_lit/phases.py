"""The named parts of a training step: timed, measured, announced to callbacks, and run again when memory runs out."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from grpo_lit.errors import SystemFault
from grpo_lit.oom import PeerOutOfMemory, is_out_of_memory, without_frames

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule
    from grpo_lit.step import TrainingBatch

Phase = Literal["rollout", "reward", "score", "train", "optimizer", "validate"]
T = TypeVar("T")
_attempts = itertools.count(1)


class PhaseListener:
    """Mix-in for callbacks that take part in the phases of a step."""

    needs_entropy = False
    """Set it to have the policy's rows scored before the first pass, and `on_scored` called."""

    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        """Called before the phase's work."""

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, seconds: float) -> None:
        """Called after the phase's work, with its wall-clock time."""

    def on_rollout_progress(
        self, trainer: Trainer, pl_module: LightningModule, rows_done: int, num_rows: int, num_tokens: int
    ) -> None:
        """Called every few decode steps of a rollout with finished rows, all rows, and tokens sampled so far."""

    def on_out_of_memory(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, error: Exception) -> bool:
        """Called when memory ran out, after everything that can be freed was freed.

        The work is as if it had not begun: partial gradients are dropped, weights and optimizer are as before. Make
        the sizes smaller and return True to have it run again, with the same rows and the same draws. With several
        ranks all are asked; one that did not fail itself gets a `grpo_lit.oom.PeerOutOfMemory`.

        Args:
            trainer: the trainer.
            pl_module: the module; its ``phase.load`` says what was held at once.
            phase: what ran.
            error: what was raised, without its traceback.

        Returns:
            Whether to run again. It does if any callback says so.
        """
        return False

    def on_scored(
        self, trainer: Trainer, pl_module: LightningModule, training: TrainingBatch, entropy: Tensor
    ) -> TrainingBatch:
        """Change which tokens train and what they weigh; called where `needs_entropy` is set.

        Args:
            trainer: the trainer.
            pl_module: the module.
            training: this rank's rows.
            entropy: (N, T) float32 nats, 0 where the token does not count.

        Returns:
            The batch to train on.
        """
        return training

    def step_metrics(self) -> dict[str, float]:
        """Figures of this callback for the metrics of the step that ends."""
        return {}


class Load(NamedTuple):
    """What one forward holds at once."""

    rows: int = 0
    """Rows."""
    tokens: int = 0
    """Tokens, padding included."""


class PhaseRecorder:
    """Times phases, records the peak of allocated CUDA memory in each, and replays what ran out of memory.

    A phase may run several times a step.

    Args:
        pl_module: the module whose trainer's callbacks are told.

    Attributes:
        load: what the running attempt holds at once, or held when it failed.
        between_ranks: seconds of this step spent in collectives: waiting for the slowest rank, the all-reduce.
        largest_load: the load with the most tokens of the last attempt.
        step_started: `time.perf_counter` when the step began.
        attempt_started: `time.perf_counter` of its start.
        attempt_number: of the last attempt, among all of this process. Ranks come to every attempt alike, so the number
            is the same on all of them, and no two attempts share one.
        attempting: whether an attempt is running.
    """

    def __init__(self, pl_module: GRPOModule) -> None:
        self._module = pl_module
        self._phase: Phase = "train"
        self.seconds: dict[Phase, float] = {}
        self.peak_mib: dict[Phase, float] = {}
        self.between_ranks: dict[str, float] = {}
        self.step_started = 0.0
        self.load = self.largest_load = Load()
        self.attempt_started = 0.0
        self.attempt_number = 0
        self.attempting = False

    @property
    def listeners(self) -> list[PhaseListener]:
        """The trainer's callbacks that take part, in their order."""
        return [c for c in self._module.trainer.callbacks if isinstance(c, PhaseListener)]  # type: ignore[attr-defined]

    @property
    def replays(self) -> bool:
        """Whether any callback can answer an out-of-memory error."""
        own = PhaseListener.on_out_of_memory
        return any(type(listener).on_out_of_memory is not own for listener in self.listeners)

    def reset(self) -> None:
        """Start a new step."""
        self.seconds.clear()
        self.peak_mib.clear()
        self.between_ranks.clear()
        self.step_started = time.perf_counter()

    def hold(self, rows: int, tokens: int) -> None:
        """Say what the next forward holds."""
        self.load = Load(rows, tokens)
        self.largest_load = max(self.largest_load, self.load, key=lambda load: load.tokens)

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Run the body as one phase."""
        trainer, listeners = self._module.trainer, self.listeners
        self._phase = phase
        for callback in listeners:
            callback.on_phase_start(trainer, self._module, phase)
        self._synchronize()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._module.device)
        start = time.perf_counter()
        yield
        self._synchronize()
        self._keep_peak()
        seconds = time.perf_counter() - start
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        for callback in listeners:
            callback.on_phase_end(trainer, self._module, phase, seconds)

    @contextmanager
    def with_other_ranks(self, what: str) -> Iterator[None]:
        """Time a collective, the waiting for slower ranks included; see `between_ranks`."""
        if self._module.world.size == 1:
            yield
            return
        self._synchronize()
        start = time.perf_counter()
        yield
        self._synchronize()
        self.between_ranks[what] = self.between_ranks.get(what, 0.0) + time.perf_counter() - start

    @property
    def _cuda(self) -> bool:
        return self._module.device.type == "cuda"

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize(self._module.device)

    def _keep_peak(self) -> None:
        if self._cuda:
            peak = torch.cuda.max_memory_allocated(self._module.device) / 2**20
            self.peak_mib[self._phase] = max(peak, self.peak_mib.get(self._phase, 0.0))

    def attempt(self, work: Callable[[], T], *, undo: Callable[[], None] | None = None) -> T:
        """Do part of a phase; where memory runs out on any rank, do it again on all, if a callback says so.

        All ranks must come here alike, and `work` must hold no collective: a rank that failed would leave the others
        in it. The ranks agree when each is through.

        Args:
            work: may run several times, to the same effect as once after `undo`.
            undo: takes back what an attempt changed; called on every rank, also where the attempt succeeded.

        Raises:
            SystemFault: a callback gave up, on any rank.
            Exception: the original error, where no callback wants a replay.
        """
        while True:
            self.load = self.largest_load = Load()
            self.attempt_started, self.attempt_number = time.perf_counter(), next(_attempts)
            result: T | None = None
            error: Exception | None = None
            self.attempting = True
            try:
                result = work()
            except Exception as raised:
                if not is_out_of_memory(raised):
                    raise
                error = without_frames(raised)
            finally:
                self.attempting = False
            with self.with_other_ranks(f"rank_wait_{self._phase}"):
                failed = self._module.world.any(error is not None, self._module.device)
            if not failed:
                return cast(T, result)
            result = None
            self._make_room(undo)
            self._ask(error)

    def _make_room(self, undo: Callable[[], None] | None) -> None:
        """Back to before the attempt, with as much free memory as there can be."""
        self._keep_peak()
        if undo is not None:
            undo()
        self._module.engine.release()
        gc.collect()  # graphs of autograd hang in cycles with their hooks
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._module.device)

    def _ask(self, error: Exception | None) -> None:
        """Return where all ranks replay, raise on all where one does not."""
        peer = PeerOutOfMemory("another rank ran out of memory")
        stop: Exception | None = None
        try:
            answers = [
                callback.on_out_of_memory(self._module.trainer, self._module, self._phase, error or peer)
                for callback in self.listeners
            ]
            if error is not None and not any(answers):
                stop = error
        except SystemFault as gave_up:
            stop = gave_up
        stops = self._module.world.gather(None if stop is None else " ".join(str(stop).split()))
        if stop is not None:
            raise stop
        for rank, text in enumerate(stops):
            if text is not None:
                raise SystemFault(f"rank {rank}: {text}")
