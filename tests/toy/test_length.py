"""The continue/EOS policy: exact and sampled updates against the length weight."""

from __future__ import annotations

import pytest
import torch

from grpo_lit.toy.length import LengthPolicy, length_tradeoff, sample_lengths


def test_table_to_eight_digits() -> None:
    rows = length_tradeoff()
    assert [row.alpha for row in rows] == [0.0, 0.5, 1.0]
    assert [f"{row.exact:.8f}" for row in rows] == ["0.09167075", "0.14661711", "0.28812000"]
    assert [f"{row.sampled:.8f}" for row in rows] == ["0.09133101", "0.14614544", "0.28735213"]
    assert [f"{row.standard_error:.8f}" for row in rows] == ["0.00016480", "0.00025577", "0.00053766"]
    assert [round(100 * row.long_share, 2) for row in rows] == [50.0, 66.67, 80.0]
    assert all(abs(row.sampled - row.exact) < 0.003 for row in rows)


def test_only_alpha_one_is_the_derivative_of_the_expected_reward() -> None:
    policy = LengthPolicy()
    reward = policy.expected_reward()
    assert float(reward.detach()) == pytest.approx(0.7**4, rel=1e-12)
    (derivative,) = torch.autograd.grad(reward, policy.logit)
    assert float(derivative) == pytest.approx(4 * 0.7**4 * 0.3, rel=1e-12)
    assert policy.exact_update(1.0) == pytest.approx(float(derivative), rel=1e-12)
    for alpha in (0.0, 0.5, 0.9):
        assert policy.exact_update(alpha) < 0.95 * float(derivative)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_exact_update_is_the_covariance_by_hand(alpha: float) -> None:
    q = 0.7
    outcomes = [(q ** (n - 1) * (1 - q), n, (n - 1) * (1 - q) - q) for n in range(1, 9)]
    outcomes.append((q**8, 8, 8 * (1 - q)))
    assert sum(p for p, _, _ in outcomes) == pytest.approx(1)
    mean_reward = sum(p * (n >= 5) for p, n, _ in outcomes)
    mean_score = sum(p * n ** (alpha - 1) * s for p, n, s in outcomes)
    product = sum(p * (n >= 5) * n ** (alpha - 1) * s for p, n, s in outcomes)
    assert LengthPolicy().exact_update(alpha) == pytest.approx(product - mean_reward * mean_score, rel=1e-10)
    # the baseline's own bias, absent only at alpha = 1
    assert (abs(mean_score) < 1e-12) == (alpha == 1.0)


def test_outcomes_are_complete() -> None:
    policy = LengthPolicy()
    continued, mask = policy.outcomes()
    logprobs = torch.where(mask, policy.logprobs(continued), 0).sum(dim=1)
    assert float(logprobs.exp().sum().detach()) == pytest.approx(1.0, rel=1e-12)
    assert mask.sum(dim=1).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 8]


def test_lengths_are_drawn_as_step_by_step() -> None:
    """The vectorised reading of the stream against a loop over it."""
    from grpo_lit.toy.generators import MersenneTwister

    policy = LengthPolicy(continue_probability=0.9)  # long runs, so that many rows end at eight
    stream = (MersenneTwister(5).uniforms(3000) < float(torch.sigmoid(policy.logit.detach()))).tolist()
    expected, position = [], 0
    while len(expected) < 400:
        continues = 0
        while continues < 8:
            position += 1
            if not stream[position - 1]:
                break
            continues += 1
        expected.append(continues)
    assert sample_lengths(policy, 400, seed=5).tolist() == expected
    assert expected.count(8) > 100


@pytest.mark.parametrize("group_size", [2, 16])
def test_the_factor_undoes_the_groups_own_mean(group_size: int) -> None:
    """Without G / (G - 1) a group of two would be off by half."""
    (row,) = length_tradeoff((1.0,), groups=20_000, group_size=group_size, seed=1)
    assert abs(row.sampled - row.exact) < 4 * row.standard_error
    assert row.standard_error < 0.01
