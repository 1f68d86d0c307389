"""Batches of prompts in a fixed order, with a cursor that counts consumed prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Order = Callable[[int], Sequence[int]]
"""Epoch number -> indices of the rows in the order they are served; epochs may differ in length."""


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one step, the same on every rank."""

    prompts: list[str]
    """Rendered text, as the model sees it."""
    prompt_ids: list[list[int]]
    """Token ids of each prompt, no padding."""
    indices: list[int]
    """Number of each prompt's row in its dataset."""
    columns: dict[str, list[Any]]
    """Every column of the rows, for reward functions; ``answer`` is the gold answer."""
    refill: Callable[[int], PromptBatch | None] | None = field(default=None, compare=False)
    """Takes up to so many further prompts of the epoch, for dynamic sampling; None when the epoch has no more."""

    def __len__(self) -> int:
        return len(self.prompts)


class PromptLoader:
    """Serves batches of prompts; can be saved and restored between any two batches.

    Lightning saves ``state_dict`` with the checkpoint and restores it before the first batch. Nothing is fetched ahead,
    so at the end of a step "served" and "consumed" are the same thing and a resume loses or repeats no prompt.

    Args:
        batch_size: prompts per batch; the last batch of an epoch may be smaller.
        order: order of an epoch.
        collate: row indices -> batch.
        num_batches: batches of the longest epoch; Lightning wants one number for all.
    """

    def __init__(
        self,
        batch_size: int,
        order: Order,
        collate: Callable[[Sequence[int]], PromptBatch],
        num_batches: int,
    ) -> None:
        self.batch_size = batch_size
        self.order = order
        self.collate = collate
        self.num_batches = num_batches
        self.consumed = 0
        self._epoch, self._start, self._rows = 0, 0, order(0)
        self._serving = False

    def __len__(self) -> int:
        """Batches of this epoch; before the first is served, of the longest.

        Lightning asks once at set-up, where the answer bounds every epoch, and again as each epoch begins.
        """
        return -(-len(self._rows) // self.batch_size) if self._serving else self.num_batches

    def __iter__(self) -> Iterator[PromptBatch]:
        """Serve from the cursor to the end of the epoch it lies in."""
        self._seek()  # now, not at the first batch: Lightning asks for the length in between
        self._serving = True
        return self._batches()

    def _batches(self) -> Iterator[PromptBatch]:
        while self.left:
            yield replace(self._take(self.batch_size), refill=self._refill)

    @property
    def left(self) -> int:
        """Prompts of the current epoch that are still to come."""
        return self._start + len(self._rows) - self.consumed

    def _seek(self) -> None:
        """Find the epoch that the cursor lies in; at the end of one, that is the next."""
        while not self.left:
            self._epoch, self._start = self._epoch + 1, self.consumed
            self._rows = self.order(self._epoch)

    def _take(self, count: int) -> PromptBatch:
        first = self.consumed - self._start
        rows = self._rows[first : first + count]
        self.consumed += len(rows)
        return self.collate(rows)

    def _refill(self, count: int) -> PromptBatch | None:
        """Up to `count` more prompts of this epoch, which count as consumed."""
        return self._take(count) if self.left and count > 0 else None

    def state_dict(self) -> dict[str, int]:
        """The cursor: prompts consumed since the start of the run, and in the epochs before this one."""
        return {"consumed": self.consumed, "epoch": self._epoch, "epoch_start": self._start}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self.consumed = state["consumed"]
        self._epoch, self._start = state["epoch"], state["epoch_start"]
        self._rows = self.order(self._epoch)


class FixedBatches:
    """The same batches in the same order every time: what validation iterates over.

    Args:
        batches: all of them.
    """

    def __init__(self, batches: Sequence[PromptBatch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[PromptBatch]:
        return iter(self.batches)
