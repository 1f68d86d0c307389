"""What the vllm engine asks of a vLLM, whether it runs in a process of ours or behind HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from grpo_lit.rollout.base import SamplingConfig

OnRow = Callable[[int, "Sampled"], None]
"""Called with a row's index and its tokens as soon as the row is complete, in any order."""
RowEnd = Callable[[int, Sequence[int], int], "int | None"]
"""Called with a row's index, its tokens so far and how many of them it has seen; the length to end it at, if any."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA folder in PEFT's layout under a name that is used once."""

    name: str
    number: int
    """At least 1, fresh for each version: vLLM caches adapters and prefixes by it."""
    folder: Path


class Sampled(NamedTuple):
    """One completion."""

    ids: list[int]
    """The tokens, the one that stopped it included."""
    logprobs: list[float]
    """Log-prob of each in the distribution it was drawn from (temperature, truncation); untempered at temperature 0."""
    answered: bool = False
    """Whether it was ended at the end of its answer (`RowEnd`)."""

    def cut(self, length: int) -> Sampled:
        """The first tokens, ended there."""
        return Sampled(self.ids[:length], self.logprobs[:length], answered=True)


class VLLMBackend(Protocol):
    """A vLLM with a base model and at most one adapter in use."""

    device_sleeps: bool
    """Whether `sleep` frees anything."""

    def load(self, adapter: Adapter) -> None:
        """Read an adapter from its folder."""
        ...

    def unload(self, adapter: Adapter) -> None:
        """Forget an adapter."""
        ...

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        adapter: Adapter | None,
        rows_in_flight: int | None,
        on_row: OnRow,
        row_end: RowEnd | None = None,
    ) -> None:
        """Sample one completion a prompt, with at most `rows_in_flight` of them at once.

        Whatever ends it early, no request is left behind.
        """
        ...

    def score(self, rows: Sequence[Sequence[int]], adapter: Adapter | None) -> list[list[float]]:
        """Log-probs at temperature 1 of the tokens of each row from its second on."""
        ...

    def sleep(self) -> None:
        """Give up the KV cache and move the weights off the device."""
        ...

    def wake(self) -> None:
        """Undo `sleep`."""
        ...

    def close(self) -> None:
        """End it for good."""
        ...


def request_seeds(keys: NDArray[np.uint64]) -> list[int]:
    """One seed below 2**63 a row: the two words of its key, mixed (SplitMix64, Steele et al. 2014).

    Args:
        keys: (N, 2) uint64 from `row_keys`.

    >>> request_seeds(np.array([[0, 0], [0, 1], [1, 0]], dtype=np.uint64))
    [6017775124710473527, 313702574736366215, 3395948882924712079]
    """
    return [_mix(_mix(int(run)) ^ int(row)) >> 1 for run, row in keys]


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    return word ^ (word >> 31)
