"""Evaluation metrics as torchmetrics classes: one `update` per problem, per-problem values kept for the intervals."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from grpo_lit.evaluation.estimators import avg_at_k, maj_at_k, pass_at_k


class ProblemMean(Metric):
    """Mean over problems of a score that a subclass computes for each; NaN before the first."""

    full_state_update = False
    values: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("values", default=[], dist_reduce_fx="cat")

    def add(self, value: float) -> None:
        """Keep the score of one more problem."""
        self.values.append(torch.tensor([value], dtype=torch.float64, device=self.device))

    def per_problem(self) -> Tensor:
        """(P,) float64 score of each problem, in the order of the updates."""
        return dim_zero_cat(self.values) if len(self.values) else torch.zeros(0, dtype=torch.float64)

    def compute(self) -> Tensor:
        """Mean over problems, float64."""
        return self.per_problem().mean()


class ProblemMeanAtK(ProblemMean):
    """A score of k samples.

    Args:
        k: size of the draw; a problem needs at least as many samples.
    """

    def __init__(self, k: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.k = k


class PassAtK(ProblemMeanAtK):
    """`grpo_lit.evaluation.estimators.pass_at_k`, mean over problems."""

    def update(self, correct: Sequence[bool]) -> None:
        """Add a problem by the verdicts (n) of its samples."""
        self.add(pass_at_k(len(correct), sum(map(bool, correct)), self.k))


class MajAtK(ProblemMeanAtK):
    """`grpo_lit.evaluation.estimators.maj_at_k`, mean over problems."""

    def update(self, classes: Sequence[int | None], right_classes: Collection[int]) -> None:
        """Add a problem by the equivalence classes (n) of its samples' answers and those that are right."""
        self.add(maj_at_k(classes, right_classes, self.k))


class AvgAtK(ProblemMeanAtK):
    """Mean accuracy over k samples (avg@k; pass@1 from k samples), mean over problems."""

    def update(self, correct: Sequence[bool]) -> None:
        """Add a problem by the verdicts (n) of its samples."""
        self.add(avg_at_k(correct, self.k))


class FormatRate(ProblemMean):
    """Share of samples in the asked-for format, mean over problems."""

    def update(self, formatted: Sequence[bool]) -> None:
        """Add a problem by whether each of its samples (n) keeps the format."""
        self.add(avg_at_k(formatted, 1))


class UnparsableRate(ProblemMean):
    """Share of samples without a readable final answer, mean over problems."""

    def update(self, unparsable: Sequence[bool]) -> None:
        """Add a problem by whether each of its samples (n) had no readable answer."""
        self.add(avg_at_k(unparsable, 1))


class TruncationRate(ProblemMean):
    """Share of samples cut at the length limit, mean over problems."""

    def update(self, truncated: Sequence[bool]) -> None:
        """Add a problem by whether each of its samples (n) was cut."""
        self.add(avg_at_k(truncated, 1))


class MeanLength(ProblemMean):
    """Tokens per completion, EOS included, mean over problems."""

    def update(self, lengths: Sequence[int]) -> None:
        """Add a problem by the tokens of its samples (n)."""
        self.add(sum(lengths) / len(lengths))


class MedianLength(Metric):
    """Median number of tokens over all completions; NaN before the first."""

    full_state_update = False
    lengths: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("lengths", default=[], dist_reduce_fx="cat")

    def update(self, lengths: Sequence[int]) -> None:
        """Add the tokens of a problem's samples (n)."""
        self.lengths.append(torch.tensor(list(lengths), dtype=torch.float64, device=self.device))

    def compute(self) -> Tensor:
        """The median; the mean of the two middle ones where the number is even."""
        values = dim_zero_cat(self.lengths) if len(self.lengths) else torch.full((1,), torch.nan, dtype=torch.float64)
        return torch.quantile(values, 0.5)


class TokensPerCorrect(Metric):
    """Tokens spent on all completions for each right one; infinite where none is right."""

    full_state_update = False
    tokens: Tensor
    right: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("tokens", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("right", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, lengths: Sequence[int], correct: Sequence[bool]) -> None:
        """Add a problem by tokens and verdicts of its samples (n)."""
        self.tokens += sum(lengths)
        self.right += sum(map(bool, correct))

    def compute(self) -> Tensor:
        """Tokens over right answers, float64."""
        return self.tokens / self.right


def evaluation_metrics(
    num_samples: int, ks: Sequence[int] | None = None, *, sync_on_compute: bool = True
) -> MetricCollection:
    """Every metric of a dataset that is answered `num_samples` times a problem.

    ``update`` takes ``correct``, ``classes``, ``right_classes``, ``formatted``, ``unparsable``, ``truncated`` and
    ``lengths`` of one problem; each metric picks its own.

    Args:
        num_samples: n.
        ks: sizes k of pass@k and maj@k; powers of two up to n, and n itself, by default.
        sync_on_compute: with several ranks, `compute` is over the problems of all; False where each rank has them all.
    """
    sizes = sorted({k for k in (powers_of_two(num_samples) if ks is None else ks) if 1 <= k <= num_samples})
    sync = {"sync_on_compute": sync_on_compute}
    metrics: dict[str, Metric] = {"pass@1": PassAtK(1, **sync)}
    metrics |= {f"pass@{k}": PassAtK(k, **sync) for k in sizes}
    metrics |= {f"maj@{k}": MajAtK(k, **sync) for k in sizes if k > 1}
    if num_samples > 1:
        metrics[f"avg@{num_samples}"] = AvgAtK(num_samples, **sync)
    metrics |= {
        "format_rate": FormatRate(**sync),
        "unparsable_rate": UnparsableRate(**sync),
        "truncation_rate": TruncationRate(**sync),
        "mean_length": MeanLength(**sync),
        "median_length": MedianLength(**sync),
        "tokens_per_correct": TokensPerCorrect(**sync),
    }
    return MetricCollection(metrics, compute_groups=False)  # type: ignore[arg-type]


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`, and `limit` itself.

    >>> powers_of_two(6)
    [1, 2, 4, 6]
    """
    return sorted({2**i for i in range(limit.bit_length())} | {limit})
