"""Two or more training runs side by side: what differs in their settings, how they went, where they ended."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from grpo_lit.callbacks.metrics_file import read_metrics
from grpo_lit.datamodules import MathDataModule
from grpo_lit.errors import UserError
from grpo_lit.evaluation.intervals import mcnemar_exact, paired_bootstrap, wilson_interval
from grpo_lit.evaluation.models import read_run_config
from grpo_lit.evaluation.plots import COLORS
from grpo_lit.evaluation.store import key_of
from grpo_lit.markdown import table

CURVES = {
    "rollout/reward_mean": "training reward",
    "val/accuracy": "held-out accuracy",
    "rollout/completion_length": "completion length (tokens)",
    "train/entropy": "entropy (nats)",
    "train/grad_norm": "gradient norm",
    "perf/tokens_per_sec": "tokens per second",
}
_MISSING = "absent"


@dataclass
class Run:
    """One run folder."""

    name: str
    folder: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]


def read_runs(folders: Sequence[str]) -> list[Run]:
    """Read run folders; names are the shortest ends of the paths that tell them apart.

    Raises:
        UserError: fewer than two, or a folder that is no run.
    """
    if len(folders) < 2:
        raise UserError("runs", list(folders), "at least two run folders")
    paths = [Path(folder) for folder in folders]
    depth = 1
    while len({path.resolve().parts[-depth:] for path in paths}) < len(paths):
        depth += 1
        if depth > 20:
            raise UserError("runs", list(folders), "different folders")
    runs = []
    for path in paths:
        metrics = read_metrics(path / "metrics.jsonl")
        if not metrics:
            raise UserError("runs", str(path), "a run folder with a metrics.jsonl")
        name = "/".join(path.resolve().parts[-depth:])
        runs.append(Run(name, path, read_run_config(str(path), argument="runs"), metrics))
    return runs


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; a class path and its arguments are one level.

    >>> flat({"a": {"b": 1}, "c": {"class_path": "X", "init_args": {"d": 2}}})
    {'a.b': 1, 'c': 'X', 'c.d': 2}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and "class_path" in value:
            found[f"{prefix}{key}"] = value["class_path"]
            found |= flat(value.get("init_args") or {}, f"{prefix}{key}.")
        elif isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Settings that are not the same in all runs, with each run's value; the folder itself is left out."""
    settings = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for own in settings for key in own)
    rows = [(key, [own.get(key, _MISSING) for own in settings]) for key in keys]
    return [
        (key, values)
        for key, values in rows
        if key != "trainer.default_root_dir" and any(value != values[0] for value in values)
    ]


