"""Token weights: each reduction by hand, rows that don't count, global totals, and length shaping."""

from __future__ import annotations

import pytest
import torch

from grpo_lit.errors import UserError
from grpo_lit.loss import length_penalty, soft_overlong_penalty, token_weights

# lengths 3, 1, 0, 2
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0]], dtype=torch.bool)
IDS = torch.tensor([0, 0, 1, 1])
LENGTHS = [3, 1, 0, 2]
OPTIONS = {
    "sequence_mean": {},
    "token_mean": {},
    "alpha": {"alpha": 0.5},
    "fixed_length": {"max_completion_length": 4},
}


def row_weights(reduction: str, **options: object) -> list[float]:
    weights = token_weights(MASK, IDS, reduction=reduction, **options)
    assert weights.dtype == torch.float32
    assert weights.shape == MASK.shape
    assert torch.equal(weights[~MASK], torch.zeros(int((~MASK).sum())))
    for row, length in enumerate(LENGTHS):
        assert len(set(weights[row][MASK[row]].tolist())) == (1 if length else 0)
    return weights.max(dim=1).values.tolist()


def test_sequence_mean_by_hand() -> None:
    assert row_weights("sequence_mean") == pytest.approx([1 / 9, 1 / 3, 0, 1 / 6], rel=1e-7)


def test_token_mean_by_hand() -> None:
    assert row_weights("token_mean") == pytest.approx([1 / 6, 1 / 6, 0, 1 / 6], rel=1e-7)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
def test_alpha_by_hand(alpha: float) -> None:
    expected = [length ** (alpha - 1) / 3 if length else 0 for length in LENGTHS]
    assert row_weights("alpha", alpha=alpha) == pytest.approx(expected, rel=1e-7)


def test_fixed_length_by_hand() -> None:
    expected = [1 / (3 * 4), 1 / (3 * 4), 0, 1 / (3 * 4)]
    assert row_weights("fixed_length", max_completion_length=4) == pytest.approx(expected, rel=1e-7)


def test_alpha_zero_is_sequence_mean() -> None:
    assert row_weights("alpha", alpha=0.0) == row_weights("sequence_mean")


def test_alpha_one_is_fixed_length_times_its_constant() -> None:
    fixed = row_weights("fixed_length", max_completion_length=4)
    assert row_weights("alpha", alpha=1.0) == pytest.approx([4 * weight for weight in fixed], rel=1e-7)


@pytest.mark.parametrize("reduction", list(OPTIONS))
def test_a_row_without_tokens_changes_nothing_for_the_others(reduction: str) -> None:
    kept = [0, 1, 3]
    without = token_weights(MASK[kept], IDS[kept], reduction=reduction, **OPTIONS[reduction])
    with_it = token_weights(MASK, IDS, reduction=reduction, **OPTIONS[reduction])
    assert torch.equal(with_it[kept], without)


@pytest.mark.parametrize("reduction", list(OPTIONS))
def test_global_totals_make_the_parts_equal_the_whole(reduction: str) -> None:
    """Three ranks with 1, 2 and 1 rows see only their own; rows and tokens of all are passed in."""
    whole = token_weights(MASK, IDS, reduction=reduction, **OPTIONS[reduction])
    parts = [
        token_weights(
            MASK[part],
            IDS[part],
            reduction=reduction,
            num_rows=3,
            num_tokens=torch.tensor(6),
            **OPTIONS[reduction],
        )
        for part in (slice(0, 1), slice(1, 3), slice(3, 4))
    ]
    assert torch.equal(torch.cat(parts), whole)
    alone = token_weights(MASK[:1], IDS[:1], reduction=reduction, **OPTIONS[reduction])
    assert not torch.allclose(alone, whole[:1])


@pytest.mark.parametrize("reduction", list(OPTIONS))
def test_nothing_counts(reduction: str) -> None:
    weights = token_weights(torch.zeros_like(MASK), IDS, reduction=reduction, **OPTIONS[reduction])
    assert torch.equal(weights, torch.zeros(MASK.shape))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reduction": "sum"}, "model.loss.reduction"),
        ({"reduction": "alpha"}, "model.loss.alpha"),
        ({"reduction": "alpha", "alpha": 1.5}, "model.loss.alpha"),
        ({"reduction": "alpha", "alpha": float("nan")}, "model.loss.alpha"),
        ({"reduction": "fixed_length"}, "max_completion_length"),
        ({"reduction": "fixed_length", "max_completion_length": 0}, "max_completion_length"),
        ({"num_rows": 2}, "num_rows"),
        ({"reduction": "token_mean", "num_tokens": 5}, "num_tokens"),
    ],
)
def test_bad_arguments_are_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(UserError) as caught:
        token_weights(MASK, IDS, **options)
    assert caught.value.argument == named


def test_mask_and_groups_must_match() -> None:
    with pytest.raises(UserError, match="shapes"):
        token_weights(MASK, IDS[:2])


def test_a_row_that_counts_nowhere_is_out_of_the_denominator() -> None:
    mask = MASK & torch.tensor([False, True, True, True])[:, None]
    assert mask.sum(dim=1).tolist() == [0, 1, 0, 2]
    assert token_weights(mask, IDS).max(dim=1).values.tolist() == pytest.approx([0, 1 / 2, 0, 1 / 4])


def test_soft_overlong_penalty_of_the_dapo_settings() -> None:
    lengths = torch.tensor([1, 16384, 16385, 18432, 20480, 20481, 30000])
    got = soft_overlong_penalty(lengths, max_length=20480, cache=4096)
    assert got.tolist() == pytest.approx([0, 0, -1 / 4096, -0.5, -1, -1, -1], rel=1e-7)
    assert got.dtype == torch.float32


@pytest.mark.parametrize("cache", [0, -1, 101])
def test_soft_overlong_cache_out_of_range(cache: int) -> None:
    with pytest.raises(UserError, match="overlong_cache"):
        soft_overlong_penalty(torch.tensor([1]), max_length=100, cache=cache)


def test_length_penalty() -> None:
    got = length_penalty(torch.tensor([1.0, 0.0]), torch.tensor([100, 768]), coef=0.001)
    assert got.tolist() == pytest.approx([0.9, -0.768], rel=1e-6)
    with pytest.raises(UserError, match="length_penalty"):
        length_penalty(torch.tensor([1.0]), torch.tensor([1]), coef=-0.1)
