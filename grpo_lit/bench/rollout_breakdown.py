"""Where the time of one decode step goes, kernel by kernel, from torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from grpo_lit.bench.rollout_cases import generate
from grpo_lit.rollout import RolloutEngine


@dataclass(frozen=True)
class KernelTime:
    """A kernel's share of a step.

    Attributes:
        name: shortened.
        launches: a step.
        microseconds: a step, all launches together.
    """

    name: str
    launches: float
    microseconds: float


class _Window:
    """A progress callback that profiles the steps between two of its calls."""

    def __init__(self, after_tokens: int, num_steps: int) -> None:
        self.after_tokens, self.num_steps = after_tokens, num_steps
        self.profile: Any = None
        self.wall_us = 0.0
        self._done = False

    def __call__(self, rows_done: int, num_tokens: int) -> None:
        del rows_done
        if self._done or num_tokens < self.after_tokens:
            return
        torch.cuda.synchronize()
        if self.profile is None:
            self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self.profile.__enter__()
        else:
            self.profile.__exit__(None, None, None)
            self._done = True


def breakdown(
    engine: RolloutEngine, rows: int, num_tokens: int, prompt_tokens: int, vocab: int, num_steps: int = 8
) -> list[KernelTime]:
    """Kernels of a step half-way through a rollout, the longest first. CUDA only.

    Kernels run one after the other here; in use the start of one overlaps the end of the last.

    Args:
        engine: the graph engine.
        rows: in flight.
        num_tokens: of each row.
        prompt_tokens: of each prompt.
        vocab: size of the vocabulary.
        num_steps: steps profiled.
    """
    engine.check_every = num_steps  # type: ignore[attr-defined]
    window = _Window(rows * num_tokens // 2, num_steps)
    with _no_overlap():
        generate(engine, rows, 16, prompt_tokens, vocab)  # compile
        engine.release()
        generate(engine, rows, num_tokens, prompt_tokens, vocab, window)
        engine.release()
    kernels: dict[str, list[float]] = {}
    for event in window.profile.key_averages():
        time = float(getattr(event, "self_device_time_total", 0.0))
        if time > 0:
            entry = kernels.setdefault(short_name(event.key), [0.0, 0.0])
            entry[0] += event.count / num_steps
            entry[1] += time / num_steps
    found = [KernelTime(name, launches, time) for name, (launches, time) in kernels.items()]
    return sorted(found, key=lambda kernel: -kernel.microseconds)


@contextmanager
def _no_overlap() -> Iterator[None]:
    """Kernels start when the one before is done: one that starts early and waits would count its waiting."""
    from grpo_lit.kernels._triton import launch

    before = launch._overlaps
    launch._overlaps = lambda device: False  # type: ignore[assignment]
    try:
        yield
    finally:
        launch._overlaps = before


def short_name(kernel: str) -> str:
    """A kernel's name without its template arguments.

    >>> short_name("void at::native::index_kernel<128, float>(int)")
    'at::native::index_kernel'
    """
    return re.sub(r"^void ", "", kernel).split("<")[0].split("(")[0][:60]


def lines(kernels: list[KernelTime], top: int = 20) -> list[str]:
    """The table, for a terminal."""
    total = sum(kernel.microseconds for kernel in kernels)
    out = [f"  {'kernel':60s} {'launches':>8s} {'us':>9s} {'share':>6s}"]
    out += [
        f"  {kernel.name:60s} {kernel.launches:8.1f} {kernel.microseconds:9.1f} {kernel.microseconds / total:6.1%}"
        for kernel in kernels[:top]
    ]
    launches = sum(kernel.launches for kernel in kernels)
    return [*out, f"  {'all kernels of a step':60s} {launches:8.1f} {total:9.1f}"]
