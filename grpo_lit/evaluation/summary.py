"""From verdicts to tables: metrics with intervals for every cell, averages over datasets, and paired comparisons."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from grpo_lit.evaluation.intervals import (
    Interval,
    PairedResult,
    cluster_bootstrap,
    compare_paired,
    wilson_interval,
)
from grpo_lit.evaluation.metrics import ProblemMean, evaluation_metrics
from grpo_lit.evaluation.runner import Cell, problem_of
from grpo_lit.evaluation.store import Record, ResultStore, SampleKey, key_of
from grpo_lit.files import write_whole

NO_INTERVAL = math.nan


@dataclass
class CellScores:
    """What one model scored on one dataset by one protocol."""

    model: str
    dataset: str
    protocol: str
    num_problems: int
    samples: int
    metrics: dict[str, Interval]
    accuracy: list[float]
    """(P) mean accuracy of each problem, in the order of the dataset."""
    first_right: list[bool]
    """(P) whether the first sample of each problem is right."""
    lengths: list[int]
    """Tokens of every completion."""
    tokens_per_s: float
    verdicts: dict[str, int] = field(default_factory=dict)


@dataclass
class Comparison:
    """Two models on one dataset by one protocol."""

    dataset: str
    protocol: str
    first: str
    second: str
    result: PairedResult


@dataclass
class Summary:
    """All tables of an evaluation."""

    cells: list[CellScores]
    comparisons: list[Comparison]
    averages: dict[tuple[str, str], Interval]
    """(model, protocol) -> mean accuracy over datasets, each of equal weight."""
    confidence: float


def summarise(cells: Sequence[Cell], store: ResultStore, *, confidence: float = 0.95, seed: int = 0) -> Summary:
    """Compute every table from complete cells."""
    generated = {key_of(record): record for record in store.generations.records}
    verdicts = {key_of(record): record for record in store.verdicts.records}
    scores = [_score(cell, generated, verdicts, _speed(cell, store), confidence, seed) for cell in cells]
    pairs = [
        Comparison(
            a.dataset,
            a.protocol,
            a.model,
            b.model,
            compare_paired(a.accuracy, b.accuracy, a.first_right, b.first_right, confidence=confidence, seed=seed),
        )
        for b, a in itertools.combinations(scores, 2)
        if (a.dataset, a.protocol) == (b.dataset, b.protocol) and a.num_problems == b.num_problems
    ]
    by_model: dict[tuple[str, str], list[CellScores]] = {}
    for cell in scores:
        by_model.setdefault((cell.model, cell.protocol), []).append(cell)
    averages = {key: macro_interval([c.accuracy for c in own], confidence, seed) for key, own in by_model.items()}
    return Summary(scores, pairs, averages, confidence)


def _score(
    cell: Cell,
    generated: Mapping[SampleKey, Record],
    verdicts: Mapping[SampleKey, Record],
    tokens_per_s: float,
    confidence: float,
    seed: int,
) -> CellScores:
    # no exchange: every rank has all records, and NCCL would refuse tensors of the CPU
    metrics = evaluation_metrics(cell.samples, sync_on_compute=False)
    rows = cell.task.rows
    keys = cell.sample_keys()
    problems = [
        problem_of([verdicts[key] for key in own], [generated[key] for key in own])
        for own in (keys[i * cell.samples : (i + 1) * cell.samples] for i in range(len(rows)))
    ]
    for problem in problems:
        metrics.update(**problem)
    asked = any(verdicts[key]["formatted"] is not None for key in keys)
    table: dict[str, Interval] = {}
    for name, metric in metrics.items():
        if name == "format_rate" and not asked:
            continue
        table[name] = _interval(metric, confidence, seed)
    counts: dict[str, int] = {}
    for key in keys:
        kind = verdicts[key]["kind"]
        counts[kind] = counts.get(kind, 0) + 1
    return CellScores(
        cell.model,
        cell.task.label,
        cell.protocol,
        len(rows),
        cell.samples,
        table,
        [sum(problem["correct"]) / cell.samples for problem in problems],
        [problem["correct"][0] for problem in problems],
        [length for problem in problems for length in problem["lengths"]],
        tokens_per_s,
        counts,
    )


def _interval(metric: torch.nn.Module, confidence: float, seed: int) -> Interval:
    """Wilson where every problem scores 0 or 1, bootstrap over problems for the other means, none elsewhere."""
    if not isinstance(metric, ProblemMean):
        return Interval(float(metric.compute()), NO_INTERVAL, NO_INTERVAL)  # type: ignore[operator]
    values = metric.per_problem().tolist()
    return mean_interval(values, confidence, seed)


def mean_interval(values: Sequence[float], confidence: float, seed: int) -> Interval:
    """Interval of a mean over problems; Wilson's does not shrink to nothing where all problems score alike."""
    if set(values) <= {0.0, 1.0}:
        return wilson_interval(int(sum(values)), len(values), confidence)
    return cluster_bootstrap(values, confidence=confidence, seed=seed)


