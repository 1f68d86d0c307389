"""``--profiler.*``: what watches a run's memory, and the callbacks that do it."""

from __future__ import annotations

from dataclasses import dataclass

from lightning.pytorch import Callback

from grpo_lit.callbacks.vram_profiler import VRAMProfiler
from grpo_lit.errors import UserError, typed_names


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


def profiler_callbacks(config: ProfilerConfig) -> list[Callback]:
    """The callbacks that do it.

    Raises:
        UserError: a value out of range.
        SystemFault: the live page is wanted and its libraries are missing.
    """
    callbacks: list[Callback] = []
    if config.memory or config.snapshot_steps or config.trace_steps:
        with typed_names({"": "profiler"}):
            callbacks.append(VRAMProfiler(config.warn_at, config.snapshot_steps, config.trace_steps))
    if config.live:
        from grpo_lit.callbacks.live_page import LivePage

        callbacks.append(LivePage(config.port))
    return callbacks
