"""What a rollout holds, before it starts; and that it never needs more."""

from __future__ import annotations

import pytest
import torch

from grpo_lit.rollout.pages import PAGE, CacheShape, GroupPages, PagePool
from grpo_lit.rollout.plan import MAX_ROWS, plan_rollout

SHAPE = CacheShape(num_layers=28, num_kv_heads=2, head_dim=128, dtype=torch.bfloat16)


def plan(lengths, counts, tokens=768, batch_size=None, budget=float("inf")):  # type: ignore[no-untyped-def]
    return plan_rollout(
        lengths, counts, tokens, batch_size=batch_size, shape=SHAPE, vocab_size=151936, budget_bytes=budget
    )


def test_four_rows_of_768_fit_where_they_must() -> None:
    """The 1.5B's shape: 28,672 bytes a position, so 4 rows of 128 + 768 take little more than 0.1 GiB."""
    sizes = plan([128], [4])
    assert SHAPE.page_bytes == 28_672 * PAGE
    assert sizes.num_pages * SHAPE.page_bytes < 0.12 * 2**30
    assert (sizes.num_rows, sizes.num_slots, sizes.num_positions) == (4, 4, 895)


def test_rows_that_do_not_fit_wait() -> None:
    everything = plan([128] * 8, [16] * 8)
    assert everything.num_slots == MAX_ROWS == 128
    budget = everything.num_pages * SHAPE.page_bytes / 3
    some = plan([128] * 8, [16] * 8, budget=budget)
    assert 1 < some.num_slots < 60
    assert some.num_pages * SHAPE.page_bytes < budget
    assert plan([128] * 8, [16] * 8, budget=0.0).num_slots == 1
    assert plan([128] * 8, [16] * 8, batch_size=10).num_slots == 10
    assert plan([128] * 8, [4] * 8, batch_size=1000).num_slots == 32


def test_all_prompts_are_held_at_once_where_that_is_cheap() -> None:
    short = plan([100] * 16, [16] * 16)
    assert short.prefill_all
    assert short.num_pages == 1 + 128 * 13 + 16 * 2
    long = plan([4000] * 64, [4] * 64, tokens=64, batch_size=4)
    assert not long.prefill_all
    assert long.num_pages == 1 + 4 * 2 + 4 * 63
    tight = plan([100] * 16, [1] * 16, batch_size=8, budget=(short.num_pages + 1) * SHAPE.page_bytes / 10)
    assert not tight.prefill_all or tight.num_pages * SHAPE.page_bytes < short.num_pages * SHAPE.page_bytes / 10


@pytest.mark.parametrize("num_slots", [1, 3, 7, 50])
@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_pages_suffice_in_the_worst_order(num_slots: int, tokens: int) -> None:
    """Slots full of rows of different groups, one group more in part; every page comes back."""
    lengths = [1, 2, 64, 65, 66, 128, 129, 130, 300, 31]
    counts = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    sizes = plan(lengths, counts, tokens, batch_size=num_slots)
    pool = PagePool(sizes.num_pages)
    groups = [GroupPages(length, count, count) for length, count in zip(lengths, counts, strict=True)]
    waiting = [group for group in groups for _ in range(group.not_done)]
    running: list[tuple[GroupPages, list[int]]] = []
    torch.manual_seed(num_slots)
    while waiting or running:
        while waiting and len(running) < num_slots:
            group = waiting.pop(0)
            for other in groups if sizes.prefill_all else [group]:
                if not other.ready:
                    other.take_shared(pool)
            running.append((group, pool.take(group.num_private(tokens))))
        group, pages = running.pop(int(torch.randint(len(running), ())))
        pool.give(pages)
        group.not_done -= 1
        if group.not_done == 0:
            group.release_shared(pool)
    assert pool.num_free == sizes.num_pages - 1
