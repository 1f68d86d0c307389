from __future__ import annotations

import numpy as np
import pytest
import torch

from grpo_lit.errors import UserError
from grpo_lit.rollout import RolloutConfig, SamplingConfig, SeededSampler, row_keys, sample_tokens, uniforms


def test_uniforms_depend_on_the_row_s_key_alone() -> None:
    keys = row_keys(42, 7, [3, 3, 9], [0, 1, 0])
    table = uniforms(keys, 16)
    assert torch.equal(uniforms(keys[1:2], 16)[0], table[1])
    assert torch.equal(uniforms(keys, 5), table[:, :5])
    assert len({tuple(row) for row in table.tolist()}) == 3
    for other in (
        row_keys(43, 7, [3], [0]),
        row_keys(42, 8, [3], [0]),
        row_keys(42, 7, [4], [0]),
        row_keys(42, 7, [3], [2]),
        row_keys(42, 7, [3], [0], "val"),
    ):
        assert not torch.equal(uniforms(other, 16)[0], table[0])


def test_uniforms_are_uniform() -> None:
    values = uniforms(row_keys(0, 0, list(range(200)), [0] * 200), 100).flatten()
    counts = torch.histc(values, bins=20, min=0, max=1)
    chi_square = float(((counts - 1000) ** 2 / 1000).sum())
    assert chi_square < 43.8  # 99.9 % quantile with 19 degrees of freedom
    assert values.min() >= 0
    assert values.max() < 1


def test_sample_tokens_follows_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.0, 0.2, 0.05, 0.25])
    draws = 20_000
    uniform = uniforms(row_keys(1, 1, list(range(draws)), [0] * draws), 1)[:, 0]
    tokens = sample_tokens(probabilities.log().expand(draws, -1), uniform)
    counts = torch.bincount(tokens, minlength=5).double()
    assert counts[1] == 0
    kept = probabilities > 0
    expected = probabilities[kept].double() * draws
    assert float(((counts[kept] - expected) ** 2 / expected).sum()) < 16.3  # 99.9 %, 3 degrees of freedom


@pytest.mark.parametrize("uniform", [0.0, 0.5, np.nextafter(1.0, 0.0)])
def test_excluded_tokens_are_never_drawn_at_the_edges(uniform: float) -> None:
    logprobs = torch.tensor([[-torch.inf, 0.5, 0.5, -torch.inf]]).log_softmax(-1)
    token = int(sample_tokens(logprobs, torch.tensor([uniform], dtype=torch.float64)))
    assert token in (1, 2)


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.5}, {0, 1}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_truncation_keeps_and_renormalises(options: dict[str, float], allowed: set[int]) -> None:
    probabilities = torch.tensor([0.45, 0.35, 0.15, 0.05])
    rows = 4000
    sampler = SeededSampler(uniforms(row_keys(3, 0, list(range(rows)), [0] * rows), 1), 1, **options)  # type: ignore[arg-type]
    scores = sampler(torch.zeros(rows, 1, dtype=torch.long), probabilities.log().expand(rows, -1))
    chosen = scores.argmax(-1)
    assert set(chosen.tolist()) == allowed
    kept = probabilities[: len(allowed)] / probabilities[: len(allowed)].sum()
    assert torch.allclose(sampler.logprobs[0], kept.log()[chosen], atol=1e-5)


def test_temperature_divides_and_zero_is_greedy_with_untempered_logprobs() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    ids = torch.zeros(1, 1, dtype=torch.long)
    sampler = SeededSampler(torch.tensor([[0.99999]], dtype=torch.float64), 1, temperature=0.5)
    assert int(sampler(ids, logits).argmax()) == 2
    assert torch.allclose(sampler.logprobs[0], (logits / 0.5).log_softmax(-1)[0, 2])
    greedy = SeededSampler(torch.tensor([[0.99999]], dtype=torch.float64), 1, temperature=0.0)
    assert int(greedy(ids, logits).argmax()) == 0
    assert torch.allclose(greedy.logprobs[0], logits.log_softmax(-1)[0, 0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 50),
        ("min_p", 0.1),
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("max_completion_length", 0),
    ],
)
def test_training_refuses_what_scoring_cannot_follow(field: str, value: float) -> None:
    with pytest.raises(UserError, match=f"model.rollout.sampling.{field}"):
        RolloutConfig(sampling=SamplingConfig(**{field: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(("field", "value"), [("group_size", 1), ("batch_size", 0)])
def test_rollout_config_refuses(field: str, value: int) -> None:
    with pytest.raises(UserError, match=f"model.rollout.{field}={value}"):
        RolloutConfig(**{field: value})  # type: ignore[arg-type]
