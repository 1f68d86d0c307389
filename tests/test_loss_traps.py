"""Mistakes that other trainers made in their losses, each as a case."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lit.loss import LossConfig, LossOutput, group_advantages, grpo_loss, merge_metrics, token_weights

LENGTHS = (1, 9, 3, 7, 0, 5, 2, 9)
N, T = len(LENGTHS), max(LENGTHS)
GROUP_IDS = torch.tensor([3, 3, 3, 3, 3, 8, 8, 1])  # groups of 5, 2 and 1
REDUCTIONS: dict[str, dict[str, Any]] = {
    "sequence_mean": {},
    "token_mean": {},
    "alpha": {"alpha": 0.5},
    "fixed_length": {},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "clip": {"beta": 0.1, "entropy_coef": 0.01},
    "dual": {"delta": 1.5},
    "gspo": {"ratio": "sequence", "beta": 0.1},
    "gspo_token": {"ratio": "sequence_token"},
    "cispo": {"objective": "cispo", "cispo_cap": 1.1},
    "sapo": {"objective": "sapo"},
    "vespo": {"objective": "vespo"},
    "gmpo": {"objective": "gmpo", "ratio": "sequence"},
    "reinforce": {"objective": "reinforce"},
    "weighted_kl": {"beta": 0.1, "kl_weighted": True},
    "off_policy": {"off_policy_threshold": 0.01},
    "rollout": {"rollout_correction": "sequence_truncate", "rollout_correction_cap": 1.2},
}
SPLITS = {
    "1 x 8": [8],
    "2 x 4": [4, 4],
    "8 x 1": [1] * 8,
    "uneven": [3, 1, 4],
    "with an empty part": [4, 0, 4],
}


def batch(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(N, T, generator=generator)

    old = -torch.rand(N, T, generator=generator) * 2 - 0.1
    return {
        "logprobs": old + normal(0.3),
        "old_logprobs": old,
        "advantages": torch.randn(N, generator=generator),
        "completion_mask": torch.arange(T) < torch.tensor(LENGTHS)[:, None],
        "ref_logprobs": old + normal(0.2),
        "entropy": torch.rand(N, T, generator=generator),
        "rollout_logprobs": old + normal(0.1),
    }


def weights_of(mask: Tensor, config: LossConfig) -> Tensor:
    return config.token_weights(mask, GROUP_IDS[: len(mask)], max_completion_length=T)


def run(
    tensors: dict[str, Tensor], weights: Tensor, config: LossConfig, split: list[int]
) -> tuple[Tensor, list[LossOutput]]:
    logprobs = tensors["logprobs"].clone().requires_grad_()
    outputs = []
    start = 0
    for size in split:
        rows = slice(start, start + size)
        part = {name: tensor[rows] for name, tensor in tensors.items()} | {"logprobs": logprobs[rows]}
        output = grpo_loss(**part, weights=weights[rows], config=config)
        output.loss.backward()
        outputs.append(output)
        start += size
    assert logprobs.grad is not None
    return logprobs.grad, outputs


@pytest.mark.parametrize("split", list(SPLITS))
@pytest.mark.parametrize("reduction", list(REDUCTIONS))
@pytest.mark.parametrize("name", list(CONFIGS))
def test_splits_change_neither_gradient_nor_loss_nor_metrics(name: str, reduction: str, split: str) -> None:
    """Losses averaged per micro-batch weigh rows by their company (trl#3021, trl#5619, ms-swift#10117)."""
    config = LossConfig(reduction=reduction, **REDUCTIONS[reduction], **CONFIGS[name])
    tensors = batch()
    weights = weights_of(tensors["completion_mask"], config)
    whole_gradient, whole = run(tensors, weights, config, [N])
    gradient, parts = run(tensors, weights, config, SPLITS[split])
    assert torch.equal(gradient, whole_gradient)
    assert whole_gradient.abs().max() > 1e-3
    expected = merge_metrics(whole)
    got = merge_metrics(parts)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, rel=1e-6, abs=1e-9), key
    assert expected["token_count"] == sum(LENGTHS)
    assert expected["row_count"] == N - 1


def test_metrics_are_not_means_of_means() -> None:
    """A micro-batch of one token must not count as much as one of nine (trl#3217)."""
    tensors = batch()
    config = LossConfig()
    _, parts = run(tensors, weights_of(tensors["completion_mask"], config), config, [1] * N)
    mean_of_means = sum(float(part.metrics["ratio_mean"]) for part in parts) / N
    assert merge_metrics(parts)["ratio_mean"] != pytest.approx(mean_of_means, rel=1e-3)


