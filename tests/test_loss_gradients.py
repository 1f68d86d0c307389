"""Every accepted combination against formulas written a second time, and finite differences of those.

A stop-gradient has no finite difference, so the second writing takes two arguments: `x`, the log-probs that
move, and `frozen`, those that stand still wherever the formula stops the gradient.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from grpo_lit.errors import UserError
from grpo_lit.loss import LossConfig, TokenSelection, grpo_loss, token_weights

LENGTHS = [5, 3, 4, 1, 2, 1]
ADVANTAGES = [1.3, -0.7, 0.4, -1.1, 0.0, -0.5]
# On both sides of every bound, as tokens and as geometric means: 1.29, 1.07, 0.89, 0.72, 1.16, 1.70.
RATIOS = [
    [1.02, 0.95, 1.79, 1.15, 1.81],
    [0.99, 0.70, 1.75],
    [0.66, 1.30, 0.50, 1.49],
    [0.72],
    [1.40, 0.96],
    [1.70],
]
N, T = len(LENGTHS), max(LENGTHS)
MASK = np.arange(T)[None, :] < np.array(LENGTHS)[:, None]
REDUCTIONS: dict[str, dict[str, Any]] = {
    "sequence_mean": {},
    "token_mean": {},
    "alpha": {"alpha": 0.5},
    "fixed_length": {},
}
OBJECTIVE_RATIOS = [
    (objective, ratio)
    for objective in ("clip", "unclipped", "cispo", "sapo", "vespo", "gmpo", "reinforce")
    for ratio in ("token", "sequence", "sequence_token")
]
KL = {"no KL": {}, "KL": {"beta": 0.3}, "weighted KL": {"beta": 0.3, "kl_weighted": True}}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "asymmetric": {"epsilon_low": 0.1, "epsilon_high": 0.35},
    "delta": {"delta": 1.6},
    "off policy": {"off_policy_threshold": 0.05},
    "token truncate": {"rollout_correction": "token_truncate", "rollout_correction_cap": 1.1},
    "token mask": {"rollout_correction": "token_mask", "rollout_correction_cap": 1.1},
    "sequence truncate": {"rollout_correction": "sequence_truncate", "rollout_correction_cap": 1.1},
    "sequence mask": {"rollout_correction": "sequence_mask", "rollout_correction_cap": 1.1},
    "clip_cov": {"token_rule": "clip_cov"},
    "kl_cov": {"token_rule": "kl_cov"},
    "entropy": {"entropy_coef": 0.2},
}


def inputs() -> dict[str, np.ndarray]:
    """Log-probs whose ratios lie on both sides of every bound, none within 1e-3 of one."""
    random = np.random.default_rng(7)
    old = random.uniform(-2.5, -0.2, (N, T))
    moved = random.uniform(-0.7, 0.7, (N, T))
    for row, ratios in enumerate(RATIOS):
        moved[row, : len(ratios)] = np.log(ratios)
    return {
        "x": old + moved,
        "old": old,
        "ref": old + random.normal(0, 0.4, (N, T)),
        "rollout": old + random.normal(0, 0.15, (N, T)),
        "entropy": random.uniform(0.1, 2.0, (N, T)),
    }


def second_writing(
    x: np.ndarray, frozen: np.ndarray, data: dict[str, np.ndarray], weights: np.ndarray, config: LossConfig
) -> float:
    """The loss, row by row and token by token."""
    total = 0.0
    for row, length in enumerate(LENGTHS):
        advantage = ADVANTAGES[row]
        new, still = x[row, :length], frozen[row, :length]
        old, rollout = data["old"][row, :length], data["rollout"][row, :length]
        ratio = _ratio(new, still, old, config)
        correction = _correction(old, rollout, config)
        behaviour = rollout if config.rollout_correction != "none" else old
        dropped = (
            config.off_policy_threshold is not None
            and advantage < 0
            and np.mean(behaviour - still) > config.off_policy_threshold
        )
        for t in range(length):
            policy = 0.0
            if advantage != 0 and not dropped:
                policy = correction[t] * _policy(t, advantage, new, still, old, ratio, config)
            if config.token_rule == "clip_cov" and (row, t) in ((0, 1), (1, 0)):
                policy = 0.0  # the frozen value would only add a constant
            if config.token_rule == "kl_cov" and (row, t) in ((0, 1), (1, 0)):
                policy += 0.75 * abs(new[t] - old[t])
            d = data["ref"][row, t] - new[t]
            kl = np.exp(d) - d - 1
            if config.kl_weighted:
                kl *= ratio[t]
            bonus = config.entropy_coef * data["entropy"][row, t]
            total += weights[row, t] * (policy + config.beta * kl - bonus)
    return total


def _ratio(new: np.ndarray, still: np.ndarray, old: np.ndarray, config: LossConfig) -> np.ndarray:
    if config.ratio == "token":
        return np.exp(new - old)
    if config.ratio == "sequence":
        return np.full(len(new), np.exp(np.mean(new - old)))
    return np.exp(np.mean(still - old) + new - still)


def _correction(old: np.ndarray, rollout: np.ndarray, config: LossConfig) -> np.ndarray:
    mode, cap = config.rollout_correction, config.rollout_correction_cap
    if mode == "none" or config.objective == "vespo":
        return np.ones(len(old))
    difference = old - rollout
    weight = np.exp(np.full(len(old), difference.sum()) if mode.startswith("sequence") else difference)
    return np.minimum(weight, cap) if mode.endswith("truncate") else np.where(weight > cap, 0, weight)


def _policy(
    t: int,
    advantage: float,
    new: np.ndarray,
    still: np.ndarray,
    old: np.ndarray,
    ratio: np.ndarray,
    config: LossConfig,
) -> float:
    low, high = config.epsilon_low, config.epsilon_high
    if config.objective == "clip":
        unclipped = ratio[t]
        if config.delta is not None and advantage < 0:
            unclipped = min(unclipped, config.delta)
        return -min(unclipped * advantage, float(np.clip(ratio[t], 1 - low, 1 + high)) * advantage)
    if config.objective == "unclipped":
        return -ratio[t] * advantage
    if config.objective == "cispo":
        frozen_ratio = np.exp((still - old)[t] if config.ratio == "token" else np.mean(still - old))
        return -min(frozen_ratio, config.cispo_cap) * advantage * new[t]
    if config.objective == "sapo":
        tau = config.sapo_tau_positive if advantage > 0 else config.sapo_tau_negative
        return -advantage * 4 / tau / (1 + np.exp(-tau * (ratio[t] - 1)))
    if config.objective == "gmpo":
        moved = new - old
        moved = np.minimum(moved, high) if advantage > 0 else np.maximum(moved, -low)
        return -advantage * np.exp(moved.mean())
    if config.objective == "reinforce":
        return -advantage * new[t]
    k, scale = (2.0, 3.0) if advantage > 0 else (3.0, 2.0)
    weight = np.exp(np.sum(still - old))
    return -(weight**k) * np.exp(scale * (1 - weight)) * advantage * new[t]


def configs() -> list[Any]:
    params = []
    for (objective, ratio), (reduction, alpha), (kl, kl_options), (extra, options) in itertools.product(
        OBJECTIVE_RATIOS, REDUCTIONS.items(), KL.items(), EXTRAS.items()
    ):
        if objective == "vespo" and "rollout_correction" in options:
            continue  # its own test below
        chosen = {"objective": objective, "ratio": ratio, "reduction": reduction}
        try:
            config = LossConfig(**chosen, **alpha, **kl_options, **options)
        except UserError:
            continue  # tests/test_loss_config.py checks what is refused
        params.append(pytest.param(config, id=f"{objective}-{ratio}-{reduction}-{kl}-{extra}"))
    return params


def weights_for(config: LossConfig) -> torch.Tensor:
    return token_weights(
        torch.from_numpy(MASK),
        torch.zeros(N, dtype=torch.long),
        reduction=config.reduction,
        alpha=config.alpha,
        max_completion_length=T,
    ).double()


def selection_for(config: LossConfig) -> TokenSelection | None:
    picked = torch.zeros(N, T, dtype=torch.bool)
    picked[0, 1] = picked[1, 0] = True
    if config.token_rule == "clip_cov":
        return TokenSelection(~picked, torch.zeros(N, T))
    if config.token_rule == "kl_cov":
        return TokenSelection(torch.ones_like(picked), torch.where(picked, 0.75, 0.0))
    return None


def autograd(config: LossConfig, data: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    logprobs = torch.from_numpy(data["x"]).clone().requires_grad_()
    uses_rollout = config.rollout_correction != "none"
    output = grpo_loss(
        logprobs,
        torch.from_numpy(data["old"]),
        torch.tensor(ADVANTAGES, dtype=torch.float64),
        weights_for(config),
        torch.from_numpy(MASK),
        ref_logprobs=torch.from_numpy(data["ref"]),
        entropy=torch.from_numpy(data["entropy"]),
        rollout_logprobs=torch.from_numpy(data["rollout"]) if uses_rollout else None,
        selection=selection_for(config),
        config=config,
    )
    output.loss.backward()
    assert logprobs.grad is not None
    return float(output.loss.detach()), logprobs.grad.numpy()


def finite_differences(config: LossConfig, data: dict[str, np.ndarray], step: float = 1e-5) -> np.ndarray:
    weights = weights_for(config).numpy()
    gradient = np.zeros((N, T))
    for row, t in zip(*np.nonzero(MASK), strict=True):
        moved = data["x"].copy()
        values = []
        # fourth-order central difference: its error is far below 1e-6 at this step
        for shift in (-2, -1, 1, 2):
            moved[row, t] = data["x"][row, t] + shift * step
            values.append(second_writing(moved, data["x"], data, weights, config))
        gradient[row, t] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
    return gradient


@pytest.mark.parametrize("config", configs())
def test_value_and_gradient(config: LossConfig) -> None:
    data = inputs()
    loss, gradient = autograd(config, data)
    expected = second_writing(data["x"], data["x"], data, weights_for(config).numpy(), config)
    if config.token_rule != "clip_cov":  # there the two differ by the value of the frozen tokens
        assert loss == pytest.approx(expected, rel=1e-12)
    numeric = finite_differences(config, data)
    scale = np.abs(numeric).max()
    assert scale > 1e-2
    assert np.abs(gradient - numeric).max() <= 1e-6 * scale
    assert (gradient[~MASK] == 0).all()


def test_the_grid_is_as_large_as_it_says() -> None:
    """So that an overeager refusal can't empty it: 14 pairs of objective and ratio with their options."""
    accepted = {(param.values[0].objective, param.values[0].ratio) for param in configs()}
    assert len(accepted) == 14
    assert len(configs()) > 1200


