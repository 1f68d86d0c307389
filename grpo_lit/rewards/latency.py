"""How long verdicts take: quantiles and a histogram, as metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil

BOUNDS_MS = (0.1, 1.0, 10.0, 100.0, 1000.0)
"""Upper bounds of the histogram's bins, inclusive; the last bin has none."""


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
    counts = [0] * (len(BOUNDS_MS) + 1)
    for latency in ordered:
        counts[bisect_left(BOUNDS_MS, latency)] += 1
    for bound, count in zip([f"le_{bound:g}ms" for bound in BOUNDS_MS] + ["more"], counts, strict=True):
        metrics[f"{prefix}_count_{bound}"] = float(count)
    return metrics
