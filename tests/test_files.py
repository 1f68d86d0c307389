"""A run's files: whole or not at all, and a full disk in one line."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from grpo_lit.callbacks.completions_file import write_records
from grpo_lit.callbacks.metrics_file import read_metrics
from grpo_lit.cli.run_folder import locked, set_earlier_run_aside
from grpo_lit.errors import SystemFault
from grpo_lit.files import append_line, write_whole

pytestmark = pytest.mark.faults


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """The kernel refuses to let any file of this process grow further."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_named() -> None:
    with pytest.raises(SystemFault, match=r"/dev/full can't be written \(No space left on device\)"):
        append_line(Path("/dev/full"), {"step": 1})


def test_of_a_line_that_does_not_fit_nothing_stays(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    append_line(file, {"step": 0})
    with no_file_above(100), pytest.raises(SystemFault, match=r"metrics.jsonl can't be written \(File too large\)"):
        append_line(file, {"step": 1, "text": "x" * 200})
    append_line(file, {"step": 1})
    assert [line["step"] for line in read_metrics(file)] == [0, 1]


def test_whole_file_or_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    write_whole(file, "old")
    with no_file_above(100), pytest.raises(SystemFault, match=r"config.yaml can't be written"):
        write_whole(file, "x" * 200)
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    left = tmp_path / "checkpoints" / ".last.ckpt.123.tmp"
    kept = tmp_path / "checkpoints" / "last.ckpt"
    for file in (left, kept):
        file.write_text("half")
    with locked(tmp_path):
        assert not left.exists()
        assert kept.exists()


def test_a_new_run_moves_the_earlier_one_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--trainer.default_root_dir .`` in a project with a config.yaml of its own."""
    project = tmp_path / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    for name in ("config.yaml", "train.py", "data.jsonl"):
        (project / name).write_text("mine")
    with locked(Path()):
        assert set_earlier_run_aside(Path()) is None
    (project / "metrics.jsonl").write_text("{}")
    (project / "evaluations").mkdir()
    with locked(Path()):
        kept = set_earlier_run_aside(Path())
    assert kept == tmp_path / "project.1"
    assert {path.name for path in kept.iterdir()} == {"metrics.jsonl", "evaluations"}
    assert {path.name for path in project.iterdir()} == {"config.yaml", "train.py", "data.jsonl", "run.lock"}


def test_a_copied_run_is_moved_from_between_what_else_is_there(tmp_path: Path) -> None:
    root = tmp_path / "run"
    (root / "checkpoints").mkdir(parents=True)
    for name in ("metrics.jsonl", "notes.txt", "config.yaml"):
        (root / name).write_text("")
    with locked(root):
        assert set_earlier_run_aside(root) == tmp_path / "run.1"
    assert {path.name for path in root.iterdir()} == {"notes.txt", "run.lock"}


def test_text_that_no_encoding_knows_is_kept_as_its_escape(tmp_path: Path) -> None:
    record = {"completion": "a\ud800b \u2028 \u2029 \x85 \x1c \r \u05d0"}
    write_records(tmp_path, 1, [record, record])
    lines = (tmp_path / "step_000001.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == [record, record]


@pytest.mark.parametrize("line", [b'{"step": 2, "x', b"[1]", b'{"loss": 1}', b"[" * 100_000, b"\xff\xfe"])
def test_damaged_line_of_metrics_is_named(line: bytes, tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 0}\n' + line + b'\n{"step": 2}\n')
    with pytest.raises(SystemFault, match=r"metrics.jsonl, line 2 is damaged"):
        read_metrics(file, repair=True)
    assert file.read_bytes().count(b"\n") == 3
