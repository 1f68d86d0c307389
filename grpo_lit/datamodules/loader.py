"""Batches of prompts in a fixed order, with a cursor that counts consumed prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Order = Callable[[int], Sequence[int]]
"""Epoch number -> indices of the rows in the order they are served."""


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

    def __len__(self) -> int:
        return len(self.prompts)


class PromptLoader:
    """Serves batches of prompts; can be saved and restored between any two batches.

    Lightning saves ``state_dict`` with the checkpoint and restores it before the first batch. Nothing is fetched ahead,
    so at the end of a step "served" and "consumed" are the same thing and a resume loses or repeats no prompt.

    Args:
        num_prompts: rows of the dataset.
        batch_size: prompts per batch; the last batch of an epoch may be smaller.
        order: order of an epoch.
        collate: row indices -> batch.
    """

    def __init__(
        self, num_prompts: int, batch_size: int, order: Order, collate: Callable[[Sequence[int]], PromptBatch]
    ) -> None:
        self.num_prompts = num_prompts
        self.batch_size = batch_size
        self.order = order
        self.collate = collate
        self.consumed = 0

    def __len__(self) -> int:
        """Batches per epoch."""
        return -(-self.num_prompts // self.batch_size)

    def __iter__(self) -> Iterator[PromptBatch]:
        """Serve from the cursor to the end of the epoch it lies in."""
        epoch, start = divmod(self.consumed, self.num_prompts)
        indices = self.order(epoch)
        for first in range(start, self.num_prompts, self.batch_size):
            rows = indices[first : first + self.batch_size]
            self.consumed += len(rows)
            yield self.collate(rows)

    def state_dict(self) -> dict[str, int]:
        """The cursor: prompts consumed since the start of the run."""
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self.consumed = state["consumed"]


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
