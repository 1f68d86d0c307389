"""VIGOR's rounds: counts, ties, guards, budgets, and the uniform twin."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_lit.datamodules.vigor import UniformAllocator, VigorAllocator
from grpo_lit.errors import UserError

NAN = float("nan")


def play(allocator: VigorAllocator, rewards: dict[int, list[float]] | None = None) -> list[list[int]]:
    """Counts of each round; a prompt cycles through its rewards, by default more varied at a lower index."""
    rounds = []
    while (counts := allocator.next_counts()) is not None:
        rounds.append(counts.tolist())
        for prompt, count in enumerate(counts.tolist()):
            if count:
                cycle = (rewards or {}).get(prompt, [0.0, 1.0 / (prompt + 1)])
                allocator.observe(prompt, [cycle[k % len(cycle)] for k in range(count)])
    return rounds


def test_eight_prompts_draw_30_14_6_6_2_2_2_2() -> None:
    allocator = VigorAllocator(8)
    assert play(allocator) == [
        [2] * 8,
        [4] * 4 + [0] * 4,
        [8] * 2 + [0] * 6,
        [16] + [0] * 7,
    ]
    assert sorted(allocator.totals().tolist(), reverse=True) == [30, 14, 6, 6, 2, 2, 2, 2]
    assert allocator.budget() == 64 == int(allocator.totals().sum())
    assert allocator.totals().dtype == torch.int64


@pytest.mark.parametrize("rewards_seed", range(5))
def test_counts_sorted_are_the_same_whatever_the_rewards(rewards_seed: int) -> None:
    generator = torch.Generator().manual_seed(rewards_seed)
    rewards = {i: torch.randint(0, 2, (30,), generator=generator).double().tolist() for i in range(8)}
    allocator = VigorAllocator(8)
    play(allocator, rewards)
    assert sorted(allocator.totals().tolist(), reverse=True) == [30, 14, 6, 6, 2, 2, 2, 2]


def test_the_most_varied_prompt_wins_wherever_it_stands() -> None:
    flat = {i: [0.5] for i in range(8)}
    rewards = flat | {6: [0.0, 1.0], 3: [0.0, 0.8], 4: [0.0, 0.6], 1: [0.0, 0.4]}
    allocator = VigorAllocator(8)
    play(allocator, rewards)
    assert allocator.totals().tolist() == [2, 6, 2, 14, 6, 2, 30, 2]


def test_ties_go_to_the_lower_index() -> None:
    allocator = VigorAllocator(8)
    play(allocator, {i: [0.0, 1.0] for i in range(8)})
    assert allocator.totals().tolist() == [30, 14, 6, 6, 2, 2, 2, 2]


def test_rank_uses_all_rewards_so_far() -> None:
    """Prompt 0 varies in round one only, prompt 1 later; after round two the histories decide."""
    allocator = VigorAllocator(4, rounds=3)
    allocator.next_counts()
    for prompt, rewards in enumerate([[0, 1], [0, 0.9], [0, 0], [0, 0]]):
        allocator.observe(prompt, rewards)
    assert allocator.next_counts().tolist() == [4, 4, 0, 0]
    allocator.observe(0, [0, 0, 0, 0])
    allocator.observe(1, [0, 1, 0, 1])
    # variances of all six: 5/36 = 0.139 against mean 29/60, about 0.227
    assert allocator.variance(0) == pytest.approx(5 / 36)
    assert allocator.next_counts().tolist() == [0, 8, 0, 0]


def test_variance_is_of_the_population_and_ties_exactly_in_any_order() -> None:
    allocator = VigorAllocator(3, initial_count=6)
    allocator.next_counts()
    allocator.observe(0, [0.1, 0.7, 0.3, 0.9, 0.5, 0.5])
    allocator.observe(1, torch.tensor([0.9, 0.5, 0.3, 0.7, 0.5, 0.1], dtype=torch.float64))
    allocator.observe(2, [0.1] * 6)  # their mean is not 0.1 in floating point
    assert allocator.variance(0) == pytest.approx(0.4 / 6)
    assert allocator.variance(0) == allocator.variance(1)
    assert allocator.variance(2) == 0.0


def test_abstained_rewards_are_drawn_but_have_no_say() -> None:
    allocator = VigorAllocator(2, initial_count=4, rounds=2)
    allocator.next_counts()
    allocator.observe(0, [None, None, NAN, 1.0])
    allocator.observe(1, [0.4, None, 0.6, 0.5])
    assert allocator.variance(0) == 0.0
    assert allocator.variance(1) == pytest.approx(0.02 / 3)
    assert allocator.totals().tolist() == [4, 4]
    assert allocator.next_counts().tolist() == [0, 8]


def test_all_abstained_counts_as_no_variance() -> None:
    allocator = VigorAllocator(1)
    allocator.next_counts()
    allocator.observe(0, [None, None])
    assert allocator.variance(0) == 0.0
    assert allocator.next_counts().tolist() == [4]


def test_seeded_ties_spread_over_the_prompts_and_repeat() -> None:
    def winner(seed: int) -> int:
        allocator = VigorAllocator(8, seed=seed)
        play(allocator, {i: [0.0, 1.0] for i in range(8)})
        assert sorted(allocator.totals().tolist()) == [2, 2, 2, 2, 6, 6, 14, 30]
        return int(allocator.totals().argmax())

    winners = [winner(seed) for seed in range(40)]
    assert len(set(winners)) == 8
    assert winners == [winner(seed) for seed in range(40)]


def test_a_seed_does_not_overrule_the_variance() -> None:
    for seed in range(10):
        allocator = VigorAllocator(8, seed=seed)
        play(allocator)  # all variances differ
        assert allocator.totals().tolist() == [30, 14, 6, 6, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("num_prompts", "budget"), [(16, 128), (8, 64), (12, 104), (6, 56), (5, 54), (3, 38), (4, 40), (1, 30)]
)
def test_budgets(num_prompts: int, budget: int) -> None:
    allocator = VigorAllocator(num_prompts)
    assert allocator.budget() == budget
    play(allocator)
    assert int(allocator.totals().sum()) == budget
    even = 8 * num_prompts
    note = allocator.budget_note()
    if budget == even:
        assert note is None
    else:
        assert note is not None
        assert str(budget) in note
        assert str(even) in note


def test_options() -> None:
    allocator = VigorAllocator(10, initial_count=1, rounds=3, keep_fraction=0.3, expansion=3)
    assert [sum(counts) for counts in play(allocator)] == [10, 9, 9]
    assert VigorAllocator(100, keep_fraction=0.07, rounds=2).budget() == 200 + 7 * 4  # 0.07 * 100 > 7
    everyone = VigorAllocator(3, keep_fraction=1.0, rounds=2)
    assert play(everyone) == [[2] * 3, [4] * 3]


def test_guards() -> None:
    allocator = VigorAllocator(4)
    with pytest.raises(UserError, match="active"):
        allocator.observe(0, [0, 1])  # nothing handed out yet
    allocator.next_counts()
    with pytest.raises(UserError, match="2 numbers"):
        allocator.observe(0, [0, 1, 1])
    with pytest.raises(UserError, match="finite"):
        allocator.observe(0, [0, math.inf])
    allocator.observe(0, [0, 1])
    with pytest.raises(UserError, match="not observed yet"):
        allocator.observe(0, [0, 1])
    with pytest.raises(UserError, match="active"):
        allocator.observe(4, [0, 1])
    with pytest.raises(RuntimeError, match=r"\[1, 2, 3\]"):
        allocator.next_counts()
    assert allocator.totals().tolist() == [2, 0, 0, 0]
    for prompt in (1, 2, 3):
        allocator.observe(prompt, [0, 0.5])
    assert allocator.next_counts().tolist() == [4, 4, 0, 0]
    with pytest.raises(UserError, match="active"):
        allocator.observe(3, [0] * 4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_prompts": 0}, "num_prompts"),
        ({"initial_count": 0}, "initial_count"),
        ({"rounds": 0}, "rounds"),
        ({"rounds": 1.5}, "rounds"),
        ({"keep_fraction": 0.0}, "keep_fraction"),
        ({"keep_fraction": 1.1}, "keep_fraction"),
        ({"keep_fraction": NAN}, "keep_fraction"),
        ({"expansion": 1}, "expansion"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, float], named: str) -> None:
    with pytest.raises(UserError) as caught:
        VigorAllocator(**({"num_prompts": 8} | options))
    assert caught.value.argument == f"vigor.{named}"


def test_after_the_last_round_there_is_no_more() -> None:
    allocator = VigorAllocator(2, rounds=1)
    assert play(allocator) == [[2, 2]]
    assert allocator.next_counts() is None


def test_uniform_allocation_of_vigors_budget() -> None:
    twin = UniformAllocator(8, VigorAllocator(8).budget())
    counts = twin.next_counts()
    assert counts is not None
    assert counts.tolist() == [8] * 8
    assert twin.budget_note() is None
    for prompt in range(8):
        twin.observe(prompt, [0.0] * 8)
    assert twin.next_counts() is None


def test_uniform_allocation_of_an_uneven_budget() -> None:
    twin = UniformAllocator(12, VigorAllocator(12).budget())
    counts = twin.next_counts()
    assert counts is not None
    assert counts.tolist() == [9] * 8 + [8] * 4
    assert twin.budget() == 104
    assert "8 or 9 each" in str(twin.budget_note())
    with pytest.raises(UserError, match="9 numbers"):
        twin.observe(0, [0.0] * 8)


def test_uniform_guards() -> None:
    with pytest.raises(UserError, match="budget"):
        UniformAllocator(4, 3)
    with pytest.raises(UserError, match="num_prompts"):
        UniformAllocator(0, 3)
