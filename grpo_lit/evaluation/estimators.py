r"""Scores of one problem from n samples of it: pass@k, maj@k and avg@k, all exact.

Each is the expectation over the :math:`\binom{n}{k}` ways to pick k of the n samples, so no score depends on the
order in which samples happened to be drawn, and none needs a random number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    r"""Probability that at least one of k samples is right, unbiased (2107.03374, equation 1).

    :math:`1 - \binom{n-c}{k} / \binom{n}{k} = 1 - \prod_{i=n-c+1}^{n} (1 - k/i)`, the second form because the
    binomials overflow. "Any of the first k" has the same mean over problems drawn anew, but a larger variance.

    Args:
        num_samples: n, at least k.
        num_correct: c of them are right.
        k: size of the draw, without replacement.

    Raises:
        ValueError: k is not from 1 to n, or c not from 0 to n.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}: accepted is a whole number from 1 to the {num_samples} samples")
    if not 0 <= num_correct <= num_samples:
        raise ValueError(f"num_correct={num_correct}: accepted is a whole number from 0 to {num_samples}")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def maj_at_k(classes: Sequence[int | None], right: Collection[int], k: int) -> float:
    """Probability that the most frequent answer among k samples is right; ties share the credit.

    A sample votes for the equivalence class of its answer; one without a readable answer does not vote. Where j
    classes tie for the most votes and i of them are right, the credit is i / j. Where nobody votes it is 0.

    The mean over all choices of k of the n samples is exact: for each number t of winning votes, a polynomial in the
    number of samples chosen counts the choices by how many classes reach t, and none may exceed it.

    Args:
        classes: (n) class of each sample's answer, None where it does not vote.
        right: the classes that equal the gold answer.
        k: size of the draw, without replacement.

    Raises:
        ValueError: k is not from 1 to n.

    >>> maj_at_k([0, 0, 1], {0}, 3), maj_at_k([0, 1, None], {0}, 3)
    (1.0, 0.5)
    """
    num_samples = len(classes)
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}: accepted is a whole number from 1 to the {num_samples} samples")
    sizes = Counter(group for group in classes if group is not None)
    voteless = num_samples - sum(sizes.values())
    if not any(group in right for group in sizes):
        return 0.0
    credit = sum(
        ways * tied_right / tied
        for votes in range(1, min(k, max(sizes.values())) + 1)
        for (tied, tied_right), ways in _choices(sizes, right, voteless, votes, k).items()
        if tied
    )
    return credit / math.comb(num_samples, k)


def _choices(
    sizes: Counter[int], right: Collection[int], voteless: int, votes: int, k: int
) -> dict[tuple[int, int], int]:
    """Choices of k samples in which no class has more than `votes`, by (classes that reach it, right ones of them)."""
    # (chosen, tied, tied and right) -> number of choices
    states: dict[tuple[int, int, int], int] = {
        (count, 0, 0): math.comb(voteless, count) for count in range(min(voteless, k) + 1)
    }
    for group, size in sizes.items():
        following: dict[tuple[int, int, int], int] = {}
        for (chosen, tied, tied_right), ways in states.items():
            for count in range(min(size, votes, k - chosen) + 1):
                reaches = int(count == votes)
                key = (chosen + count, tied + reaches, tied_right + reaches * (group in right))
                following[key] = following.get(key, 0) + ways * math.comb(size, count)
        states = following
    return {(tied, tied_right): ways for (chosen, tied, tied_right), ways in states.items() if chosen == k}


def avg_at_k(correct: Sequence[bool], k: int) -> float:
    """Mean accuracy over k samples; over all choices of k of the n that is the mean of all n.

    Raises:
        ValueError: k is not from 1 to n.

    >>> avg_at_k([True, False, False, False], 2)
    0.25
    """
    if not 1 <= k <= len(correct):
        raise ValueError(f"k={k}: accepted is a whole number from 1 to the {len(correct)} samples")
    return sum(map(bool, correct)) / len(correct)
