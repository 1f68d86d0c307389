"""Semantic entropy of sampled answers, and the easy-to-hard order of SENT (2512.04359)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from grpo_lit.rewards import default_pool

Same = Callable[[str, str], bool]


def semantic_entropy(answers: Sequence[str | None], *, same: Same | None = None) -> float:
    """Entropy of the final answers' clusters: H = -sum_c p_c ln p_c with p_c the share of cluster c, in nats.

    Answers are clustered by the verifier's notion of equality, each against the first answer of a cluster. One that is
    missing forms a cluster of its own, so that a prompt nobody can answer counts as hard.

    Args:
        answers: final answers of M samples to one question; None where there was none.
        same: whether two answers are equal; the math verifier by default.

    Returns:
        0 where all agree, ln M where no two do; 0 for no answers at all.

    >>> round(semantic_entropy(["1/2", "0.5", r"\\frac{1}{2}", "3"]), 4)
    0.5623
    """
    equal = same or default_pool().same
    firsts: list[str | None] = []
    counts: list[int] = []
    for answer in answers:
        known = answer if answer is not None and answer.strip() else None
        index = next(
            (i for i, first in enumerate(firsts) if known is not None and first is not None and equal(first, known)),
            len(firsts),
        )
        if index == len(firsts):
            firsts.append(known)
            counts.append(0)
        counts[index] += 1
    total = sum(counts)
    return math.fsum(-count / total * math.log(count / total) for count in counts) if len(counts) > 1 else 0.0


def sent_order(semantic_entropies: Sequence[float]) -> list[int]:
    """Indices from low entropy (easy) to high; ties keep the dataset's order, NaN comes last.

    >>> sent_order([0.7, 0.0, float("nan"), 0.7, 0.2])
    [1, 4, 0, 3, 2]
    """
    values = [float(value) for value in semantic_entropies]
    return sorted(range(len(values)), key=lambda index: (math.isnan(values[index]), values[index]))
