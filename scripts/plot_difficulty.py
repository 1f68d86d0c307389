"""Draw held-out accuracy under three orders of the same prompts, three seeds each, from recorded runs.

python scripts/plot_difficulty.py docs/results/difficulty docs/figures/difficulty.png

Files are named ARM_SEED.jsonl: shuffled (uniform groups, random order), sent (uniform groups, two stages from low to
high semantic entropy), vigor (random order, groups of different size). Prints the table for the docs.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from grpo_lit.callbacks.metrics_file import read_metrics

ARMS = {"shuffled": "tab:gray", "sent": "tab:blue", "vigor": "tab:orange"}
Curves = dict[str, dict[int, list[dict[str, Any]]]]


def read_runs(folder: Path) -> Curves:
    """Records by arm and seed."""
    runs: Curves = defaultdict(dict)
    for file in sorted(folder.glob("*_*.jsonl")):
        arm, _, seed = file.stem.rpartition("_")
        if arm in ARMS:
            runs[arm][int(seed)] = read_metrics(file)
    return runs


def points(lines: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Step and value where a record has one."""
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def draw(runs: Curves, target: Path) -> None:
    """Thin lines for seeds, a thick one for their mean, a band from the lowest to the highest."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for arm, color in ARMS.items():
        for axis, name in zip(axes, ("val/accuracy", "rollout/zero_variance_groups"), strict=True):
            curves = [dict(points(lines, name)) for lines in runs[arm].values()]
            steps = sorted(set.intersection(*(set(curve) for curve in curves)))
            rows = [[curve[step] for step in steps] for curve in curves]
            for row in rows:
                axis.plot(steps, row, color=color, linewidth=0.7, alpha=0.6)
            columns = list(zip(*rows, strict=True))
            axis.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=color, alpha=0.15)
            axis.plot(steps, list(map(statistics.fmean, columns)), color=color, linewidth=2, label=arm)
    axes[0].set(xlabel="rollout step (256 completions)", ylabel="held-out accuracy", ylim=(0, 1.02))
    axes[1].set(xlabel="rollout step (256 completions)", ylabel="share of flat groups", ylim=(0, 1.02))
    axes[0].legend(frameon=False)
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(target, dpi=110)


def table(runs: Curves) -> str:
    """Mean and range over the seeds of the accuracy at each validation."""
    steps = sorted(
        {step for seeds in runs.values() for lines in seeds.values() for step, _ in points(lines, "val/accuracy")}
    )
    lines = [
        "| order | seeds | " + " | ".join(f"step {step}" for step in steps) + " |",
        "|---" * (len(steps) + 2) + "|",
    ]
    for arm in ARMS:
        cells = []
        for step in steps:
            values = [dict(points(run, "val/accuracy"))[step] for run in runs[arm].values()]
            cells.append(f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        lines.append(f"| {arm} | {len(runs[arm])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(source: str, target: str) -> None:
    """Draw and print."""
    runs = read_runs(Path(source))
    draw(runs, Path(target))
    print(table(runs))


if __name__ == "__main__":
    main(*sys.argv[1:3])
