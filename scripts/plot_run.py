"""Draw reward, held-out accuracy and completion length of a run from its metrics.jsonl.

python scripts/plot_run.py docs/results/smollm2_arithmetic.jsonl docs/figures/smollm2_arithmetic.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from grpo_lit.callbacks.metrics_file import read_metrics


def main(source: str, target: str) -> None:
    """Read the records of `source` and write the figure to `target`."""
    lines = read_metrics(Path(source))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    for axis, name, label in (
        (left, "rollout/reward_mean", "training reward"),
        (left, "val/accuracy", "held-out accuracy"),
    ):
        points = [(line["step"], line[name]) for line in lines if name in line]
        axis.plot(*zip(*points, strict=True), label=label, marker="o" if name.startswith("val") else None, markersize=4)
    left.set(xlabel="rollout step", ylim=(0, 1.03))
    left.legend(frameon=False)
    points = [
        (line["step"], line["rollout/completion_length"]) for line in lines if "rollout/completion_length" in line
    ]
    right.plot(*zip(*points, strict=True), color="tab:green")
    right.set(xlabel="rollout step", ylabel="completion length (tokens)", ylim=(0, None))
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:3])