def final_rows(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of results: accuracies with Wilson intervals, reward, speed, memory."""
    header = ["run", "rollout steps", "first accuracy", "best accuracy", "last accuracy", "reward, last 10 steps"]
    header += ["tokens/s, median", "seconds per step, median", "peak memory, MiB"]
    return header, [_final_row(run) for run in runs]


def _final_row(run: Run) -> list[str]:
    measured = [line for line in run.metrics if line.get("val/accuracy") is not None]
    num_answers = answers_of_validation(run)
    accuracies = ["", "", ""]
    if measured:
        values = [line["val/accuracy"] for line in measured]
        accuracies = [_with_wilson(value, num_answers) for value in (values[0], max(values), values[-1])]
    rewards = _values(run, "rollout/reward_mean")[-10:]
    peaks = [value for line in run.metrics for name, value in line.items() if name.startswith("vram/peak") and value]
    return [
        run.name,
        str(max(line["step"] for line in run.metrics)),
        *accuracies,
        f"{sum(rewards) / len(rewards):.3f}" if rewards else "",
        _median_text(_values(run, "perf/tokens_per_sec"), ".0f"),
        _median_text(_values(run, "perf/step_s"), ".2f"),
        f"{max(peaks):.0f}" if peaks else "",
    ]


def answers_of_validation(run: Run) -> int | None:
    """Held-out prompts, the independent observations of an accuracy; None where their data is not at hand."""
    data = run.config["data"].get("init_args", run.config["data"])
    try:
        return len(MathDataModule(**data).load()[1])
    except (UserError, RuntimeError, TypeError):
        wanted = data.get("val_prompts")
        return wanted if isinstance(wanted, int) and wanted > 0 else None


def _with_wilson(value: float, num_prompts: int | None) -> str:
    if not num_prompts:
        return f"{value:.3f}"
    # several answers a prompt: the share of prompts, rounded, stands for as many independent observations
    _, low, high = wilson_interval(round(value * num_prompts), num_prompts)
    return f"{value:.3f} [{min(low, value):.3f}, {max(high, value):.3f}]"


def evaluation_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Pairs of runs on benchmarks that both answered during training (``evaluation/``), at their last step each."""
    answered = [_last_verdicts(run) for run in runs]
    rows = []
    for i, first in enumerate(runs):
        for j in range(i + 1, len(runs)):
            for dataset in sorted(answered[i].keys() & answered[j].keys()):
                one, other = answered[i][dataset], answered[j][dataset]
                if one.keys() != other.keys():
                    continue
                a, b = [[float(own[key]) for key in sorted(own)] for own in (one, other)]
                interval = paired_bootstrap(b, a)
                p = mcnemar_exact(
                    sum(x > y for x, y in zip(a, b, strict=True)), sum(y > x for x, y in zip(a, b, strict=True))
                )
                difference = f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
                rows.append([dataset, str(len(a)), runs[j].name, first.name, difference, f"{p:.3g}"])
    return rows


def _last_verdicts(run: Run) -> dict[str, dict[int, bool]]:
    """Dataset -> example -> whether the greedy answer is right, of the run's last evaluation in training."""
    folders = sorted((run.folder / "evaluation").glob("step_*/verdicts.jsonl"))
    found: dict[str, dict[int, bool]] = {}
    for line in folders[-1].read_text(encoding="utf-8").split("\n") if folders else []:
        if line:
            record = json.loads(line)
            key = key_of(record)
            if key.protocol == "deterministic":
                found.setdefault(key.dataset, {})[key.example] = record["correct"]
    return found


def curves(runs: Sequence[Run]) -> Figure:
    """Reward, accuracy, length, entropy, gradient norm and speed over rollout steps."""
    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots(2, 3).flat
    for axis, (name, title) in zip(axes, CURVES.items(), strict=True):
        for index, run in enumerate(runs):
            points = [(line["step"], line[name]) for line in run.metrics if line.get(name) is not None]
            if points:
                marker = "o" if len(points) < 40 else None
                color = COLORS[(index + 1) % len(COLORS)]
                axis.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=run.name, color=color)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("rollout step", fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, fontsize=8)
    return figure


def markdown(runs: Sequence[Run]) -> str:
    """The whole comparison."""
    lines = ["# Runs side by side", "", "![curves](curves.png)", "", "## Results", ""]
    lines += table(*final_rows(runs))
    lines += [
        "",
        "In brackets Wilson's 95% interval over held-out prompts. The best accuracy was chosen by the same prompts.",
    ]
    rows = evaluation_rows(runs)
    if rows:
        header = ["dataset", "problems", "second", "first", "second − first", "p (McNemar)"]
        lines += ["", "## Benchmarks in training, greedy", "", *table(header, rows)]
    found = differences(runs)
    lines += ["", "## Settings that differ", ""]
    body = [[f"`{key}`", *(json.dumps(value, ensure_ascii=False) for value in values)] for key, values in found]
    lines += table(["setting", *(run.name for run in runs)], body) if found else ["None."]
    return "\n".join([*lines, ""])


def _values(run: Run, name: str) -> list[float]:
    return [line[name] for line in run.metrics if line.get(name) is not None]


def _median_text(values: Sequence[float], form: str) -> str:
    ordered = sorted(value for value in values if math.isfinite(value))
    return format(ordered[len(ordered) // 2], form) if ordered else ""
