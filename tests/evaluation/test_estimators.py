"""pass@k, maj@k and intervals against hand-worked cases, enumeration, simulation and scipy."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from grpo_lit.errors import UserError
from grpo_lit.evaluation.estimators import avg_at_k, maj_at_k, pass_at_k
from grpo_lit.evaluation.intervals import (
    cluster_bootstrap,
    compare_paired,
    mcnemar_exact,
    paired_bootstrap,
    wilson_interval,
)
from grpo_lit.evaluation.metrics import evaluation_metrics
from grpo_lit.evaluation.summary import macro_interval, mean_interval


def vote(classes: tuple[int | None, ...], right: set[int]) -> float:
    """Credit of one vote, straight from its definition."""
    counts = Counter(group for group in classes if group is not None)
    if not counts:
        return 0.0
    winners = [group for group, votes in counts.items() if votes == max(counts.values())]
    return sum(group in right for group in winners) / len(winners)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(4, 1, 2, 0.5), (4, 2, 2, 5 / 6), (5, 0, 3, 0.0), (5, 3, 3, 1.0), (10, 3, 1, 0.3), (1, 1, 1, 1.0)],
)
def test_pass_at_k_by_hand(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("n", [1, 5, 9])
def test_pass_at_k_is_the_mean_over_all_draws(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)
    assert pass_at_k(100_000, 7, 100) == pytest.approx(1 - math.comb(99_993, 100) / math.comb(100_000, 100))


@pytest.mark.parametrize(
    ("classes", "right", "k", "expected"),
    [
        ((0, 0, 1), {0}, 3, 1.0),
        ((0, 1, None), {0}, 3, 0.5),  # a tie of two is split
        ((0, 1, 2, None), {0}, 4, 1 / 3),
        ((0, 0, 1), {0}, 2, (1 + 0.5 + 0.5) / 3),
        ((None, None), {0}, 2, 0.0),
        ((1, 1, 0), {0}, 3, 0.0),
        ((0, None, None, None), {0}, 4, 1.0),  # unreadable answers don't vote
    ],
)
def test_maj_at_k_by_hand(classes: tuple[int | None, ...], right: set[int], k: int, expected: float) -> None:
    assert maj_at_k(classes, right, k) == pytest.approx(expected, abs=1e-12)


def test_maj_at_k_is_the_mean_over_all_draws() -> None:
    generator = np.random.default_rng(0)
    for _ in range(60):
        n = int(generator.integers(1, 10))
        classes = tuple(None if x == 4 else int(x) for x in generator.integers(0, 5, n))
        right = {0} if generator.random() < 0.7 else {0, 1}
        for k in range(1, n + 1):
            draws = list(itertools.combinations(classes, k))
            expected = sum(vote(draw, right) for draw in draws) / len(draws)
            assert maj_at_k(classes, right, k) == pytest.approx(expected, abs=1e-12), (classes, k)


def test_estimates_from_n_samples_are_unbiased() -> None:
    """Over many draws of n samples the estimates average to the truth of k fresh samples; "best of first k" too."""
    generator = np.random.default_rng(1)
    probabilities, n, k = [0.5, 0.3, 0.2], 6, 3  # answer 0 is right, 1 is wrong, 2 unreadable
    truth_pass, truth_maj = 1 - 0.5**k, 0.0
    for draw in itertools.product(range(3), repeat=k):
        weight = math.prod(probabilities[answer] for answer in draw)
        truth_maj += weight * vote(tuple(None if answer == 2 else answer for answer in draw), {0})
    samples = generator.choice(3, size=(4000, n), p=probabilities)
    passes = [pass_at_k(n, int((row == 0).sum()), k) for row in samples]
    votes = [maj_at_k([None if x == 2 else int(x) for x in row], {0}, k) for row in samples]
    for values, truth in ((passes, truth_pass), (votes, truth_maj)):
        assert abs(np.mean(values) - truth) < 4 * np.std(values) / math.sqrt(len(values))


@pytest.mark.parametrize("k", [0, 4])
def test_estimators_refuse_k_outside_the_samples(k: int) -> None:
    for call in (lambda: pass_at_k(3, 1, k), lambda: maj_at_k([0, 0, 1], {0}, k), lambda: avg_at_k([True] * 3, k)):
        with pytest.raises(ValueError, match=f"k={k}"):
            call()
    with pytest.raises(ValueError, match="num_correct"):
        pass_at_k(3, 4, 1)


@pytest.mark.parametrize(("right", "n"), [(0, 7), (7, 7), (3, 30), (155, 200), (1, 1)])
def test_wilson_equals_scipy(right: int, n: int) -> None:
    for confidence in (0.9, 0.95):
        expected = stats.binomtest(right, n).proportion_ci(confidence, method="wilson")
        assert wilson_interval(right, n, confidence)[1:] == pytest.approx((expected.low, expected.high), abs=1e-12)


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (1, 8), (5, 5), (30, 12), (0, 600), (700, 640)])
def test_mcnemar_equals_scipys_binomial_test(counts: tuple[int, int]) -> None:
    expected = stats.binomtest(counts[0], sum(counts), 0.5).pvalue if sum(counts) else 1.0
    assert mcnemar_exact(*counts) == pytest.approx(expected, rel=1e-9)


def test_bootstraps_equal_scipys_on_the_same_draws() -> None:
    generator = np.random.default_rng(5)
    first, second = generator.random(83), generator.random(83)
    ours = cluster_bootstrap(first, num_resamples=3000, seed=11)
    theirs = stats.bootstrap(
        (first,), np.mean, n_resamples=3000, method="percentile", rng=np.random.default_rng(11)
    ).confidence_interval
    assert ours == pytest.approx((first.mean(), theirs.low, theirs.high), abs=1e-12)
    pair = paired_bootstrap(first, second, num_resamples=3000, seed=11)
    paired = stats.bootstrap(
        (first, second),
        lambda a, b, axis=-1: np.mean(a, axis=axis) - np.mean(b, axis=axis),
        paired=True,
        n_resamples=3000,
        method="percentile",
        rng=np.random.default_rng(11),
    ).confidence_interval
    assert pair == pytest.approx(((first - second).mean(), paired.low, paired.high), abs=1e-12)
    assert pair.high - pair.low > 0.05


def test_bootstrap_draws_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).random(50)
    whole = cluster_bootstrap(values, num_resamples=999)
    monkeypatch.setattr("grpo_lit.evaluation.intervals._CHUNK_ELEMENTS", 50 * 7)
    assert cluster_bootstrap(values, num_resamples=999) == whole


def test_cluster_interval_is_of_problems_and_covers_the_truth() -> None:
    """Problems differ; intervals over problems cover, intervals over all samples as if independent would not."""
    generator = np.random.default_rng(3)
    covered = naive = 0
    for trial in range(300):
        rates = generator.beta(0.5, 0.5, 40)
        samples = generator.random((40, 16)) < rates[:, None]
        interval = cluster_bootstrap(samples.mean(axis=1), num_resamples=400, seed=trial)
        covered += interval.low <= 0.5 <= interval.high
        half = 1.96 * samples.std() / math.sqrt(samples.size)
        naive += abs(samples.mean() - 0.5) <= half
    assert 0.88 <= covered / 300 <= 0.98
    assert naive / 300 < 0.6


def test_compare_paired_counts_the_problems_on_which_two_models_differ() -> None:
    first, second = [True, True, True, False, True], [False, True, False, True, False]
    result = compare_paired([float(x) for x in first], [float(x) for x in second], first, second)
    assert (result.num_problems, result.only_first, result.only_second) == (5, 3, 1)
    assert result.difference == pytest.approx(0.4)
    assert result.p_value == pytest.approx(stats.binomtest(1, 4).pvalue)
    with pytest.raises(UserError, match="second"):
        paired_bootstrap([0.0, 1.0], [1.0])
    with pytest.raises(UserError, match="confidence"):
        cluster_bootstrap([0.0], confidence=1.0)
    with pytest.raises(UserError, match="values"):
        cluster_bootstrap([])


def test_metric_classes_of_three_problems_by_hand() -> None:
    metrics = evaluation_metrics(4)
    problems = [
        ([True, True, False, False], [0, 0, 1, 2], [5, 7, 9, 11]),
        ([False] * 4, [1, 1, None, None], [2, 2, 40, 40]),
        ([True] * 4, [0] * 4, [3, 3, 3, 3]),
    ]
    for correct, classes, lengths in problems:
        metrics.update(
            correct=correct,
            classes=classes,
            right_classes={0},
            formatted=[True, False, False, False],
            unparsable=[group is None for group in classes],
            truncated=[length == 40 for length in lengths],
            lengths=lengths,
        )
    got = {name: float(value) for name, value in metrics.compute().items()}
    assert got["pass@1"] == got["avg@4"] == pytest.approx(0.5)
    assert got["pass@2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert got["pass@4"] == pytest.approx(2 / 3)
    assert got["maj@4"] == pytest.approx(2 / 3)
    assert got["maj@2"] == pytest.approx((1 / 6 * 1 + 4 / 6 * 0.5 + 0 + 1) / 3)
    assert got["format_rate"] == pytest.approx(0.25)
    assert got["unparsable_rate"] == got["truncation_rate"] == pytest.approx(1 / 6)
    assert got["mean_length"] == pytest.approx((8 + 21 + 3) / 3)
    assert got["median_length"] == pytest.approx(4.0)
    assert got["tokens_per_correct"] == pytest.approx((32 + 84 + 12) / 6)
    assert metrics["pass@2"].per_problem().tolist() == pytest.approx([5 / 6, 0, 1])  # type: ignore[operator]
    assert all(value.dtype == torch.float64 for value in metrics.compute().values())
    assert evaluation_metrics(1).keys() == {
        *("pass@1", "format_rate", "unparsable_rate", "truncation_rate"),
        *("mean_length", "median_length", "tokens_per_correct"),
    }


def test_no_interval_is_a_point_where_all_problems_score_alike() -> None:
    """Beside Wilson's own at 0 and 1; the bound for others is worked out from his share of other problems."""
    share = wilson_interval(20, 20).low
    assert cluster_bootstrap([0.0] * 20) == pytest.approx((0.0, 0.0, 1 - share))
    assert cluster_bootstrap([0.5] * 20) == pytest.approx((0.5, 0.5 * share, 0.5 * share + 1 - share))
    assert paired_bootstrap([1.0] * 20, [1.0] * 20) == pytest.approx((0.0, share - 1, 1 - share))
    assert paired_bootstrap([1.0] * 20, [0.0] * 20) == pytest.approx((1.0, 2 * share - 1, 1.0))
    assert all(map(math.isnan, cluster_bootstrap([7.0] * 20)[1:]))


def test_mean_over_datasets_has_the_interval_of_independent_means() -> None:
    """8 of 10 is [0.490, 0.943], 20 of 20 is [0.839, 1]: worked out by hand from those."""
    eight, twenty = [1.0] * 8 + [0.0] * 2, [1.0] * 20
    assert macro_interval([eight, twenty], 0.95, 0) == pytest.approx((0.9, 0.7253857, 0.9716589), abs=1e-6)
    assert macro_interval([eight], 0.95, 0) == pytest.approx(mean_interval(eight, 0.95, 0))
    value, low, high = macro_interval([twenty, twenty], 0.95, 0)
    assert value == high == 1
    assert 0.85 < low < 0.9, "tighter than that of either, 0.839, and no point"
    generator = np.random.default_rng(0)
    sets = [generator.random(60), generator.random(40)]
    z = stats.norm.ppf(0.975)
    half = z * math.hypot(*(values.std(ddof=1) / math.sqrt(len(values)) for values in sets)) / 2
    mean = np.mean([values.mean() for values in sets])
    assert macro_interval([list(v) for v in sets], 0.95, 0) == pytest.approx((mean, mean - half, mean + half), abs=5e-3)
