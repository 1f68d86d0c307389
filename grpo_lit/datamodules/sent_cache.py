"""The file that keeps each prompt's semantic entropy: resumable while it is made, atomic when it is done.

```
CACHE.jsonl            {"sent_cache": 1, "status": "complete", "key": {...}, "num_prompts": N, ...}
                       {"index": 17, "entropy": 0.0, "clusters": [0, 0, 0, 0], "pass_rate": 1.0, "answers": [...]}
                       ...                                          one line a prompt, easy to hard
CACHE.jsonl.partial    the same while sampling, in the order of the dataset, status "in_progress"
```
The key says what the entropies depend on: dataset, model, template, sampling, format version. A cache with another
key is refused with the first difference named. The partial file grows by whole batches of prompts; what a kill
leaves of a batch is cut off and sampled again, with the same draws in the same batch: the end is the same to the bit.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from grpo_lit.datamodules.readers import Row
from grpo_lit.datamodules.sent import sent_order
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.files import append_line, write_whole

if TYPE_CHECKING:
    from grpo_lit.policy import PolicyConfig

VERSION = 1
MARK = "sent_cache"


@dataclass(frozen=True)
class SentEntry:
    """What is known of one prompt."""

    index: int
    """Number of its row in the dataset."""
    entropy: float
    """Semantic entropy in nats."""
    clusters: list[int]
    """Cluster of each sample's answer."""
    pass_rate: float | None
    """Share of right answers; None without a verdict."""
    answers: list[str | None]
    """Final answer of each sample; None where there was none."""

    @property
    def num_clusters(self) -> int:
        """Different answers."""
        return len(set(self.clusters))


def model_key(config: PolicyConfig) -> dict[str, Any]:
    """What of a cache's key the model decides: its location and number format."""
    return {"path": config.path, "dtype": config.dtype, "quantization": config.quantization}


