"""How long verdicts take: quantiles and a histogram, as metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil

BINS_MS = {"le_100us": 0.1, "le_1ms": 1.0, "le_10ms": 10.0, "le_100ms": 100.0, "le_1s": 1000.0}
"""Bins of the histogram with their upper bounds, inclusive; ``more`` holds the rest."""


def latency_histogram(latencies_s: Sequence[float], prefix: str = "verify") -> dict[str, float]:
    """Metrics of verdict times: median, 95 % and maximum in milliseconds, and verdicts per bin.

    Args:
        latencies_s: seconds of each verdict, all ranks.
        prefix: in front of each name.

    >>> latency_histogram([0.0002, 0.0005, 0.2])["verify_ms_p50"]
    0.5
    >>> latency_histogram([0.0002, 0.0005, 0.2])["verify_count_le_1ms"]
    2.0
    """
    if not latencies_s:
        return {}
    ordered = sorted(1000 * latency for latency in latencies_s)
    metrics = {
        f"{prefix}_ms_p{quantile}": ordered[max(ceil(quantile / 100 * len(ordered)) - 1, 0)] for quantile in (50, 95)
    }
    metrics[f"{prefix}_ms_max"] = ordered[-1]
    bounds = list(BINS_MS.values())
    counts = [0] * (len(bounds) + 1)
    for latency in ordered:
        counts[bisect_left(bounds, latency)] += 1
    for name, count in zip([*BINS_MS, "more"], counts, strict=True):
        metrics[f"{prefix}_count_{name}"] = float(count)
    return metrics