def macro_interval(datasets: Sequence[Sequence[float]], confidence: float, seed: int) -> Interval:
    r"""Mean over datasets of the mean over problems, with an interval out of those of the datasets.

    With intervals [l_d, u_d] about means m_d of D datasets, which are independent: from
    :math:`m - \sqrt{\sum_d (m_d - l_d)^2} / D` to :math:`m + \sqrt{\sum_d (u_d - m_d)^2} / D` (MOVER; Zou and Donner
    2008, Statistics in Medicine 27). So a dataset whose problems all score alike adds Wilson's bound and not nothing.
    """
    parts = [mean_interval(values, confidence, seed) for values in datasets]
    mean = math.fsum(part.value for part in parts) / len(parts)
    below = math.hypot(*(part.value - part.low for part in parts)) / len(parts)
    above = math.hypot(*(part.high - part.value for part in parts)) / len(parts)
    return Interval(mean, mean - below, mean + above)


def _speed(cell: Cell, store: ResultStore) -> float:
    """Tokens per second over the batches of a cell; of a batch that ran twice, the last time counts."""
    own = {
        record["first"]: record
        for record in store.timings.records
        if (record["model"], record["dataset"], record["protocol"]) == (cell.model, cell.task.label, cell.protocol)
    }
    seconds = sum(record["seconds"] for record in own.values())
    return sum(record["tokens"] for record in own.values()) / seconds if seconds else math.nan


def write_tables(summary: Summary, folder: Path) -> list[Path]:
    """``summary.csv`` (a metric a row), ``by_model.csv`` (averages) and ``paired.csv``; ``speed.csv``."""
    cells = [
        [c.model, c.dataset, c.protocol, c.num_problems, c.samples, name, *map(_number, interval)]
        for c in summary.cells
        for name, interval in c.metrics.items()
    ]
    averages = [[model, protocol, *map(_number, interval)] for (model, protocol), interval in summary.averages.items()]
    pairs = [[p.dataset, p.protocol, p.first, p.second, *_plain(p.result)] for p in summary.comparisons]
    speed = [[c.model, c.dataset, c.protocol, _number(c.tokens_per_s)] for c in summary.cells]
    head = ["model", "dataset", "protocol"]
    tables: dict[str, tuple[list[str], Sequence[Sequence[object]]]] = {
        "summary.csv": ([*head, "num_problems", "samples", "metric", "value", "low", "high"], cells),
        "by_model.csv": (["model", "protocol", "mean_accuracy", "low", "high"], averages),
        "paired.csv": (["dataset", "protocol", "first", "second", *PairedResult._fields], pairs),
        "speed.csv": ([*head, "tokens_per_s"], speed),
    }
    for name, (header, rows) in tables.items():
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *rows])
        write_whole(folder / name, text.getvalue())
    return [folder / name for name in tables]


def _plain(result: PairedResult) -> list[str]:
    return [_number(value) if isinstance(value, float) else str(value) for value in result]


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}"
