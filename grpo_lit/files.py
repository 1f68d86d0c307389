"""Writing a run's files: whole or not at all, and a failure in one line."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from grpo_lit.errors import SystemFault

_log = logging.getLogger(__name__)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file that the body writes where the disk is full or refuses.

    Raises:
        SystemFault: the body raised an `OSError`, or what safetensors makes of one.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise SystemFault(f"{path} can't be written ({getattr(error, 'strerror', None) or error})") from error


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill beside another, which gets its content once the body is through, and nothing otherwise.

    Args:
        folder: there or not; nothing in it has a name that the body writes.

    Raises:
        SystemFault: it can't be written.
    """
    folder = folder.absolute()
    tmp = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        with writing(folder):
            tmp.mkdir(parents=True)
        yield tmp
        with writing(folder):
            folder.mkdir(exist_ok=True)
            for entry in tmp.iterdir():
                entry.replace(folder / entry.name)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


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


def append_line(path: Path, *records: object) -> None:
    """Append a JSON line a record in one write and flush it to disk; of what didn't fit whole, nothing stays.

    Raises:
        SystemFault: it can't be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        lines = text.encode(errors="backslashreplace")  # half a surrogate pair, as JSON writes it
        with path.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if (written := file.write(lines)) != len(lines):
                    file.write(lines[written:])  # where there is no space, this says so
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):
                    file.truncate(size)
                raise


def read_lines(path: Path, fields: Mapping[str, type], *, repair: bool = False) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines, none where there is no file; a last line torn by a kill is left out.

    Args:
        path: the file.
        fields: what every record has, such as ``{"step": int}``.
        repair: cut the torn line off, so that the next one can be appended.

    Raises:
        SystemFault: another line is no such record.
    """
    if not path.is_file():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if repair and len(whole) < len(raw):
        _log.warning("%s: cut off a torn last line of %d bytes", path, len(raw) - len(whole))
        with path.open("r+b") as file:
            file.truncate(len(whole))
    lines = enumerate(whole.split(b"\n"), start=1)
    return [_record(line, path, number, fields) for number, line in lines if line.strip()]


def _record(line: bytes, path: Path, number: int, fields: Mapping[str, type]) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not all(isinstance(record.get(name), kind) for name, kind in fields.items()):
        wanted = f"no JSON object with a {', '.join(fields)}"
        raise SystemFault(f"{path}, line {number} is damaged: {wanted}; restore it or take it out")
    return record


def read_object(path: Path) -> dict[str, Any]:
    """A file with one JSON object; empty where there is no file.

    Raises:
        SystemFault: it holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SystemFault(f"{path} is damaged: no JSON object; restore it or take it out")
    return found


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of writers that were killed; call it only while no other process writes there."""
    for file in folder.glob(".*.tmp"):
        file.unlink(missing_ok=True)
