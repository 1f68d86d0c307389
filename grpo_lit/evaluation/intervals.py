r"""How sure a score is: intervals over problems, and tests between two models on the same problems.

Samples of one problem resemble each other, so k samples of P problems are never kP observations: everything here
resamples or counts problems.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from grpo_lit.errors import UserError

NUM_RESAMPLES = 10_000
_CHUNK_ELEMENTS = 4_000_000


class Interval(NamedTuple):
    """A score with its confidence interval."""

    value: float
    low: float
    high: float


class PairedResult(NamedTuple):
    """Model A against model B on the same problems."""

    num_problems: int
    difference: float
    """Mean score of A minus mean score of B."""
    low: float
    high: float
    only_first: int
    """Problems that only A gets right on its first sample."""
    only_second: int
    """Problems that only B gets right on its first sample."""
    p_value: float
    """Exact McNemar, two-sided."""


def wilson_interval(num_right: int, num_problems: int, confidence: float = 0.95) -> Interval:
    r"""Interval of a share, from one sample per problem (Wilson 1927).

    With z the normal quantile: centre :math:`(p + z^2/2n) / (1 + z^2/n)`, half width
    :math:`z \sqrt{p(1-p)/n + z^2/4n^2} / (1 + z^2/n)`. Unlike p ± z·SE it stays in [0, 1] and is not empty at 0 of n.

    Raises:
        UserError: no problems, more right than there are, or a confidence that is no probability.

    >>> [round(x, 4) for x in wilson_interval(8, 10)]
    [0.8, 0.4902, 0.9433]
    """
    _check_confidence(confidence)
    if num_problems < 1 or not 0 <= num_right <= num_problems:
        raise UserError("num_right", f"{num_right} of {num_problems}", "0 to n right of at least one problem")
    z = _normal_quantile(0.5 + confidence / 2)
    share, shrink = num_right / num_problems, 1 + z * z / num_problems
    centre = (share + z * z / (2 * num_problems)) / shrink
    half = z * math.sqrt(share * (1 - share) / num_problems + z * z / (4 * num_problems**2)) / shrink
    low = 0.0 if num_right == 0 else max(0.0, centre - half)
    high = 1.0 if num_right == num_problems else min(1.0, centre + half)
    return Interval(share, low, high)


def cluster_bootstrap(
    values: Sequence[float], *, confidence: float = 0.95, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> Interval:
    """Percentile bootstrap of the mean over problems (Efron 1979); a problem is drawn with all its samples.

    Args:
        values: (P) score of each problem, such as its mean over samples.
        confidence: of the interval.
        num_resamples: draws of P problems with replacement.
        seed: of the draws; the same values and seed give the same interval.

    Returns:
        The interval; where all problems score alike, Wilson's bound on the share of others, NaN above 1 or below 0.

    Raises:
        UserError: no values, or a confidence that is no probability.
    """
    return _bootstrap(_as_scores(values, "values"), 0.0, confidence, num_resamples, seed)


def paired_bootstrap(
    first: Sequence[float],
    second: Sequence[float],
    *,
    confidence: float = 0.95,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap of the mean difference of two models on the same problems.

    Args:
        first: (P) score of each problem by model A.
        second: (P) score of the same problems, in the same order, by model B.

    Raises:
        UserError: different numbers of problems, or none.
    """
    one, other = _as_scores(first, "first"), _as_scores(second, "second")
    if len(one) != len(other):
        raise UserError("second", f"{len(other)} scores", f"one for each of the {len(one)} problems of the first")
    return _bootstrap(one - other, -1.0, confidence, num_resamples, seed)


def mcnemar_exact(only_first: int, only_second: int) -> float:
    r"""Two-sided p-value that two models are equally good, from the problems on which they differ (McNemar 1947).

    Under equality each of the b + c discordant problems falls to either side with probability 1/2, so
    :math:`p = \min(1, 2 \sum_{i \le \min(b,c)} \binom{b+c}{i} 2^{-(b+c)})`.

    >>> mcnemar_exact(1, 8)
    0.0390625
    """
    if min(only_first, only_second) < 0:
        raise UserError("only_first", (only_first, only_second), "counts of at least 0")
    total, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(total, i) for i in range(fewer + 1))
    return float(min(1.0, 2 * tail / 2**total)) if total else 1.0


def compare_paired(
    first: Sequence[float],
    second: Sequence[float],
    first_right: Sequence[bool],
    second_right: Sequence[bool],
    *,
    confidence: float = 0.95,
    seed: int = 0,
) -> PairedResult:
    """Difference with its interval, and McNemar on the first samples, of two models on the same problems."""
    interval = paired_bootstrap(first, second, confidence=confidence, seed=seed)
    only_first = sum(a and not b for a, b in zip(first_right, second_right, strict=True))
    only_second = sum(b and not a for a, b in zip(first_right, second_right, strict=True))
    return PairedResult(len(first), *interval, only_first, only_second, mcnemar_exact(only_first, only_second))


def _bootstrap(
    scores: NDArray[np.float64], lowest: float, confidence: float, num_resamples: int, seed: int
) -> Interval:
    """Percentile interval of the mean; `lowest` is the least that a score can be."""
    _check_confidence(confidence)
    if (scores == scores[0]).all():
        return _interval_of_equals(float(scores[0]), len(scores), confidence, lowest)
    means = _resampled_means(scores, num_resamples, seed)
    low, high = np.percentile(means, [50 * (1 - confidence), 50 * (1 + confidence)])
    return Interval(float(scores.mean()), float(low), float(high))


def _interval_of_equals(value: float, num_problems: int, confidence: float, lowest: float) -> Interval:
    """Where all problems score alike no resampling shows a spread, but further problems may score otherwise.

    Wilson's bound says how large their share can be, here 1 - l; at worst they score `lowest` or 1, so that the mean
    lies between l value + (1 - l) lowest and l value + (1 - l). Of scores beyond these bounds nothing is known: NaN.
    """
    if not lowest <= value <= 1:
        return Interval(value, math.nan, math.nan)
    share = wilson_interval(num_problems, num_problems, confidence).low
    low, high = share * value + (1 - share) * lowest, share * value + (1 - share)
    return Interval(value, min(low, value), max(high, value))


def _as_scores(values: Sequence[float], name: str) -> NDArray[np.float64]:
    scores = np.asarray(values, dtype=np.float64)
    if scores.ndim != 1 or not len(scores) or not np.isfinite(scores).all():
        raise UserError(name, f"{len(scores)} scores", "at least one finite score")
    return scores


def _resampled_means(scores: NDArray[np.float64], num_resamples: int, seed: int) -> NDArray[np.float64]:
    """(num_resamples,) means; drawn in chunks, which changes no draw and bounds the memory."""
    generator = np.random.default_rng(seed)
    rows = max(1, _CHUNK_ELEMENTS // len(scores))
    means = []
    for start in range(0, num_resamples, rows):
        count = min(rows, num_resamples - start)
        means.append(scores[generator.integers(0, len(scores), (count, len(scores)))].mean(axis=1))
    return np.concatenate(means)


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise UserError("confidence", confidence, "a number between 0 and 1")


def _normal_quantile(probability: float) -> float:
    from statistics import NormalDist

    return NormalDist().inv_cdf(probability)
