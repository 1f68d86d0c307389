"""Rows of a benchmark as a file."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_csv(path: Path | None, rows: Sequence[Mapping[str, object]], fields: Sequence[str] | None = None) -> None:
    """Write the rows under a line of names; folders are made.

    Args:
        path: the file; None writes nothing.
        rows: one mapping a row.
        fields: the names, in order; what a row has beyond them is left out. Those of the first row by default.
    """
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        names = fields if fields is not None else list(rows[0]) if rows else []
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
