"""Times of GPU work without the host in them, and several candidates in one run, in alternating order."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

FLUSH_BYTES = 256 << 20


@dataclass
class Candidate:
    """Something to time.

    Attributes:
        name: label of the implementation.
        mode: "forward", "backward" or "full".
        call: the timed work.
        prepare: run before each sample, not timed (a fresh copy of logits that the call overwrites, say).
        divide: how many repetitions are inside one call.
    """

    name: str
    mode: str
    call: Callable[[], object]
    prepare: Callable[[], object] | None = None
    divide: int = 1
    samples: list[float] = field(default_factory=list)
    peak_mib: float = float("nan")

    def percentile(self, share: float) -> float:
        """Time in ms that this share of the samples doesn't exceed."""
        ordered = sorted(self.samples)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Timer:
    """Takes samples of candidates on one device.

    On CUDA a sample is the time between two events. Before the first, the second-level cache is filled with
    other data, and a sleeping kernel holds the device until the host has queued the whole call; so launch
    overhead counts only where a call waits for the device itself.
    """

    def __init__(self, device: torch.device, samples: int) -> None:
        self.device, self.samples = device, samples
        self.on_cuda = device.type == "cuda"
        self._flush = torch.empty(FLUSH_BYTES if self.on_cuda else 0, dtype=torch.uint8, device=device)

    def run(self, candidates: list[Candidate]) -> None:
        """Warms up, measures peak memory, then takes samples; every second round in reverse order."""
        gc.collect()  # once, not for each: with torch, TRL and the rest imported it takes a good part of a second
        holds = [self._warm_up(candidate) for candidate in candidates]
        for round_ in range(self.samples):
            order = list(zip(candidates, holds, strict=True))
            for candidate, hold in order if round_ % 2 == 0 else reversed(order):
                candidate.samples.append(self._sample(candidate, hold) / candidate.divide)

    def bandwidth(self) -> float:
        """Bytes per second that a large copy on the device reads and writes; nan on the CPU."""
        if not self.on_cuda:
            return float("nan")
        source = torch.randn(1 << 29, device=self.device)
        target = torch.empty_like(source)
        copy = Candidate("copy", "full", lambda: target.copy_(source))
        self.run([copy])
        return 2 * source.numel() * 4 / copy.percentile(0.5) * 1e3

    def _warm_up(self, candidate: Candidate) -> int:
        """Runs it three times; returns the cycles to hold the device while the host queues a call."""
        host = 0.0
        for _ in range(3):
            if candidate.prepare is not None:
                candidate.prepare()
            self._wait()
            start = time.perf_counter()
            candidate.call()
            host = time.perf_counter() - start
        if not self.on_cuda:
            return 0
        self._wait()
        if candidate.prepare is not None:
            candidate.prepare()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        candidate.call()
        self._wait()
        candidate.peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
        return min(40_000_000, 500_000 + int(2 * host * 2e9))

    def _sample(self, candidate: Candidate, hold: int) -> float:
        if candidate.prepare is not None:
            candidate.prepare()
        if not self.on_cuda:
            start = time.perf_counter()
            candidate.call()
            return (time.perf_counter() - start) * 1e3
        self._flush.zero_()
        torch.cuda._sleep(hold)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        candidate.call()
        last.record()
        self._wait()
        return float(first.elapsed_time(last))

    def _wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()
