"""What the live page shows: bounded histories that the training thread fills and the server's thread reads."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

SCHEMA_VERSION = 1
CHANNELS = ("metrics", "phases", "memory", "ooms", "micro_batching")
UNITS = {
    "metrics": "as in metrics.jsonl: seconds, MiB, tokens; shares in [0, 1]",
    "phases": "seconds since the epoch, seconds",
    "memory": "bytes",
    "ooms": "seconds since the epoch",
    "micro_batching": "rows, tokens",
}


class LiveState:
    """Histories of a run.

    Args:
        capacity: records kept of each kind; older ones are dropped and counted.
    """

    def __init__(self, capacity: int = 2000) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._records: dict[str, deque[dict[str, Any]]] = {name: deque(maxlen=capacity) for name in CHANNELS}
        self._dropped = dict.fromkeys(CHANNELS, 0)
        self._status: dict[str, Any] = {"started": time.time(), "phase": None, "step": 0, "finished": False}

    def add(self, channel: str, record: Mapping[str, Any]) -> None:
        """Append a record to one of `CHANNELS`; numbers that JSON lacks become null."""
        with self._lock:
            records = self._records[channel]
            self._dropped[channel] += len(records) == self.capacity
            records.append({name: _finite(value) for name, value in record.items()})

    def set_status(self, **values: Any) -> None:
        """Change what `status` reports."""
        with self._lock:
            self._status |= values

    def status(self) -> dict[str, Any]:
        """The run in a few figures."""
        with self._lock:
            return {**self._status, "now": time.time(), "records": {n: len(r) for n, r in self._records.items()}}

    def read(self, channel: str, *, since_step: int = 0, limit: int = 500) -> dict[str, Any]:
        """The newest records of a channel.

        Args:
            channel: one of `CHANNELS`.
            since_step: only records of this rollout step and later.
            limit: at most so many, the newest.

        Returns:
            ``records`` (oldest first), ``dropped`` and ``left_out`` counts, ``units``.
        """
        with self._lock:
            found = [record for record in self._records[channel] if record.get("step", 0) >= since_step]
            shown = found[-limit:] if limit > 0 else []
            return {
                "records": shown,
                "left_out": len(found) - len(shown),
                "dropped": self._dropped[channel],
                "units": UNITS[channel],
            }


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
