"""Writing a run's files: whole or not at all, and a failure in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_lit.errors import SystemFault


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file that the body writes where the disk is full or refuses.

    Raises:
        SystemFault: the body raised an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise SystemFault(f"{path} can't be written ({error.strerror or error})") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file beside its name, flush it to disk and rename it: a reader sees the old one or the new one.

    Raises:
        SystemFault: it can't be written; what was there stays.
    """
    tmp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tmp.open("w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            tmp.replace(path)
        finally:
            tmp.unlink(missing_ok=True)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line and flush it to disk; of a line that didn't fit, nothing stays.

    Raises:
        SystemFault: it can't be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record).encode() + b"\n"
        with path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if (written := file.write(line)) != len(line):
                    file.write(line[written:])  # where there is no space, this says so
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of writers that were killed; call it only while no other process writes there."""
    for file in folder.glob(".*.tmp"):
        file.unlink(missing_ok=True)
