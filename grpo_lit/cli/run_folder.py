"""The run's folder: one run at a time in it, an earlier run kept, the resolved configuration written."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_lit.checkpoint import read_checkpoint
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.files import remove_leftovers, write_whole

LOCK = "run.lock"
"""Held while a run goes on; its text lists what was in the folder before the first run, and is nobody's to move."""
_PARTS = {"metrics.jsonl", "metrics.repeated.jsonl", "memory.jsonl", "config.yaml"}
_PARTS |= {"checkpoints", "completions", "tensorboard", "adapter", "model", "nonfinite"}


def resolve_ckpt_path(value: str | None, root: Path) -> Path | None:
    """File of ``--ckpt_path``: a path, or ``last`` / ``best`` of the run's folder.

    Raises:
        UserError: no such file.
    """
    if value is None:
        return None
    folder = root / "checkpoints"
    if value == "last":
        path = folder / "last.ckpt"
    elif value == "best":
        path = _best(folder)
    else:
        path = Path(value).expanduser()
    if not path.is_file():
        raise UserError("ckpt_path", value, f"an existing checkpoint; there is no {path}")
    return path


def _best(folder: Path) -> Path:
    """The best checkpoint, as the last one remembers it."""
    last = folder / "last.ckpt"
    if last.is_file():
        for state in read_checkpoint(last).get("callbacks", {}).values():
            if isinstance(state, dict) and state.get("best_model_path"):
                return folder / Path(state["best_model_path"]).name
    return folder / "step=...-accuracy=....ckpt"


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the folder for this process.

    Raises:
        UserError: another process runs in it.
        SystemFault: the folder can't be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        before = None if (root / LOCK).exists() else _not_of_a_run(root)
        file = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SystemFault(f"trainer.default_root_dir={str(root)!r} can't be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError("trainer.default_root_dir", str(root), "a folder that no other run is using") from error
        if before:
            os.pwrite(file, json.dumps(before).encode(), 0)
        for folder in (root, root / "checkpoints", root / "completions"):
            remove_leftovers(folder)
        yield
    finally:
        os.close(file)


def _not_of_a_run(root: Path) -> list[str]:
    """Names in a folder that no run has locked yet, without those of a run that was copied there."""
    is_run = (root / "metrics.jsonl").is_file() or (root / "checkpoints" / "last.ckpt").is_file()
    return sorted(entry.name for entry in root.iterdir() if not is_run or entry.name not in _PARTS)


def set_earlier_run_aside(root: Path) -> Path | None:
    """Move an earlier run's files into ``<root>.1``, ``.2``, ...; returns where they went, if there were any.

    What was in the folder before its first run stays: the folder may be somebody's project.
    """
    root = root.resolve()
    text = (root / LOCK).read_text() if (root / LOCK).is_file() else ""
    stays = {LOCK, *(json.loads(text) if text else ())}
    moved = [entry for entry in sorted(root.iterdir()) if entry.name not in stays]
    if not moved:
        return None
    number = 1
    while (target := root.with_name(f"{root.name}.{number}")).exists():
        number += 1
    target.mkdir()
    for entry in moved:
        entry.rename(target / entry.name)
    return target


def write_config(root: Path, text: str) -> None:
    """Write ``config.yaml``; a resume with other settings keeps the earlier ones as ``config.1.yaml``, ..."""
    path = root / "config.yaml"
    if path.is_file() and path.read_text() != text:
        number = 1
        while (kept := root / f"config.{number}.yaml").exists():
            number += 1
        write_whole(kept, path.read_text())
    write_whole(path, text)
