"""Semantic entropy of sampled answers, and the easy-to-hard order of SENT (2512.04359)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from grpo_lit.errors import UserError
from grpo_lit.rewards import default_pool

Same = Callable[[str, str], bool]


def cluster_answers(answers: Sequence[str | None], *, same: Same | None = None) -> list[int]:
    """Number of the cluster of each answer, counted from 0 in order of appearance.

    An answer joins the first cluster whose first answer it equals. One that is missing forms a cluster of its own, so
    that a prompt nobody can answer counts as hard.

    Args:
        answers: final answers of M samples to one question; None where there was none.
        same: whether two answers are equal; the math verifier by default.

    >>> cluster_answers(["1/2", None, "0.5", None, "3"])
    [0, 1, 0, 2, 3]
    """
    equal = same or default_pool().same
    firsts: list[str | None] = []
    clusters: list[int] = []
    for answer in answers:
        known = answer if answer is not None and answer.strip() else None
        index = next(
            (i for i, first in enumerate(firsts) if known is not None and first is not None and equal(first, known)),
            len(firsts),
        )
        if index == len(firsts):
            firsts.append(known)
        clusters.append(index)
    return clusters


def cluster_entropy(clusters: Sequence[int]) -> float:
    """H = -sum_c p_c ln p_c with p_c the share of cluster c, in nats; exactly equal for equal cluster sizes.

    >>> round(cluster_entropy([0, 0, 0, 1]), 4)
    0.5623
    """
    counts, total = Counter(clusters).values(), len(clusters)
    return math.fsum(-count / total * math.log(count / total) for count in counts) if len(counts) > 1 else 0.0


def semantic_entropy(answers: Sequence[str | None], *, same: Same | None = None) -> float:
    """Entropy of the final answers' clusters, see `cluster_answers` and `cluster_entropy`.

    Args:
        answers: final answers of M samples to one question; None where there was none.
        same: whether two answers are equal; the math verifier by default.

    Returns:
        0 where all agree, ln M where no two do; 0 for no answers at all.

    >>> round(semantic_entropy(["1/2", "0.5", r"\\frac{1}{2}", "3"]), 4)
    0.5623
    """
    return cluster_entropy(cluster_answers(answers, same=same))


def sent_order(semantic_entropies: Sequence[float], pass_rates: Sequence[float | None] | None = None) -> list[int]:
    """Indices from low entropy (easy) to high; NaN comes last.

    Ties go to the higher pass rate, then to the dataset's order. With M samples there are few different entropies, and
    one that is 0 may stand for a question that is always answered wrongly: the pass rate puts that one behind.

    >>> sent_order([0.7, 0.0, float("nan"), 0.7, 0.2])
    [1, 4, 0, 3, 2]
    >>> sent_order([0.7, 0.0, 0.0], [0.5, 0.0, 1.0])
    [2, 1, 0]
    """
    values = [float(value) for value in semantic_entropies]
    rates = [0.0] * len(values) if pass_rates is None else [-1.0 if rate is None else rate for rate in pass_rates]
    return sorted(range(len(values)), key=lambda i: (math.isnan(values[i]), values[i], -rates[i], i))


def stage_slice(num_prompts: int, num_stages: int, stage: int) -> range:
    """Positions of a stage in the sorted order: equal slices, of which the last takes the remainder as well.

    Args:
        num_prompts: prompts in all.
        num_stages: slices.
        stage: from 1.

    Raises:
        UserError: no such stage, or fewer prompts than stages.

    >>> [list(stage_slice(5, 2, stage)) for stage in (1, 2)]
    [[0, 1], [2, 3, 4]]
    """
    if not 1 <= num_stages <= num_prompts:
        raise UserError("data.sent_stages", num_stages, f"from 1 to the number of prompts, {num_prompts}")
    if not 1 <= stage <= num_stages:
        raise UserError("data.sent_stage", stage, f"from 1 to data.sent_stages={num_stages}")
    size = num_prompts // num_stages
    return range((stage - 1) * size, num_prompts if stage == num_stages else stage * size)