def rows_fingerprint(rows: Sequence[Row]) -> str:
    """Digest of questions and gold answers in their order: 16 hexadecimal digits of SHA-256."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row["question"], row.get("answer")], ensure_ascii=False, default=str).encode())
    return digest.hexdigest()[:16]


def first_difference(expected: Mapping[str, Any], found: Mapping[str, Any], prefix: str = "") -> str | None:
    """The first key whose values differ, with both; None if there is none.

    >>> first_difference({"a": {"b": 1}}, {"a": {"b": 2}})
    'a.b=2 instead of 1'
    """
    for name in dict.fromkeys([*expected, *found]):
        mine, theirs = expected.get(name), found.get(name)
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            inner = first_difference(mine, theirs, f"{prefix}{name}.")
            if inner is not None:
                return inner
        elif mine != theirs:
            return f"{prefix}{name}={theirs!r} instead of {mine!r}"
    return None


class SentCacheWriter:
    """Collects entries while they are sampled, and writes the finished cache.

    Args:
        path: of the finished cache; the partial file lies beside it.
        key: what the entropies depend on.
        info: further facts for the first line that aren't compared, such as the engine.

    Attributes:
        entries: what a partial file of the same key already held, whole batches only.

    Raises:
        UserError: there is a partial file of another key, or another process writes it.
    """

    def __init__(self, path: Path, key: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        self.path, self.key, self.info = path, dict(key), dict(info)
        self.partial = path.with_name(path.name + ".partial")
        self.entries: list[SentEntry] = []
        if not self.partial.is_file():
            self._begin()
        self._lock = self._claim()
        try:
            self._go_on()
        except (UserError, SystemFault):
            self.close()
            raise

    def _header(self, status: str, **more: Any) -> str:
        return json.dumps({MARK: VERSION, "status": status, "key": self.key, **more, "info": self.info})

    def _claim(self) -> BinaryIO:
        """Hold the partial file, so that no second process samples into it; the system lets go when this one ends."""
        file = self.partial.open("rb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            accepted = f"a path that no other process samples into ({self.partial} is in use)"
            raise UserError("sent.output", str(self.path), accepted) from error
        return file

    def _begin(self) -> None:
        write_whole(self.partial, self._header("in_progress") + "\n")

    def _go_on(self) -> None:
        """Take over whole batches and cut off what a kill left of the last one.

        Raises:
            SystemFault: another line is damaged.
        """
        data = self.partial.read_bytes()
        header, _, rest = data.partition(b"\n")
        found = _parse_header(header, self.partial)
        difference = first_difference(self.key, found["key"])
        if difference is not None:
            accepted = f"a path without an unfinished cache of other settings ({difference}); delete {self.partial}"
            raise UserError("sent.output", str(self.path), accepted)
        *lines, torn = rest.split(b"\n")
        for number, line in enumerate(lines, start=2):
            try:
                self.entries += [SentEntry(**entry) for entry in json.loads(line)]
            except (ValueError, TypeError) as error:
                text = f"{self.partial}, line {number} is damaged; restore it, or take out this line and those after it"
                raise SystemFault(text) from error
        if torn:
            os.truncate(self.partial, len(data) - len(torn))

    def close(self) -> None:
        """Let another writer go on with the partial file."""
        self._lock.close()

    def add(self, batch: Sequence[SentEntry]) -> None:
        """Append a batch of prompts as one line, flushed to disk.

        Raises:
            SystemFault: the disk is full or can't be written.
        """
        append_line(self.partial, [asdict(entry) for entry in batch])
        self.entries += batch

    def finish(self) -> SentCache:
        """Sort, write the cache under its final name in one move, and remove the partial file.

        Raises:
            SystemFault: the disk is full or can't be written.
        """
        order = sent_order([e.entropy for e in self.entries], [e.pass_rate for e in self.entries])
        entries = [self.entries[position] for position in order]
        lines = [self._header("complete", num_prompts=len(entries))]
        lines += [json.dumps(asdict(entry), ensure_ascii=False) for entry in entries]
        write_whole(self.path, "".join(line + "\n" for line in lines))
        self.partial.unlink()
        self.close()
        return SentCache(self.path, self.key, entries)


@dataclass(frozen=True)
class SentCache:
    """A finished cache."""

    path: Path
    key: dict[str, Any]
    entries: list[SentEntry]
    """Easy to hard."""

    def positions(self, indices: Sequence[int]) -> list[int]:
        """Positions of the given dataset rows, easy to hard.

        Args:
            indices: row number of each prompt.

        Raises:
            UserError: the cache lacks one of them.
        """
        rank = {entry.index: rank for rank, entry in enumerate(self.entries)}
        missing = [index for index in indices if index not in rank]
        if missing:
            shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            accepted = f"a cache of every training prompt; it lacks {len(missing)} (rows {shown})"
            raise UserError("data.sent_cache", str(self.path), accepted)
        return sorted(range(len(indices)), key=lambda position: rank[indices[position]])

    def pass_rates(self) -> dict[int, float]:
        """Pass rate by row number, where there is one."""
        return {entry.index: entry.pass_rate for entry in self.entries if entry.pass_rate is not None}


def read_sent_cache(path: str | Path, *, argument: str = "data.sent_cache") -> SentCache:
    """Read a finished cache.

    Raises:
        UserError: missing, unfinished, or no cache of this version.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        unfinished = file.with_name(file.name + ".partial").is_file()
        accepted = "a finished cache: run grpo-lit sent again to go on" if unfinished else "a file of grpo-lit sent"
        raise UserError(argument, str(path), accepted)
    try:
        header, *lines = file.read_bytes().rstrip(b"\n").split(b"\n")
        found = _parse_header(header, file, argument)
        entries = [SentEntry(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(argument, str(path), "a complete file of grpo-lit sent") from error
    if found["status"] != "complete" or found["num_prompts"] != len(entries):
        raise UserError(argument, str(path), "a complete file of grpo-lit sent")
    return SentCache(file, found["key"], entries)


def _parse_header(line: bytes, path: Path, argument: str = "sent.output") -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise UserError(argument, str(path), "a file of grpo-lit sent") from error
    if not isinstance(found, dict) or MARK not in found or not isinstance(found.get("key"), dict):
        raise UserError(argument, str(path), "a file of grpo-lit sent")
    if found[MARK] != VERSION:
        raise UserError(argument, str(path), f"format version {VERSION}, not {found[MARK]}")
    return found
