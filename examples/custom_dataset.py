"""A dataset of your own is a file whose columns you name: this writes one, of sums with the second number doubled.

A dataset that others should find by name is one more entry in ``grpo_lit/datamodules/datasets.py``.
"""

from __future__ import annotations

import json
from pathlib import Path


def main(path: Path) -> None:
    """Write 100 rows with the columns ``task`` and ``result``."""
    rows = [{"task": f"{a}+{b}+{b}", "result": str(a + 2 * b)} for a in range(10) for b in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows in {path}")


if __name__ == "__main__":
    main(Path("doubles.jsonl"))
