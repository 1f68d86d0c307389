"""The commands: what they print, the figures they write, and their refusals."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from grpo_lit.cli import main as grpo_lit
from grpo_lit.toy.cli import main, toy_length, toy_train

PNG = b"\x89PNG\r\n\x1a\n"


def test_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["train", "--exact", "--seeds", "0", "1", "--output", str(tmp_path / "new")]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "0.971157 0.973650\n" in out
    assert "4 passes" in out
    assert "1 pass" in out
    assert "0.692944" in out
    figure = tmp_path / "new" / "toy_train.png"
    assert figure.read_bytes().startswith(PNG)
    assert str(figure) in out


def test_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["length", "--groups", "500", "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for figure in ("0.09167075", "0.14661711", "0.28812000", "66.67 %"):
        assert figure in out
    line = next(line for line in out.splitlines() if "0.28812000" in line)
    assert "derivative of the expected reward" in line
    assert "Only the row alpha = 1 is the derivative of the expected reward" in out
    assert (tmp_path / "toy_length.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--passes", "0"],
        ["train", "--updates", "0"],
        ["train", "--group_size", "0"],
        ["length", "--groups", "1"],
        ["length", "--group_size", "1"],
        ["length", "--groups", "2", "--alphas", "1.5"],
    ],
)
def test_mistakes_end_with_code_2_and_one_line(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert grpo_lit(["toy", *argv, "--output", str(tmp_path)]) == 2
    message = capsys.readouterr().err.strip()
    assert "\n" not in message
    assert argv[-2].removeprefix("--").rstrip("s") in message
    assert list(tmp_path.iterdir()) == []


def test_functions_have_defaults_for_everything() -> None:
    for function in (toy_train, toy_length):
        assert all(
            parameter.default is not inspect.Parameter.empty
            for parameter in inspect.signature(function).parameters.values()
        )