def test_token_mean_of_a_window_is_over_the_tokens_of_the_window() -> None:
    """Two micro-batches of 1 and 9 tokens: each token weighs 1/10, not 1/2 and 1/18 (open-instruct#1161)."""
    mask = torch.arange(9) < torch.tensor([1, 9])[:, None]
    config = LossConfig(reduction="token_mean", objective="reinforce")
    logprobs = torch.full((2, 9), -1.0, requires_grad=True)
    weights = config.token_weights(mask, torch.tensor([0, 1]))
    for row in (slice(0, 1), slice(1, 2)):
        arguments = (logprobs[row], logprobs[row].detach(), torch.ones(1), weights[row], mask[row])
        grpo_loss(*arguments, config=config).loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.where(mask, -0.1, 0.0))


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_masked_tokens_get_exactly_zero_gradient_whatever_they_hold(name: str, garbage: float) -> None:
    config = LossConfig(**CONFIGS[name])
    clean = batch()
    mask = clean["completion_mask"]
    weights = weights_of(mask, config)
    dirty = {
        key: torch.where(mask, tensor, garbage) if tensor.shape == mask.shape and key != "completion_mask" else tensor
        for key, tensor in clean.items()
    }
    expected, clean_outputs = run(clean, weights, config, [N])
    gradient, outputs = run(dirty, torch.where(mask, weights, garbage), config, [N])
    assert torch.equal(gradient, expected)
    assert torch.equal(gradient[~mask], torch.zeros(int((~mask).sum())))
    assert merge_metrics(outputs) == merge_metrics(clean_outputs)


def test_the_entropy_of_masked_tokens_gets_exactly_zero_gradient() -> None:
    tensors = batch()
    mask = tensors["completion_mask"]
    config = LossConfig(entropy_coef=0.5)
    weights = weights_of(mask, config)
    entropy = torch.where(mask, tensors["entropy"], float("nan")).requires_grad_()
    grpo_loss(**(tensors | {"entropy": entropy}), weights=weights, config=config).loss.backward()
    assert entropy.grad is not None
    torch.testing.assert_close(entropy.grad, -0.5 * weights)
    assert torch.equal(entropy.grad[~mask], torch.zeros(int((~mask).sum())))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_dropped_row_is_as_if_it_had_never_been_sampled(name: str) -> None:
    """A truncated row must leave the numerator, the denominator and the metrics."""
    config = LossConfig(**CONFIGS[name])
    tensors = batch()
    dropped = tensors | {"completion_mask": tensors["completion_mask"].clone()}
    dropped["completion_mask"][1] = False
    others = [0, *range(2, N)]
    without = {key: tensor[others] for key, tensor in tensors.items()}
    gradient, outputs = run(dropped, weights_of(dropped["completion_mask"], config), config, [N])
    weights = config.token_weights(without["completion_mask"], GROUP_IDS[others], max_completion_length=T)
    expected, expected_outputs = run(without, weights, config, [N - 1])
    assert torch.equal(gradient[others], expected)
    assert torch.equal(gradient[1], torch.zeros(T))
    got, wanted = merge_metrics(outputs), merge_metrics(expected_outputs)
    assert got == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_nothing_left_gives_loss_zero_with_a_graph(name: str) -> None:
    tensors = batch()
    tensors["completion_mask"] = torch.zeros_like(tensors["completion_mask"])
    config = LossConfig(**CONFIGS[name])
    gradient, outputs = run(tensors, weights_of(tensors["completion_mask"], config), config, [N])
    assert float(outputs[0].loss.detach()) == 0
    assert torch.equal(gradient, torch.zeros(N, T))
    assert all(value == 0 for value in merge_metrics(outputs).values())


def test_no_rows_at_all() -> None:
    tensors = {name: tensor[:0] for name, tensor in batch().items()}
    config = LossConfig(beta=0.1)
    gradient, outputs = run(tensors, torch.zeros(0, T), config, [0])
    assert gradient.shape == (0, T)
    assert merge_metrics(outputs)["loss"] == 0