def test_data_is_on_both_sides_of_every_bound_and_not_on_it() -> None:
    per_token = [(a, r) for a, ratios in zip(ADVANTAGES, RATIOS, strict=True) for r in ratios]
    per_row = [(a, float(np.exp(np.mean(np.log(r))))) for a, r in zip(ADVANTAGES, RATIOS, strict=True)]
    for pairs in (per_token, per_row):
        positive = [ratio for advantage, ratio in pairs if advantage > 0]
        negative = [ratio for advantage, ratio in pairs if advantage < 0]
        assert min(positive) < 1.2 < max(positive)
        assert min(negative) < 0.8 < max(negative)
        assert max(negative) > 1.6
        for bound in (0.8, 0.9, 1.2, 1.35, 1.6):
            assert min(abs(ratio - bound) for _, ratio in pairs) > 1e-3


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask"])
def test_vespo_takes_the_rollout_correction_into_its_own_weight(mode: str) -> None:
    data = inputs()
    config = LossConfig(objective="vespo", rollout_correction=mode, rollout_correction_cap=1.1)
    loss, gradient = autograd(config, data)
    expected = 0.0
    for row, length in enumerate(LENGTHS):
        advantage = ADVANTAGES[row]
        moved = (data["x"] - data["old"])[row, :length]
        weight = np.exp((data["old"] - data["rollout"])[row, :length])
        kept = np.minimum(weight, 1.1) if mode == "token_truncate" else np.where(weight > 1.1, 1e-8, weight)
        total = np.clip(moved.sum() + np.log(kept).sum(), np.log(1e-8), 20)
        k, scale = (2.0, 3.0) if advantage > 0 else (3.0, 2.0)
        phi = np.exp(scale + k * total - scale * np.exp(total))
        w = weights_for(config)[row, 0].item()
        np.testing.assert_allclose(gradient[row, :length], -w * phi * advantage, rtol=1e-10, atol=1e-300)
        expected -= w * phi * advantage * data["x"][row, :length].sum()
    assert loss == pytest.approx(expected, rel=1e-10)


