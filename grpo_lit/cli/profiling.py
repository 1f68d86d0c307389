"""``--profiler.*``: what watches a run's memory, and the callbacks that do it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch import Callback

from grpo_lit.callbacks.auto_checkpointing import AutoCheckpointing
from grpo_lit.callbacks.vram_profiler import VRAMProfiler
from grpo_lit.errors import UserError


@dataclass
class ProfilerConfig:
    """How a run is watched."""

    memory: bool = True
    """Measure memory phase by phase: metrics vram/*, memory.jsonl, the loggers' memory/ timeline."""
    warn_at: float = 0.85
    """Share of the device's memory from which a phase's peak is warned about."""
    snapshot_steps: list[int] | None = None
    """Rollout steps, from 1, whose allocations are recorded for https://pytorch.org/memory_viz."""
    trace_steps: list[int] | None = None
    """Rollout steps, from 1, whose operations are recorded for https://ui.perfetto.dev."""
    live: bool = False
    """Serve a page about the run on http://127.0.0.1:<port>/ while it goes on (pip install 'grpo-lit[live]')."""
    port: int = 8550
    """Port of the page; 0 takes a free one."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UserError("profiler.port", self.port, "from 0 (any free one) to 65535")
        if not 0 < self.warn_at <= 1:
            raise UserError("profiler.warn_at", self.warn_at, "a share of the memory, above 0 and at most 1")
        for name in ("snapshot_steps", "trace_steps"):
            if any(step < 1 for step in getattr(self, name) or []):
                raise UserError(f"profiler.{name}", getattr(self, name), "rollout steps, counted from 1")


def memory_callbacks(
    config: ProfilerConfig, gradient_checkpointing: object = False, given: Callback | Sequence[Callback] | None = None
) -> list[Callback]:
    """The callbacks of a run that watch memory and act on it.

    Args:
        config: what is wanted.
        gradient_checkpointing: ``model.policy.gradient_checkpointing``.
        given: the user's own callbacks; none of their kinds is added again.

    Raises:
        SystemFault: the live page is wanted and its libraries are missing.
    """
    callbacks: list[Callback] = []
    if config.memory or config.snapshot_steps or config.trace_steps:
        callbacks.append(VRAMProfiler(config.warn_at, config.snapshot_steps, config.trace_steps))
    if gradient_checkpointing == "auto":
        callbacks.append(AutoCheckpointing())
    if config.live:
        from grpo_lit.callbacks.live_page import LivePage

        callbacks.append(LivePage(config.port))
    own = {type(callback) for callback in (given if isinstance(given, Sequence) else [given])}
    return [callback for callback in callbacks if type(callback) not in own]