def test_flat_groups_push_no_policy_gradient_but_still_feel_the_reference() -> None:
    """trl#5597 asks which; here the KL acts on every counted token."""
    tensors = batch()
    mask = tensors["completion_mask"]
    tensors["advantages"] = group_advantages(torch.full((N,), 0.35), GROUP_IDS)
    assert torch.equal(tensors["advantages"], torch.zeros(N))
    without_kl = LossConfig()
    weights = weights_of(mask, without_kl)
    gradient, _ = run(tensors, weights, without_kl, [N])
    assert torch.equal(gradient, torch.zeros(N, T))
    gradient, _ = run(tensors, weights, LossConfig(beta=0.1), [N])
    expected = -0.1 * weights * torch.expm1(tensors["ref_logprobs"] - tensors["logprobs"])
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("rewards", "flat"), [([0.35] * 8, True), ([0.0] + [0.95] * 7, False), ([0.1] * 7 + [0.1], True)]
)
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_no_variation_is_decided_by_equality(rewards: list[float], flat: bool, leave_one_out: bool) -> None:
    """A leave-one-out spread in float32 made 4000-fold advantages of rounding (NeMo-RL#4158)."""
    got = group_advantages(torch.tensor(rewards), torch.zeros(8, dtype=torch.long), leave_one_out=leave_one_out)
    if flat:
        assert torch.equal(got, torch.zeros(8))
    else:
        assert 2 < got.abs().max() < 3.1
        assert abs(float(got.double().sum())) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("difference", [100.0, -100.0])
def test_reference_kl_of_a_huge_log_ratio_is_finite(dtype: torch.dtype, difference: float) -> None:
    """exp(100) overflows float32 (NeMo-RL#874, open-r1#704)."""
    logprobs = torch.full((1, 2), -0.5 if difference < 0 else -100.5, dtype=dtype, requires_grad=True)
    ref = (logprobs.detach().float() + difference).to(dtype)
    mask = torch.ones(1, 2, dtype=torch.bool)
    output = grpo_loss(
        logprobs,
        logprobs.detach(),
        torch.tensor([1.0]),
        token_weights(mask, torch.zeros(1, dtype=torch.long)),
        mask,
        ref_logprobs=ref,
        config=LossConfig(beta=1e-6),
    )
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert torch.isfinite(output.loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad.dtype == dtype


def test_a_non_finite_logprob_is_counted_and_merging_keeps_it() -> None:
    """A logger that replaces NaN by a running mean hides it (trl#6702): this number is finite itself."""
    tensors = batch()
    tensors["logprobs"][1, 2] = float("nan")
    tensors["old_logprobs"][3, 0] = float("-inf")
    config = LossConfig()
    _, parts = run(tensors, weights_of(tensors["completion_mask"], config), config, [1] * N)
    assert merge_metrics(parts)["nonfinite_count"] == 2
    assert not torch.isfinite(parts[1].loss)
    assert torch.isfinite(parts[0].loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_pass_on_its_own_logprobs_has_ratio_exactly_one(dtype: torch.dtype) -> None:
    """Old log-probs from another batch shape leave [0.9, 1.1] in bf16 (verl#6280); detached ones can't."""
    tensors = batch()
    logprobs = tensors["logprobs"].to(dtype).requires_grad_()
    mask = tensors["completion_mask"]
    config = LossConfig(epsilon_low=0.0, epsilon_high=0.0)
    weights = weights_of(mask, config)
    output = grpo_loss(logprobs, logprobs.detach(), tensors["advantages"], weights, mask, config=config)
    output.loss.backward()
    metrics = merge_metrics([output])
    assert (metrics["ratio_mean"], metrics["ratio_max"]) == (1.0, 1.0)
    assert (metrics["clip_fraction"], metrics["approx_kl"]) == (0.0, 0.0)
    assert logprobs.grad is not None
    expected = (-weights * tensors["advantages"][:, None]).to(dtype)
    torch.testing.assert_close(logprobs.grad, expected, rtol=0, atol=0)


def test_kl_is_in_the_loss_and_named_so() -> None:
    tensors = batch()
    config = LossConfig(beta=0.1)
    _, outputs = run(tensors, weights_of(tensors["completion_mask"], config), config, [N])
    metrics = merge_metrics(outputs)
    assert metrics["kl_loss"] > 0
    assert metrics["loss"] == pytest.approx(metrics["policy_loss"] + metrics["kl_loss"], rel=1e-6)
    assert "ref_kl" not in merge_metrics(
        run(tensors, weights_of(tensors["completion_mask"], config), LossConfig(), [N])[1]
    )


def test_a_huge_ratio_does_not_make_infinite_metrics() -> None:
    logprobs = torch.zeros(1, 1)
    mask = torch.ones(1, 1, dtype=torch.bool)
    output = grpo_loss(logprobs, logprobs - 200, torch.tensor([1.0]), torch.ones(1, 1), mask)
    assert all(math.isfinite(value) for value in merge_metrics([output]).values())
    assert float(output.loss) == pytest.approx(-1.2)


def test_merging_nothing() -> None:
    assert merge_metrics([]) == {}
