"""Read what a run has written: ``python read_run.py runs/quickstart``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import load_file

from grpo_lit.callbacks.metrics_file import read_metrics


def main(root: Path) -> None:
    """Print how the reward moved, the best and the worst completion of the last step, and the adapter's size."""
    trained = [line for line in read_metrics(root / "metrics.jsonl") if "rollout/reward_mean" in line]
    for line in trained[:: max(len(trained) // 5, 1)]:
        reward, speed = line["rollout/reward_mean"], line["perf/tokens_per_sec"]
        print(f"step {line['step']:>4}  reward {reward:.3f}  {speed:.0f} tokens/s")
    last = sorted((root / "completions").glob("step_*.jsonl"))[-1]
    rows = [json.loads(line) for line in last.read_text(encoding="utf-8").rstrip("\n").split("\n")]
    rows.sort(key=lambda row: row["reward"] if row["reward"] is not None else 0.0)
    for name, row in (("worst", rows[0]), ("best", rows[-1])):
        print(f"{name}: {row['prompt']!r} -> {row['completion']!r} reward {row['reward']}")
    adapter = load_file(root / "adapter" / "adapter_model.safetensors")
    print(f"adapter: {len(adapter)} matrices, {sum(matrix.numel() for matrix in adapter.values()):,} numbers")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
