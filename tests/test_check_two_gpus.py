"""The verdicts of scripts/check_two_gpus.py: what failed, what was not run, and the numbers that tests record."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_two_gpus.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_two_gpus", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_report_of_pytest_becomes_verdicts(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_right(record_property):\n"
        "    record_property('of the update', '2.0e-07')\n"
        "def test_wrong(): assert 1 == 2, 'no such luck'\n"
        "def test_broken(missing): pass\n"
        "@pytest.mark.skip(reason='needs two devices')\n"
        "def test_left_out(): pass\n"
    )
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={tmp_path / 'r.xml'}", "test_it.py"]
    subprocess.run([sys.executable, *command], cwd=tmp_path, stdout=subprocess.DEVNULL)
    right, wrong, broken, left_out = map(str, script.read_report(tmp_path / "r.xml"))
    assert right == "held      test_right; of the update 2.0e-07"
    assert wrong.startswith("NOT HELD  test_wrong; AssertionError: no such luck")
    assert broken.startswith("NOT HELD  test_broken")
    assert left_out == "not run   test_left_out; needs two devices"


def test_what_was_not_run_is_not_held(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert script.main([str(tmp_path / "logs")]) == 1
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["not", "run"]] * len(script.PARTS)


def test_a_suite_that_does_not_start_is_not_held(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "killed.xml").write_text("of an earlier run")
    setting = script.Setting(tmp_path, None, None)
    (verdict,) = script._tests(setting, "killed", ["--no-such-option"])
    assert str(verdict) == f"NOT HELD  pytest: exit code 4, see {tmp_path / 'killed.txt'}"
