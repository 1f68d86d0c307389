"""Whether a candidate beats the incumbent: comparable first, then faster beyond the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lit.tune.trial import Measurement


@dataclass(frozen=True)
class Decision:
    """The outcome of a comparison."""

    accepted: bool
    reason: str
    gain: float | None = None
    """Candidate's over incumbent's tokens per second, minus 1; the median over alternating pairs."""
    noise: float | None = None
    """Largest deviation of a run from the median of its own configuration, as a share."""


def comparable(incumbent: Measurement, candidate: Measurement, tolerance: float) -> str | None:
    """Why two runs can't be compared; None if they can.

    Same effective batch means: as many completions in every step, none lost. Equal loss is asked of the first step,
    where both still have the same weights and, up to rounding, the same completions: loss and reward within
    `tolerance`, gradient norm within 20 times that as a share (it sums more rounding).
    """
    if candidate.status != "ok":
        return f"{candidate.status}: {candidate.error or 'memory ran out and the step was repeated'}"
    if incumbent.status != "ok":
        return f"the incumbent's run failed ({incumbent.error})"
    if candidate.rows != incumbent.rows:
        return f"other rows per step: {candidate.rows} instead of {incumbent.rows}"
    for name, scale in (("loss", None), ("reward", None), ("grad_norm", 20.0)):
        ours, theirs = getattr(candidate, name)[0], getattr(incumbent, name)[0]
        allowed = tolerance if scale is None else tolerance * scale * max(abs(theirs), 1e-12)
        if not (math.isfinite(ours) and abs(ours - theirs) <= allowed):
            return f"other {name} in the first step: {ours:.6g} instead of {theirs:.6g}"
    return None


def decide(
    incumbent: Sequence[Measurement], candidate: Sequence[Measurement], *, tolerance: float, min_gain: float
) -> Decision:
    """Judge runs that were taken in alternating order.

    The candidate wins if it is comparable in every pair, faster in every pair, and its median gain exceeds both
    `min_gain` and the noise: how far single runs of one configuration lie from their own median.
    """
    for one, other in zip(incumbent, candidate, strict=False):
        if (reason := comparable(one, other, tolerance)) is not None:
            return Decision(False, f"not comparable: {reason}")
    pairs = [
        (other.tokens_per_s or 0.0) / (one.tokens_per_s or math.inf)
        for one, other in zip(incumbent, candidate, strict=True)
    ]
    gain = statistics.median(pairs) - 1
    noise = max(_noise(incumbent), _noise(candidate))
    needed = max(min_gain, noise)
    if gain > needed and min(pairs) > 1:
        return Decision(True, f"{gain:+.1%} tokens/s, noise {noise:.1%}", gain, noise)
    if gain > needed:
        reason = f"{gain:+.1%} tokens/s, but slower in one of {len(pairs)} pairs ({min(pairs) - 1:+.1%})"
        return Decision(False, reason, gain, noise)
    return Decision(False, f"{gain:+.1%} tokens/s is not above the noise ({needed:.1%})", gain, noise)


def _noise(runs: Sequence[Measurement]) -> float:
    speeds = [run.tokens_per_s or 0.0 for run in runs]
    centre = statistics.median(speeds)
    return max(abs(speed / centre - 1) for speed in speeds) if centre else math.inf
