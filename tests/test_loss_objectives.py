"""Objectives and KL: values by hand, edges, and what happens where numbers overflow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.loss import (
    LossConfig,
    adapt_entropy_coef,
    cispo_objective,
    clip_objective,
    gmpo_log_ratio,
    grpo_loss,
    k3_kl,
    leveled_log_ratio,
    off_policy_keep,
    reinforce_objective,
    rollout_weights,
    sapo_objective,
    token_weights,
    unclipped_objective,
    vespo_weights,
)

F64 = torch.float64


def gradient_of(loss: Tensor, leaf: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return gradient


def leaf(*values: float, dtype: torch.dtype = F64) -> Tensor:
    return torch.tensor([values], dtype=dtype, requires_grad=True)


def test_two_by_three_by_hand() -> None:
    """Two rows of three and two tokens, KL included, every number written out."""
    old = torch.tensor([[-1.0, -2.0, -0.5], [-0.7, -1.5, 0.0]], dtype=F64)
    ratios = torch.tensor([[1.1, 1.5, 0.5], [0.9, 0.5, 1.0]], dtype=F64)
    logprobs = (old + ratios.log()).requires_grad_()
    ref = logprobs.detach() + math.log(2)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    advantages = torch.tensor([2.0, -1.0], dtype=F64)
    weights = token_weights(mask, torch.zeros(2, dtype=torch.long)).double()
    config = LossConfig(beta=0.1)
    output = grpo_loss(logprobs, old, advantages, weights, mask, ref_logprobs=ref, config=config)
    # row 1, A = 2: -2.2, clipped -2.4, -1.0; row 2, A = -1: 0.9, clipped 0.8
    policy = (-2.2 - 2.4 - 1.0) / 6 + (0.9 + 0.8) / 4
    kl = 0.1 * (1 - math.log(2))
    assert float(output.loss.detach()) == pytest.approx(policy + kl, rel=1e-7)
    gradient = gradient_of(output.loss, logprobs)
    pull = -0.1  # -beta expm1(ln 2)
    expected = [
        [(-2.2 + pull) / 6, (0 + pull) / 6, (-1.0 + pull) / 6],
        [(0.9 + pull) / 4, (0 + pull) / 4, 0],
    ]
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=F64), rtol=1e-7, atol=0)
    metrics = {name: float(value) for name, value in output.metrics.items()}
    assert metrics["policy_loss"] == pytest.approx(policy, rel=1e-7)
    assert metrics["kl_loss"] == pytest.approx(kl, rel=1e-7)
    assert metrics["ref_kl"] == pytest.approx(1 - math.log(2), rel=1e-12)
    assert metrics["clip_fraction"] == pytest.approx(2 / 5)
    assert metrics["clip_fraction_high"] == pytest.approx(1 / 5)
    assert metrics["clip_fraction_low"] == pytest.approx(1 / 5)
    assert metrics["ratio_mean"] == pytest.approx((1.1 + 1.5 + 0.5 + 0.9 + 0.5) / 5)
    assert metrics["ratio_max"] == pytest.approx(1.5)
    r = [1.1, 1.5, 0.5, 0.9, 0.5]
    assert metrics["approx_kl"] == pytest.approx(sum(x - 1 - math.log(x) for x in r) / 5)
    assert metrics["approx_kl_k1"] == pytest.approx(-sum(map(math.log, r)) / 5)
    assert metrics["token_count"] == 5
    assert metrics["row_count"] == 2


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.1, 1.0, -1.1),
        (1.5, 1.0, 0.0),
        (0.5, 1.0, -0.5),
        (0.9, -1.0, 0.9),
        (0.5, -1.0, 0.0),
        (1.5, -1.0, 1.5),
    ],
)
def test_clip_quadrants(ratio: float, advantage: float, gradient: float) -> None:
    log_ratio = leaf(math.log(ratio))
    loss = clip_objective(log_ratio, torch.tensor([[advantage]], dtype=F64), epsilon_low=0.2, epsilon_high=0.2)
    bounded = min(max(ratio, 0.8), 1.2)
    assert loss.item() == pytest.approx(-min(ratio * advantage, bounded * advantage), rel=1e-12)
    assert gradient_of(loss, log_ratio).item() == pytest.approx(gradient, rel=1e-12)


def test_clip_higher_is_apart_from_clip_lower() -> None:
    log_ratio = leaf(math.log(1.25), math.log(0.85))
    advantages = torch.tensor([[1.0, -1.0]], dtype=F64)
    loss = clip_objective(log_ratio, advantages, epsilon_low=0.1, epsilon_high=0.28)
    assert gradient_of(loss, log_ratio).tolist()[0] == pytest.approx([-1.25, 0.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_at_the_exact_edge_the_unclipped_gradient_is_used(dtype: torch.dtype) -> None:
    """With epsilon 0 a ratio of exactly 1 is on both edges; ln 2 and ln 0.5 round to edges of 1 as well."""
    at_one = leaf(0.0, 0.0, dtype=dtype)
    advantages = torch.tensor([[1.0, -1.0]], dtype=dtype)
    loss = clip_objective(at_one, advantages, epsilon_low=0.0, epsilon_high=0.0)
    assert gradient_of(loss, at_one).tolist() == [[-1.0, 1.0]]
    edge = torch.tensor([[2.0, 0.5]], dtype=dtype).log().requires_grad_()
    assert edge.exp().tolist() == [[2.0, 0.5]]
    loss = clip_objective(edge, advantages, epsilon_low=0.5, epsilon_high=1.0)
    assert gradient_of(loss, edge).tolist() == [[-2.0, 0.5]]


def test_dual_clip_stops_the_gradient_above_delta_for_negative_advantages_only() -> None:
    log_ratio = torch.tensor([[5.0, 5.0, 3.9, 0.7]], dtype=F64).log().requires_grad_()
    advantages = torch.tensor([[-1.0, 1.0, -1.0, -1.0]], dtype=F64)
    loss = clip_objective(log_ratio, advantages, epsilon_low=0.2, epsilon_high=0.2, delta=4.0)
    assert loss.tolist()[0] == pytest.approx([4.0, -1.2, 3.9, 0.8])
    assert gradient_of(loss, log_ratio).tolist()[0] == pytest.approx([0.0, 0.0, 3.9, 0.0])


def test_cispo_caps_the_weight_and_silences_no_token() -> None:
    log_ratio = torch.tensor([[math.log(7.0), math.log(2.0)]], dtype=F64)
    logprobs = leaf(-0.4, -1.3)
    advantages = torch.tensor([[1.5, -0.5]], dtype=F64)
    loss = cispo_objective(log_ratio, logprobs, advantages, cap=5.0)
    assert loss.tolist()[0] == pytest.approx([5 * 1.5 * 0.4, 2 * -0.5 * 1.3], rel=1e-12)
    assert gradient_of(loss, logprobs).tolist()[0] == pytest.approx([-7.5, 1.0], rel=1e-12)


def test_sapo_gradient_at_one_is_the_plain_policy_gradient_and_fades() -> None:
    log_ratio = torch.tensor([[1.0, 3.0, 3.0]], dtype=F64).log().requires_grad_()
    advantages = torch.tensor([[1.0, 1.0, -1.0]], dtype=F64)
    loss = sapo_objective(log_ratio, advantages, tau_positive=1.0, tau_negative=2.0)
    gradient = gradient_of(loss, log_ratio).tolist()[0]

    def gate(tau: float, ratio: float) -> float:
        s = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return 4 * s * (1 - s) * ratio

    assert gradient == pytest.approx([-1.0, -gate(1.0, 3.0), gate(2.0, 3.0)], rel=1e-12)
    assert loss.tolist()[0][0] == pytest.approx(-2.0)


def test_vespo_weight_is_one_at_ratio_one_and_by_hand_elsewhere() -> None:
    mask = torch.tensor([[True, True, False], [True, True, False], [True, True, False]])
    log_ratio = torch.tensor([[0, 0, 9], [0.1, 0.2, 9], [-0.1, -0.2, 9]], dtype=F64)
    advantages = torch.tensor([[1.0], [1.0], [-1.0]], dtype=F64)
    phi = vespo_weights(log_ratio, advantages, mask)
    up, down = math.exp(0.3), math.exp(-0.3)
    expected = [1.0, up**2 * math.exp(3 * (1 - up)), down**3 * math.exp(2 * (1 - down))]
    assert phi[:, 0].tolist() == pytest.approx(expected, rel=1e-12)


def test_gmpo_holds_each_token_on_the_side_that_would_reward_moving_on() -> None:
    mask = torch.tensor([[True, True, True], [True, True, False]])
    log_ratio = torch.tensor([[0.9, -0.9, 0.2], [0.9, -0.9, 5.0]], dtype=F64)
    advantages = torch.tensor([[1.0], [-1.0]], dtype=F64)
    got = gmpo_log_ratio(log_ratio, advantages, mask, epsilon_low=0.4, epsilon_high=0.4)
    assert got[:, 0].tolist() == pytest.approx([(0.4 - 0.9 + 0.2) / 3, (0.9 - 0.4) / 2], rel=1e-12)


def test_sequence_ratio_is_the_mean_over_counted_tokens() -> None:
    logprobs, old = leaf(-1.0, -2.0, -50.0), torch.tensor([[-1.4, -2.2, 0.0]], dtype=F64)
    mask = torch.tensor([[True, True, False]])
    for ratio, gradient in (("sequence", [0.5, 0.5, 0.0]), ("sequence_token", [1.0, 0.0, 0.0])):
        log_ratio = leveled_log_ratio(logprobs, old, mask, ratio)
        assert log_ratio[0, :2].tolist() == pytest.approx([0.3, 0.3])
        assert gradient_of(log_ratio[:, 0], logprobs).tolist()[0] == pytest.approx(gradient)


def test_gspo_gradient_by_hand() -> None:
    """g_t = -(1/R) A s / L for every token of the row."""
    old = torch.zeros(2, 3, dtype=F64)
    logprobs = torch.tensor([[0.1, 0.2, 0.0], [-0.3, 0.0, 0.3]], dtype=F64, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    weights = token_weights(mask, torch.zeros(2, dtype=torch.long)).double()
    advantages = torch.tensor([1.0, -2.0], dtype=F64)
    output = grpo_loss(logprobs, old, advantages, weights, mask, config=LossConfig(ratio="sequence"))
    first = -0.5 * math.exp(0.15) / 2
    expected = torch.tensor([[first, first, 0.0], [2 / 6, 2 / 6, 2 / 6]], dtype=F64)
    torch.testing.assert_close(gradient_of(output.loss, logprobs), expected, rtol=1e-6, atol=0)


def test_with_a_sequence_ratio_the_clip_fraction_is_one_of_rows() -> None:
    """One long row is clipped and one short row is not: half the rows, five sixths of the tokens."""
    mask = torch.tensor([[True] * 5, [True] + [False] * 4])
    logprobs = torch.tensor([[0.5] * 5, [0.1] * 5])
    weights = token_weights(mask, torch.zeros(2, dtype=torch.long))
    arguments = (logprobs, torch.zeros(2, 5), torch.ones(2), weights, mask)
    rows = grpo_loss(*arguments, config=LossConfig(ratio="sequence")).metrics
    assert float(rows["clip_fraction"]) == pytest.approx(1 / 2)
    assert float(rows["ratio_mean"]) == pytest.approx((math.exp(0.5) + math.exp(0.1)) / 2)
    tokens = grpo_loss(*arguments).metrics
    assert float(tokens["clip_fraction"]) == pytest.approx(5 / 6)
    assert float(rows["approx_kl_k1"]) == float(tokens["approx_kl_k1"])  # always over tokens


ALL = {
    "clip": lambda lr, lp, a: clip_objective(lr, a, epsilon_low=0.2, epsilon_high=0.2),
    "dual": lambda lr, lp, a: clip_objective(lr, a, epsilon_low=0.2, epsilon_high=0.2, delta=4.0),
    "unclipped": lambda lr, lp, a: unclipped_objective(lr, a),
    "cispo": lambda lr, lp, a: cispo_objective(lr, lp, a, cap=5.0),
    "sapo": lambda lr, lp, a: sapo_objective(lr, a, tau_positive=1.0, tau_negative=1.05),
    "reinforce": lambda lr, lp, a: reinforce_objective(lp, a),
}


@pytest.mark.parametrize("name", list(ALL))
@pytest.mark.parametrize("log_ratio", [float("inf"), float("-inf"), 800.0, float("nan")])
def test_zero_advantage_skips_the_policy_term(name: str, log_ratio: float) -> None:
    logprobs = leaf(log_ratio, -0.5, dtype=torch.float32)
    advantages = torch.tensor([[0.0, 1.0]])
    loss = ALL[name](logprobs, logprobs, advantages)
    assert loss[0, 0].item() == 0
    gradient = gradient_of(loss, logprobs)
    assert gradient[0, 0].item() == 0
    assert gradient[0, 1].item() != 0


@pytest.mark.parametrize(
    ("name", "advantage"),  # the plain clip with A < 0 has no bound: that is what delta is for
    [("clip", 1.0), ("dual", 1.0), ("dual", -1.0), ("cispo", 1.0), ("cispo", -1.0), ("sapo", 1.0), ("sapo", -1.0)],
)
def test_bounded_objectives_stay_finite_where_the_ratio_overflows(name: str, advantage: float) -> None:
    logprobs = leaf(100.0, dtype=torch.float32)
    loss = ALL[name](logprobs, logprobs, torch.tensor([[advantage]]))
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient_of(loss, logprobs)).all()


def test_k3_of_a_doubled_reference() -> None:
    logprobs = leaf(-1.0)
    kl = k3_kl(logprobs, torch.tensor([[-1.0 + math.log(2)]], dtype=F64))
    assert kl.item() == pytest.approx(1 - math.log(2), rel=1e-12)
    assert gradient_of(kl, logprobs).item() == pytest.approx(-1.0, rel=1e-12)


def test_k3_keeps_its_digits_near_zero() -> None:
    """exp(d) - d - 1 in float32 is 0 or 1.2e-7 here; the truth is d^2 / 2."""
    logprobs = leaf(0.0, dtype=torch.float32)
    kl = k3_kl(logprobs, torch.tensor([[1e-3]]))
    assert kl.item() == pytest.approx(5.0016671e-7, rel=2e-4)
    assert gradient_of(kl, logprobs).item() == pytest.approx(-math.expm1(1e-3), rel=1e-6)
    tiny = k3_kl(torch.zeros(1, dtype=F64), torch.tensor([1e-6], dtype=F64))
    assert tiny.item() == pytest.approx(5.0000017e-13, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("difference", [100.0, 1000.0])
def test_k3_does_not_overflow_and_still_pulls(dtype: torch.dtype, difference: float) -> None:
    logprobs = leaf(0.0, dtype=dtype)
    kl = k3_kl(logprobs, torch.tensor([[difference]], dtype=dtype))
    slope = math.expm1(20)
    exact = 1e-6 if dtype == torch.float32 else 1e-14
    assert kl.item() == pytest.approx(slope - 20 + slope * (difference - 20), rel=exact)
    assert gradient_of(kl, logprobs).item() == pytest.approx(-slope, rel=1e-6)


def test_k3_is_smooth_where_the_tangent_takes_over() -> None:
    below, above = leaf(1e-6), leaf(-1e-6)
    other = torch.tensor([[20.0]], dtype=F64)
    left, right = k3_kl(below, other), k3_kl(above, other)
    assert right.item() - left.item() == pytest.approx(2e-6 * math.exp(20), rel=1e-3)
    assert gradient_of(left, below).item() == pytest.approx(gradient_of(right, above).item(), rel=1e-5)


def test_k3_far_below_zero_is_linear() -> None:
    logprobs = leaf(0.0, dtype=torch.float32)
    kl = k3_kl(logprobs, torch.tensor([[-100.0]]))
    assert kl.item() == pytest.approx(99.0)
    assert gradient_of(kl, logprobs).item() == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[2.0, 0.5, 1.0], [2.5, 1.0, 1.0]]),
        ("token_mask", [[2.0, 0.5, 1.0], [0.0, 1.0, 1.0]]),
        ("sequence_truncate", [[1.0, 1.0, 1.0], [2.5, 2.5, 2.5]]),
        ("sequence_mask", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_rollout_weights(mode: str, expected: list[list[float]]) -> None:
    old = torch.tensor([[2.0, 0.5, 8.0], [4.0, 1.0, 8.0]], dtype=F64).log()
    mask = torch.tensor([[True, True, False], [True, True, False]])
    got = rollout_weights(old, torch.zeros(2, 3, dtype=F64), mask, mode, cap=2.5)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=F64))


def test_a_token_the_engine_could_not_score_is_left_uncorrected() -> None:
    logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    rollout = torch.tensor([[float("nan"), -2.0]])
    config = LossConfig(rollout_correction="token_truncate")
    output = grpo_loss(
        logprobs,
        logprobs.detach(),
        torch.tensor([1.0]),
        mask.float(),
        mask,
        rollout_logprobs=rollout,
        config=config,
    )
    assert gradient_of(output.loss, logprobs).tolist()[0] == pytest.approx([-1.0, -math.e], rel=1e-6)
    assert float(output.metrics["logprob_mismatch"]) == pytest.approx(0.5)
    assert float(output.metrics["logprob_mismatch_max"]) == pytest.approx(1.0)


def test_off_policy_rows_with_negative_advantage_are_dropped() -> None:
    behaviour = torch.zeros(3, 2)
    logprobs = torch.tensor([[-1.0, -3.0], [-1.0, -3.0], [-0.1, -0.1]])
    mask = torch.ones(3, 2, dtype=torch.bool)
    advantages = torch.tensor([[-1.0], [1.0], [-1.0]])
    keep = off_policy_keep(logprobs, behaviour, advantages, mask, threshold=1.0)
    assert keep[:, 0].tolist() == [False, True, True]


@pytest.mark.parametrize(("entropy", "expected"), [(0.1, 0.015), (0.2, 0.015), (0.3, 0.005)])
def test_entropy_coefficient_goes_up_at_or_below_the_target(entropy: float, expected: float) -> None:
    assert adapt_entropy_coef(0.01, entropy, target=0.2) == pytest.approx(expected)


def test_entropy_coefficient_stays_in_its_range() -> None:
    assert adapt_entropy_coef(0.002, 1.0, target=0.2) == 0
    assert adapt_entropy_coef(0.998, 0.0, target=0.2) == 1


@pytest.mark.parametrize(
    ("changed", "config", "named"),
    [
        ({"old_logprobs": torch.zeros(2, 4)}, {}, "old_logprobs"),
        ({"weights": torch.zeros(3, 3)}, {}, "weights"),
        ({"advantages": torch.zeros(3)}, {}, "advantages"),
        ({"completion_mask": torch.ones(2, 2, dtype=torch.bool)}, {}, "completion_mask"),
        ({"ref_logprobs": torch.zeros(2)}, {"beta": 0.1}, "ref_logprobs"),
        ({}, {"beta": 0.1}, "ref_logprobs"),
        ({}, {"entropy_coef": 0.1}, "entropy"),
        ({}, {"token_rule": "sent"}, "entropy"),
        ({}, {"rollout_correction": "token_mask"}, "rollout_logprobs"),
    ],
)
def test_wrong_or_missing_tensors_are_named(changed: dict[str, Tensor], config: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "weights": torch.ones(2, 3),
        "completion_mask": torch.ones(2, 3, dtype=torch.bool),
    }
    with pytest.raises(UserError) as caught:
        grpo_loss(**(arguments | changed), config=LossConfig(**config))
    assert caught.value.argument == named
