"""Advantages: values by hand, exact zeros, abstentions, ragged and scattered groups."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.loss import group_advantages, multi_reward_advantages

NAN = float("nan")


def one_group(rewards: list[float], **options: object) -> list[float]:
    tensor = torch.tensor(rewards, dtype=torch.float64)
    return group_advantages(tensor, torch.zeros(len(rewards), dtype=torch.long), **options).tolist()


def test_standardised_by_hand() -> None:
    # mean 0.25, population variance 3/16, standard deviation sqrt(3) / 4
    spread = math.sqrt(3) / 4 + 1e-4
    assert one_group([1, 0, 0, 0]) == pytest.approx([0.75 / spread] + [-0.25 / spread] * 3, rel=1e-12)


def test_epsilon_inside_the_root_by_hand() -> None:
    spread = math.sqrt(3 / 16 + 1e-2)
    got = one_group([1, 0, 0, 0], eps=1e-2, eps_inside_root=True)
    assert got == pytest.approx([0.75 / spread] + [-0.25 / spread] * 3, rel=1e-12)
    assert got != pytest.approx(one_group([1, 0, 0, 0], eps=1e-2), rel=1e-3)


def test_sample_variance_divides_by_one_less() -> None:
    spread = math.sqrt(0.75 / 3) + 1e-4
    assert one_group([1, 0, 0, 0], correction=1)[0] == pytest.approx(0.75 / spread, rel=1e-12)


def test_centred_only() -> None:
    assert one_group([1, 0, 0, 0], scale="none") == pytest.approx([0.75, -0.25, -0.25, -0.25], rel=1e-12)


def test_leave_one_out_baseline_is_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.5, 0.0, 0.25]
    others = [reward - (sum(rewards) - reward) / 3 for reward in rewards]
    assert one_group(rewards, scale="none", leave_one_out=True) == pytest.approx(others, rel=1e-12)


def test_leave_one_out_of_a_single_right_answer_stays_bounded() -> None:
    # The spread of the others alone is 0 for the first row; dividing by it would give about 9500.
    got = one_group([0.0] + [0.95] * 7, leave_one_out=True)
    assert max(map(abs, got)) == pytest.approx(0.95 / (0.95 * math.sqrt(7 / 64) + 1e-4), rel=1e-9)


def test_batch_scale_divides_by_the_spread_of_all_rewards_about_their_mean() -> None:
    rewards = torch.tensor([1.0, 0, 3, 1], dtype=torch.float64)
    group_ids = torch.tensor([0, 0, 1, 1])
    spread = math.sqrt(sum((r - 1.25) ** 2 for r in (1, 0, 3, 1)) / 4) + 1e-4
    got = group_advantages(rewards, group_ids, scale="batch")
    assert got.tolist() == pytest.approx([0.5 / spread, -0.5 / spread, 1 / spread, -1 / spread], rel=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 0.35, 0.95, 1 / 3])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_give_exact_zeros(scale: str, dtype: torch.dtype, value: float, leave_one_out: bool) -> None:
    """The mean of seven times 0.1 is not 0.1 in floating point; eps 0 would make the residue count fully."""
    rewards = torch.cat([torch.full((7,), value, dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)])
    group_ids = torch.tensor([4] * 7 + [9] * 2)
    got = group_advantages(rewards, group_ids, scale=scale, eps=0.0, leave_one_out=leave_one_out)
    assert torch.equal(got[:7], torch.zeros(7, dtype=dtype))
    assert got[8] > 0.4


def test_a_single_completion_has_no_advantage() -> None:
    assert one_group([0.7]) == [0.0]


def test_nearly_equal_rewards_are_not_flat() -> None:
    low, high = one_group([1.0, 1.0 + 1e-12], eps=0.0)
    assert (low, high) == pytest.approx((-1.0, 1.0), rel=1e-3)


def test_abstained_rows_leave_their_group_and_get_zero() -> None:
    with_abstention = group_advantages(torch.tensor([1.0, NAN, 0.0, 0.0]), torch.zeros(4, dtype=torch.long))
    without = group_advantages(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3, dtype=torch.long))
    assert with_abstention[1] == 0
    assert torch.equal(with_abstention[[0, 2, 3]], without)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_a_group_of_abstentions_is_all_zero_and_does_not_touch_the_others(scale: str) -> None:
    rewards = torch.tensor([NAN, NAN, 1.0, 0.0])
    got = group_advantages(rewards, torch.tensor([0, 0, 1, 1]), scale=scale)
    assert got[:2].tolist() == [0, 0]
    assert torch.equal(got[2:], group_advantages(rewards[2:], torch.tensor([1, 1]), scale=scale))


def test_one_opinion_in_a_group_is_no_advantage() -> None:
    assert one_group([NAN, 1.0, NAN]) == [0, 0, 0]


@pytest.mark.parametrize("scale", ["group", "none"])
def test_ragged_scattered_groups_equal_each_group_alone(scale: str) -> None:
    generator = torch.Generator().manual_seed(0)
    group_ids = torch.tensor([7, -3, 7, 1000, -3, 7, 7, 1000, -3, 5])
    rewards = torch.rand(10, generator=generator)
    got = group_advantages(rewards, group_ids, scale=scale)
    for group in (7, -3, 1000, 5):
        rows = group_ids == group
        alone = group_advantages(rewards[rows], torch.zeros(int(rows.sum()), dtype=torch.long), scale=scale)
        torch.testing.assert_close(got[rows], alone, rtol=0, atol=0)
        assert abs(float(got[rows].double().sum())) < 1e-6
    assert got[group_ids == 7].abs().min() > 0


def test_shifted_rewards_give_the_same_advantages() -> None:
    """Centring comes before squaring: a sum of squares of 1e6-sized rewards would lose the spread."""
    rewards = torch.tensor([0.0, 1.0, 0.25, 0.5], dtype=torch.float64)
    ids = torch.zeros(4, dtype=torch.long)
    shifted = group_advantages(rewards + 2**20, ids)
    torch.testing.assert_close(shifted, group_advantages(rewards, ids), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("given", "returned"),
    [
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float32),
    ],
)
def test_dtype_out(given: torch.dtype, returned: torch.dtype) -> None:
    got = group_advantages(torch.tensor([1, 0]).to(given), torch.tensor([0, 0]))
    assert got.dtype == returned
    assert got[0] == pytest.approx(0.5 / 0.5001, rel=1e-6)


def test_empty_batch() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "options", "named"),
    [
        ([1.0, float("inf")], {}, "rewards"),
        ([1.0, 0.0, 1.0], {}, "rewards"),
        ([1.0, 0.0], {"scale": "std"}, "model.loss.advantage_scale"),
        ([1.0, 0.0], {"eps": -1.0}, "model.loss.advantage_eps"),
        ([1.0, 0.0], {"eps": float("nan")}, "model.loss.advantage_eps"),
    ],
)
def test_bad_inputs_are_refused_by_name(rewards: list[float], options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError, match=named) as caught:
        group_advantages(torch.tensor(rewards), torch.zeros(2, dtype=torch.long), **options)
    assert caught.value.argument == named


def test_several_reward_functions_are_normalised_before_they_are_added() -> None:
    """One function has a spread a hundred times the other's; after normalising both count the same."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 100.0], [0.0, 0.0], [1.0, 100.0]], dtype=torch.float64)
    ids = torch.zeros(4, dtype=torch.long)
    got = multi_reward_advantages(rewards, ids, torch.tensor([1.0, 1.0]), eps=0.0)
    expected = [0.0, 0.0, -math.sqrt(2), math.sqrt(2)]
    assert got.tolist() == pytest.approx(expected, abs=1e-12)
    weighted = multi_reward_advantages(rewards, ids, torch.tensor([1.0, 0.0]), eps=0.0)
    assert weighted.tolist() == pytest.approx([1, -1, -1, 1], rel=1e-12)


def test_several_reward_functions_with_abstentions() -> None:
    rewards = torch.tensor([[1.0, NAN], [0.0, NAN], [NAN, NAN], [0.0, 1.0]])
    got: Tensor = multi_reward_advantages(rewards, torch.zeros(4, dtype=torch.long), torch.ones(2))
    assert got[2] == 0
    assert torch.isfinite(got).all()
    assert got[0] > 0 > got[1]
    others = [0, 1, 3]
    alone = multi_reward_advantages(rewards[others], torch.zeros(3, dtype=torch.long), torch.ones(2))
    assert torch.equal(got[others], alone)
