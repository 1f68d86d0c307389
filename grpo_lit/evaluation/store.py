"""Results on disk: JSON lines appended example by example, so that a killed evaluation loses at most one batch."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.files import append_line, read_lines, read_object, remove_leftovers, write_whole

Record = dict[str, Any]
GENERATIONS, VERDICTS, TIMINGS = "generations.jsonl", "verdicts.jsonl", "timings.jsonl"
CELLS, EXAMPLES = "cells.json", "examples.jsonl"


class SampleKey(NamedTuple):
    """What identifies one answer."""

    model: str
    dataset: str
    protocol: str
    example: int
    sample: int


_FIELDS: dict[str, type] = {"model": str, "dataset": str, "protocol": str, "example": int, "sample": int}


def key_of(record: Record) -> SampleKey:
    """The key of a record of generations or verdicts."""
    return SampleKey(*(record[name] for name in SampleKey._fields))


class ResultStore:
    """The folder of an evaluation.

    ``generations.jsonl`` holds every answer, ``verdicts.jsonl`` what was made of it, in the same order, a line a
    sample; the lines of an example go to disk in one write. A line torn by a kill is cut off when the folder is opened,
    and only what is missing is written again. ``timings.jsonl`` holds what depends on the clock, and nothing else does.

    Args:
        folder: made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.generations = _Lines(folder / GENERATIONS, _FIELDS | {"prompt": str, "completion": str})
        self.verdicts = _Lines(folder / VERDICTS, _FIELDS | {"correct": bool})
        self.timings = _Lines(folder / TIMINGS, {"model": str, "seconds": float})

    @contextmanager
    def opened(self) -> Iterator[ResultStore]:
        """Hold the folder for this process and read what is in it.

        Raises:
            UserError: it is a file, or another process evaluates into it.
            SystemFault: it can't be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            file = os.open(self.folder / "evaluation.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError("output", str(self.folder), "a folder, new or of an earlier evaluation") from error
        except OSError as error:
            raise SystemFault(f"output={str(self.folder)!r} can't be written: {error.strerror}") from error
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError("output", str(self.folder), "a folder that no other evaluation is using") from error
            remove_leftovers(self.folder)
            for lines in (self.generations, self.verdicts, self.timings):
                lines.read()
            yield self
        finally:
            os.close(file)

    def check_cell(self, name: str, fingerprint: Record) -> None:
        """Refuse to mix results of different settings under one name.

        Raises:
            UserError: earlier results of this name were made otherwise.
        """
        path = self.folder / CELLS
        cells = read_object(path)
        plain = json.loads(json.dumps(fingerprint))
        if name in cells and cells[name] != plain and self._has_results(name):
            differing = sorted(
                key for key in plain.keys() | cells[name].keys() if plain.get(key) != cells[name].get(key)
            )
            accepted = f"another folder, or --overwrite true: {name} was made with other {', '.join(differing)}"
            raise UserError("output", str(self.folder), accepted)
        if cells.get(name) != plain:  # a cell that failed before its first answer binds nobody
            write_whole(path, json.dumps({**cells, name: plain}, indent=1, sort_keys=True) + "\n")

    def _has_results(self, name: str) -> bool:
        return any("/".join(key_of(record)[:3]) == name for record in self.generations.records)


class _Lines:
    """A file of JSON lines, appended and flushed."""

    def __init__(self, path: Path, fields: Mapping[str, type]) -> None:
        self.path, self.fields = path, fields
        self.records: list[Record] = []

    def read(self) -> None:
        """Read all whole lines, and cut off a torn last one.

        Raises:
            SystemFault: another line is damaged.
        """
        self.records = read_lines(self.path, self.fields, repair=True)

    def append(self, records: Sequence[Record]) -> None:
        """Append records in one write and flush them to disk.

        Raises:
            SystemFault: the disk is full.
        """
        append_line(self.path, *records)
        self.records.extend(records)


class _MemoryLines(_Lines):
    """The same without a file."""

    def __init__(self) -> None:
        super().__init__(Path(), {})

    def read(self) -> None:
        """Nothing to read."""

    def append(self, records: Sequence[Record]) -> None:
        """Keep records."""
        self.records.extend(records)


class MemoryStore(ResultStore):
    """Results of one rank on their way to the others."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.generations, self.verdicts, self.timings = _MemoryLines(), _MemoryLines(), _MemoryLines()
