"""`grpo-lit verify`: an explanation, and a confusion table over a file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lit.cli import main


def test_explains_a_verdict(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["verify", "--response", r"so \boxed{1/2}", "--gold", "0.5"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("verdict   correct: ")
    assert "found by: boxed" in out
    monkeypatch.setattr("sys.stdin", io.StringIO("It is 25."))
    assert main(["verify", "--response=-", "--gold", "25%", "--policy.percent=value"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("verdict   wrong: ")
    assert "policy    units lenient, percent value, currency lenient, calculations refused" in out


def test_confusion_table_over_real_answers(shared_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"--file={shared_data / 'verifier_cases.jsonl'}", "--baseline=false"]) == 0
    out = capsys.readouterr().out
    assert "| right in the file | 316 | 1 |" in out
    assert "| wrong in the file | 2 | 189 |" in out
    assert "agreement 505 of 508 = 99.41 %" in out
    assert "3 where grpo-lit and the file differ" in out
    assert out.count('"gold"') == 3


def test_small_file_with_the_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"response": r"\boxed{x \le 2}", "gold": r"(-\infty,2]", "correct": True},
        {"response": r"\boxed{3}", "gold": "4", "correct": "false"},
        {"response": r"\boxed{5}", "answer": 5.0, "correct": 1},
    ]
    (tmp_path / "cases.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["verify", f"--file={tmp_path / 'cases.jsonl'}"]) == 0
    ours, theirs = capsys.readouterr().out.split("| math-verify alone")
    assert "agreement 3 of 3 = 100.00 %" in ours
    assert "| right in the file | 1 | 1 |" in theirs, "a relation for an interval is a known miss of it"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "response=None"),
        (["--response=x"], "gold=None"),
        (["--response=x", "--gold=1", "--file=y"], "one of the two"),
        (["--file=nowhere.jsonl"], "file='nowhere.jsonl'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], words: str, refused: Callable[..., None]) -> None:
    refused(["verify", *arguments], words)
