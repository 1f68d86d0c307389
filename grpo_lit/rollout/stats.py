"""How fast a rollout was, beside the limit that reading the weights sets."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from grpo_lit.oom import memory_limit


@dataclass
class RolloutStats:
    """What an engine did since `reset`.

    Attributes:
        num_steps: forward passes that sampled one token for each row in flight.
        num_tokens: tokens of all completions, first EOS included.
        seconds: wall-clock time inside `generate`, prefill included.
        weight_bytes: bytes of weights that every step must read: linear layers as they are stored, adapters, norms,
            output layer; not the embedding's table, of which a step reads a row a token.
        bandwidth: bytes per second that a copy reads and writes on the device; 0 where it was not measured.
    """

    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    weight_bytes: int = 0
    bandwidth: float = 0.0

    def reset(self) -> None:
        """Start a new count; what is a property of model and device stays."""
        self.num_steps, self.num_tokens, self.seconds = 0, 0, 0.0

    @property
    def bandwidth_share(self) -> float:
        """Achieved share of the weight-read limit::

            share = num_steps * weight_bytes / bandwidth / seconds

        1 would be a rollout that only reads the weights, once a step, as fast as a copy runs. Keys and values are
        left out, so long contexts and many rows lower it. 0 where the bandwidth is not known.
        """
        if not (self.bandwidth and self.seconds):
            return 0.0
        return self.num_steps * self.weight_bytes / self.bandwidth / self.seconds

    def take_metrics(self) -> dict[str, float]:
        """The share as a metric, where the device's bandwidth is known; starts a new count."""
        share = {"perf/rollout_bandwidth_share": self.bandwidth_share} if self.bandwidth else {}
        self.reset()
        return share


@functools.cache
def copy_bandwidth(device: torch.device, num_bytes: int = 1 << 27) -> float:
    """Bytes per second that a copy of `num_bytes` reads and writes, best of 5; 0 without CUDA or memory for it."""
    if device.type != "cuda" or memory_limit(device) - torch.cuda.memory_allocated(device) < 4 * num_bytes:
        return 0.0
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(5):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        target.copy_(source)
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last))
    return 2 * num_bytes / float(min(times)) * 1e3
