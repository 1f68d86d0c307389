"""How much a rollout holds on the device, known before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from grpo_lit.oom import memory_limit
from grpo_lit.rollout.pages import CacheShape, GroupPages, pages_for

MAX_ROWS = 128
"""Rows in flight at most: what the skinny products of a decode step are made for."""


BUCKETS = (4, 16, 32, 64)
"""Numbers of slots worth a recording of their own. Products pad to 16 rows, idle slots cost attention nothing, and a
recording takes some 30 ms."""


@dataclass(frozen=True)
class RolloutPlan:
    """Sizes of everything that a rollout holds.

    Attributes:
        num_rows: N, rows of the whole rollout.
        max_new_tokens: T.
        num_slots: S, rows in flight at once.
        pages_per_row: P, columns of the page table: pages of the longest row, rounded up to a multiple of 4.
        num_pages: pages of the cache, the one that pads page tables included.
        num_positions: positions of the longest row.
        prefill_all: whether there are pages for every prompt at once, so that all are prefilled at the start and
            rows that wait need no forward when a slot is free.
    """

    num_rows: int
    max_new_tokens: int
    num_slots: int
    pages_per_row: int
    num_pages: int
    num_positions: int
    prefill_all: bool = True

    @property
    def buckets(self) -> list[int]:
        """Numbers of slots that a step is recorded for: those of `BUCKETS` that fit, and all slots.

        >>> RolloutPlan(99, 1, 20, 1, 1, 1).buckets
        [4, 16, 20]
        """
        return [*(size for size in BUCKETS if size < self.num_slots), self.num_slots]

    def bucket(self, num_slots: int) -> int:
        """The smallest bucket that holds this many slots."""
        return next(size for size in self.buckets if size >= num_slots)


def plan_rollout(
    prompt_lengths: Sequence[int],
    counts: Sequence[int],
    max_new_tokens: int,
    *,
    batch_size: int | None,
    shape: CacheShape,
    vocab_size: int,
    budget_bytes: float,
) -> RolloutPlan:
    """Sizes for the rows in flight times the longest row, within a budget.

    Args:
        prompt_lengths: tokens of each prompt.
        counts: completions of each prompt.
        max_new_tokens: T.
        batch_size: rows in flight wanted; None takes all.
        shape: of the cache.
        vocab_size: for the logits of the rows in flight.
        budget_bytes: memory to stay within; a single row is planned for even where it does not fit.
    """
    groups = [GroupPages(length, count, count) for length, count in zip(prompt_lengths, counts, strict=True) if count]
    num_rows = sum(group.not_done for group in groups)
    private = max((group.num_private(max_new_tokens) for group in groups), default=0)
    shared = sorted((group.num_shared for group in groups), reverse=True)
    num_slots = max(1, min(num_rows, batch_size or num_rows, MAX_ROWS))

    def num_pages(slots: int) -> int:
        return 1 + slots * private + sum(shared[:slots])  # each slot may be in a group of its own

    def num_bytes(slots: int) -> float:
        return num_pages(slots) * shape.page_bytes + 12.0 * slots * vocab_size  # logits in float32, and copies

    while num_slots > 1 and num_bytes(num_slots) > budget_bytes:
        num_slots -= 1
    longest = max((group.prompt_length for group in groups), default=1) - 1 + max_new_tokens
    extra = sum(shared[num_slots:])
    prefill_all = 2 * extra <= num_slots * private and num_bytes(num_slots) + extra * shape.page_bytes <= budget_bytes
    pages = num_pages(num_slots) + (extra if prefill_all else 0)
    columns = -(-pages_for(longest) // 4) * 4  # attention is compiled by this width: few different ones
    return RolloutPlan(num_rows, max_new_tokens, num_slots, columns, pages, longest, prefill_all)


def free_bytes(device: torch.device) -> float:
    """Memory that a rollout may take: nine tenths of what this process may still have; unlimited on the CPU."""
    if device.type != "cuda":
        return float("inf")
    return 0.9 * (memory_limit(device) - torch.cuda.memory_allocated(device))
