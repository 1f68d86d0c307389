"""Evaluation: metrics with intervals, a resumable runner, and reports."""

from grpo_lit.evaluation.estimators import avg_at_k, maj_at_k, pass_at_k
from grpo_lit.evaluation.intervals import (
    Interval,
    PairedResult,
    cluster_bootstrap,
    compare_paired,
    mcnemar_exact,
    paired_bootstrap,
    wilson_interval,
)
from grpo_lit.evaluation.metrics import evaluation_metrics

__all__ = [
    "Interval",
    "PairedResult",
    "avg_at_k",
    "cluster_bootstrap",
    "compare_paired",
    "evaluation_metrics",
    "maj_at_k",
    "mcnemar_exact",
    "paired_bootstrap",
    "pass_at_k",
    "wilson_interval",
]
