"""The reports of an evaluation: report.md for reading in a terminal or a repository, report.html for a browser."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from grpo_lit.evaluation.html import html_report
from grpo_lit.evaluation.intervals import Interval
from grpo_lit.evaluation.store import Record, ResultStore, key_of
from grpo_lit.evaluation.summary import CellScores, Summary
from grpo_lit.evaluation.tasks import Task
from grpo_lit.files import write_whole
from grpo_lit.markdown import table

NOTES = (
    "pass@k is the unbiased estimator 1 - C(n-c, k) / C(n, k); maj@k votes by equivalence class of the final answer, "
    "ties split, unreadable answers do not vote; both are exact means over all choices of k of the n samples. "
    "Intervals resample problems, never samples (bootstrap, 10 000 draws), and are Wilson's where every problem scores "
    "0 or 1. Pairs: paired bootstrap over problems, and McNemar's exact test on the first sample."
)


def write_reports(folder: Path, summary: Summary, store: ResultStore, tasks: Sequence[Task]) -> None:
    """Write ``report.md`` and ``report.html``."""
    run_config = json.loads((folder / "run_config.json").read_text(encoding="utf-8"))
    write_whole(folder / "report.md", markdown_report(summary, run_config))
    write_whole(folder / "report.html", html_report(summary, run_config, example_rows(summary, store, tasks), NOTES))


def markdown_report(summary: Summary, run_config: Record) -> str:
    """Tables of scores and comparisons, and what they were made with."""
    lines = ["# Evaluation", "", "## Scores", ""]
    names = metric_names(summary.cells)
    header = ["model", "dataset", "protocol", "problems", "samples", *names, "tokens/s"]
    lines += table(header, [cell_row(cell, names) for cell in summary.cells])
    lines += ["", f"In brackets the {summary.confidence:.0%} interval. {NOTES}", "", "## Means over datasets", ""]
    rows = [[model, protocol, with_interval(i)] for (model, protocol), i in summary.averages.items()]
    lines += table(["model", "protocol", "mean accuracy"], rows)
    if summary.comparisons:
        lines += ["", "## Pairs of models", ""]
        lines += table(PAIR_HEADER, [pair_row(pair) for pair in summary.comparisons])
    lines += ["", "## Models and datasets", ""]
    lines += table(["model", "base", "weights", "format"], [model_row(*item) for item in run_config["models"].items()])
    lines += [""]
    lines += table(
        ["dataset", "source", "problems", "may select"], [dataset_row(*i) for i in run_config["datasets"].items()]
    )
    lines += ["", "Made with " + ", ".join(f"{k} {v}" for k, v in run_config["versions"].items()) + ".", ""]
    return "\n".join(lines)


PAIR_HEADER = ["dataset", "protocol", "first", "second", "difference", "only first right", "only second right", "p"]


def pair_row(pair: object) -> list[str]:
    """A comparison as cells of a table."""
    r = pair.result  # type: ignore[attr-defined]
    difference = f"{r.difference:+.3f} [{r.low:+.3f}, {r.high:+.3f}]"
    names = [getattr(pair, name) for name in ("dataset", "protocol", "first", "second")]
    return [*names, difference, str(r.only_first), str(r.only_second), p_text(r.p_value)]


def model_row(label: str, model: Record) -> list[str]:
    """A model as cells of a table."""
    weights = model["weights"] or "as they are"
    if model["selection_source"]:
        weights += f" (chosen by {model['selection_source']})"
    return [
        label,
        model["base"],
        weights,
        model["dtype"] + (f", {model['quantization']}" * bool(model["quantization"])),
    ]


def dataset_row(label: str, data: Record) -> list[str]:
    """A dataset as cells of a table."""
    return [label, data["source"], str(data["problems"]), "no: final test" if data["final_test"] else "yes"]


def metric_names(cells: Sequence[CellScores]) -> list[str]:
    """Columns of the table of scores: metrics of any cell, rates and lengths last."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.metrics))
    sized = sorted(
        (n for n in names if "@" in n),
        key=lambda n: (n.partition("@")[0] != "pass", n.partition("@")[0], int(n.partition("@")[2])),
    )
    return [*sized, *(name for name in names if "@" not in name)]


def cell_row(cell: CellScores, names: Sequence[str]) -> list[str]:
    """A cell as cells of a table; an empty one where it lacks the metric."""
    scores = [with_interval(cell.metrics[name]) if name in cell.metrics else "" for name in names]
    speed = "" if math.isnan(cell.tokens_per_s) else f"{cell.tokens_per_s:.0f}"
    return [cell.model, cell.dataset, cell.protocol, str(cell.num_problems), str(cell.samples), *scores, speed]


def with_interval(interval: Interval) -> str:
    """A score with its interval, where it has one."""
    value, low, high = interval
    if math.isinf(value):
        return "none right"
    if math.isnan(low):
        return f"{value:.1f}"
    digits = 3 if high <= 1 else 1
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def p_text(p: float) -> str:
    """A p-value in a few characters."""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def example_rows(summary: Summary, store: ResultStore, tasks: Sequence[Task], limit: int = 12) -> list[Record]:
    """Problems with every model's first answer: where models disagree first, `limit` a dataset and protocol."""
    generated = {key_of(record): record for record in store.generations.records}
    verdicts = {key_of(record): record for record in store.verdicts.records}
    found: list[Record] = []
    for task in tasks:
        questions = {row["index"]: row for row in task.rows}
        for protocol in dict.fromkeys(cell.protocol for cell in summary.cells):
            by_example: dict[int, list[Record]] = {}
            for key, verdict in verdicts.items():
                if (key.dataset, key.protocol, key.sample) == (task.label, protocol, 0) and key.example in questions:
                    by_example.setdefault(key.example, []).append({**generated[key], **verdict})
            order = sorted(by_example, key=lambda e: (len({a["correct"] for a in by_example[e]}) < 2, e))
            found += [
                {
                    "dataset": task.label,
                    "protocol": protocol,
                    "example": example,
                    "question": questions[example]["question"],
                    "gold": questions[example]["answer"],
                    "answers": by_example[example],
                }
                for example in order[:limit]
            ]
    return found