def test_advantages_per_token() -> None:
    data = inputs()
    per_token = np.random.default_rng(1).normal(size=(N, T))
    logprobs = torch.from_numpy(data["x"]).clone().requires_grad_()
    weights = weights_for(LossConfig())
    output = grpo_loss(
        logprobs,
        torch.from_numpy(data["old"]),
        torch.from_numpy(per_token),
        weights,
        torch.from_numpy(MASK),
        config=LossConfig(objective="unclipped"),
    )
    output.loss.backward()
    expected = -weights.numpy() * per_token * np.exp(data["x"] - data["old"])
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), np.where(MASK, expected, 0), rtol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_through_logits_with_an_entropy_bonus(temperature: float) -> None:
    """dLoss/dlogit = (g (1[v chosen] - p_v) + c w p_v (ln p_v + H)) / tau, and finite differences of all."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    chosen = torch.tensor([[0, 5, 2], [1, 1, 4]])
    mask = torch.tensor([[True, True, True], [True, True, False]])
    config = LossConfig(entropy_coef=0.05, beta=0.1)
    advantages = torch.tensor([0.8, -1.2], dtype=torch.float64)
    weights = token_weights(mask, torch.zeros(2, dtype=torch.long)).double()

    def logprobs_of(values: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(values / temperature, dim=-1)

    old = logprobs_of(logits).gather(-1, chosen[..., None])[..., 0].detach() + 0.05
    ref = old - 0.3

    def loss_of(values: torch.Tensor) -> torch.Tensor:
        logp = logprobs_of(values)
        entropy = -(logp.exp() * logp).sum(dim=-1)
        selected = logp.gather(-1, chosen[..., None])[..., 0]
        return grpo_loss(
            selected, old, advantages, weights, mask, ref_logprobs=ref, entropy=entropy, config=config
        ).loss

    (gradient,) = torch.autograd.grad(loss_of(logits), logits)
    numeric = torch.zeros_like(gradient)
    step = 1e-5
    for index in itertools.product(*map(range, logits.shape)):
        shift = torch.zeros_like(logits)
        shift[index] = step
        values = [float(loss_of(logits.detach() + k * shift)) for k in (-2, -1, 1, 2)]
        numeric[index] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * step)
    assert (gradient - numeric).abs().max() <= 1e-6 * numeric.abs().max()

    logp = logprobs_of(logits).detach()
    entropy = -(logp.exp() * logp).sum(dim=-1, keepdim=True)
    selected = logp.gather(-1, chosen[..., None])[..., 0]
    d = ref - selected
    g = weights * (-advantages[:, None] * (selected - old).exp() - config.beta * torch.expm1(d))
    one_hot = torch.nn.functional.one_hot(chosen, 6)
    by_hand = g[..., None] * (one_hot - logp.exp())
    by_hand = by_hand + config.entropy_coef * weights[..., None] * logp.exp() * (logp + entropy)
    torch.testing.assert_close(gradient, by_hand / temperature, rtol=1e-10, atol=1e-14)
    assert torch.equal(gradient[1, 2], torch.zeros(6, dtype=torch.float64))
