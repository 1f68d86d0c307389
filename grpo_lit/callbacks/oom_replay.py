"""An out-of-memory error costs seconds and changes nothing: the phase runs again, smaller."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from grpo_lit.errors import SystemFault
from grpo_lit.oom import PeerOutOfMemory, shortage
from grpo_lit.phases import Phase, PhaseListener

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule

_log = logging.getLogger(__name__)

# What each phase batches by, and what to lower where one row is too much already.
_KNOBS: dict[Phase, tuple[str, str]] = {
    "rollout": ("model.rollout.batch_size", "model.rollout.sampling.max_completion_length"),
    "reward": ("nothing", "what the reward functions keep on the GPU"),
    "score": ("model.score_batch_size", "model.rollout.sampling.max_completion_length"),
    "train": (
        "model.micro_batch_size",
        "model.rollout.sampling.max_completion_length, or set model.policy.gradient_checkpointing, activation_offload "
        "or mlp_tile_tokens",
    ),
    "optimizer": ("nothing", "model.lora.rank, or use an optimizer with 8-bit or paged state"),
    "validate": ("model.rollout.batch_size", "model.validation.sampling.max_completion_length"),
}


class OOMReplay(PhaseListener, Callback):
    """Replays a phase that ran out of memory with half of what it batches by.

    Partial gradients are dropped, a broken optimizer step is undone, everything that can be freed is freed, and the
    phase runs again with the same rows and the same random numbers. What is halved is a memory knob
    (``rollout.batch_size``, ``score_batch_size``, ``micro_batch_size``), so the batch that the optimizer sees never
    changes. With several ranks all replay together; each halves only what failed on itself. Where a phase holds one
    row at a time already, or batches nothing, it is tried once more with all memory freed; then the run ends with a
    message that says what to lower and how much was missing.

    Logs ``oom/replays`` (all so far), ``oom/replays_<phase>`` for phases that had any, ``oom/seconds_lost``, and after
    a first replay the present sizes ``oom/micro_batch_size``, ``oom/score_batch_size``, ``oom/rollout_batch_size``.

    Attributes:
        counts: replays of each phase so far.
        seconds_lost: time spent on attempts that ran out of memory.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.seconds_lost = 0.0
        self._last_resort = False
        self._module: GRPOModule | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Remember whose sizes to report."""
        self._module = cast("GRPOModule", pl_module)

    @override
    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        """A new phase may try one row twice again."""
        self._last_resort = False

    @override
    def on_out_of_memory(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, error: Exception) -> bool:
        """Halve and ask for another attempt.

        Raises:
            SystemFault: at one row, for the second time.
        """
        module = cast("GRPOModule", pl_module)
        before, what = self._halve(module, phase, error)
        lost = time.perf_counter() - module.phase.attempt_started
        self.counts[phase] = self.counts.get(phase, 0) + 1
        self.seconds_lost += lost
        if not isinstance(error, PeerOutOfMemory):
            _log.warning(
                "rollout step %d, %s: out of memory (%s) with %d rows at once; %s, replaying (%.1f s lost)",
                module.rollout_step,
                phase,
                shortage(error),
                before,
                what,
                lost,
            )
        return True

    def _halve(self, module: GRPOModule, phase: Phase, error: Exception) -> tuple[int, str]:
        """Rows held at once when it failed, and what was done about it."""
        rows, tokens = module.phase.load
        if isinstance(error, PeerOutOfMemory):
            return rows, "another rank failed"
        knob, other = _KNOBS[phase]
        if rows <= 1 or knob == "nothing":
            if self._last_resort:
                raise SystemFault(_last_words(phase, error, other, rows))
            self._last_resort = True
            return rows, "all memory freed"
        half = rows // 2
        if phase in ("rollout", "validate"):
            module.engine.batch_size = half
        elif phase == "score":
            module.score_batch_size = half
        elif module.micro_batch_tokens is not None:
            # by tokens, so that a micro-batch of short rows may still be a large one
            module.micro_batch_tokens = max(tokens // 2, 1)
            return rows, f"micro-batches of {module.micro_batch_tokens} tokens"
        else:
            module.micro_batch_size = half
        return rows, f"{knob}={half}"

    @override
    def step_metrics(self) -> dict[str, float]:
        """Counts, time lost and sizes."""
        metrics = {"oom/replays": float(sum(self.counts.values())), "oom/seconds_lost": self.seconds_lost}
        metrics |= {f"oom/replays_{phase}": float(count) for phase, count in self.counts.items()}
        if self.counts and self._module is not None:
            module = self._module
            sizes = {
                "micro_batch_size": module.micro_batch_size,
                "micro_batch_tokens": module.micro_batch_tokens,
                "score_batch_size": module.score_batch_size,
                "rollout_batch_size": module.engine.batch_size,
            }
            metrics |= {f"oom/{name}": float(size) for name, size in sizes.items() if size is not None}
        return metrics

    @override
    def state_dict(self) -> dict[str, Any]:
        """Counts, for the checkpoint."""
        return {"counts": dict(self.counts), "seconds_lost": self.seconds_lost}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.counts, self.seconds_lost = dict(state_dict["counts"]), float(state_dict["seconds_lost"])


def _last_words(phase: Phase, error: Exception, lower: str, rows: int) -> str:
    at = "at one row at a time" if rows == 1 else "with nothing left to split"
    return (
        f"out of memory in the {phase} phase {at}, with all else freed: {shortage(error)}. Lower {lower} "
        f"({' '.join(str(error).split())[:120]})"
    )
