"""grpo-lit bench step on the CPU: every phase is there, and it says that it measures nothing."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path

import pytest

from grpo_lit.bench import step
from grpo_lit.errors import UserError

SMALL = ["--cpu", "--shape", "tiny", "--prompts", "2", "--rows", "2", "--micro-batch", "2", "--prompt-tokens", "8"]
SMALL += ["--completion-tokens", "6", "--steps", "2"]


def test_phases_table_and_csv_beside_a_candidate_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "step.csv"
    assert step.main([*SMALL, "--candidates", "vllm", "hf", "--csv", str(file)]) == 1
    out, told = capsys.readouterr()
    assert "vllm" in told
    assert "hf: " in told
    assert "s step 0: train" in told
    assert "NO MEASUREMENT" in out
    assert "4 completions of 8 + 6 tokens" in out
    with file.open() as lines:
        (row,) = csv.DictReader(lines)
    assert row["candidate"] == "hf"
    assert float(row["completion_length"]) == 6
    parts = [float(row[f"{phase}_s"]) for phase in ("rollout", "train", "optimizer")]
    assert all(part > 0 for part in parts)
    assert float(row["step_s"]) >= max(parts)
    assert row["torch"]
    assert row["date"]


def test_a_configuration_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--trainer.max_steps=2", "--data.prompts_per_step=2", "--model.rollout.group_size=2"]
    arguments = ["--cpu", "--json", "--task", "quickstart", "--steps", "2", "--candidates", "graph", *small]
    assert step.main(arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["candidate"], row["task"], row["shape"]) == ("graph", "quickstart", None)
    assert 1 < row["completion_length"] < 4, "its rows end by themselves"
    (note,) = step._notes([row, row | {"candidate": "hf", "step_s": 4 * row["step_s"]}])
    assert note.startswith("graph against hf: step 0.25x, rollout 1.00x")


def test_trl_is_a_candidate_only_where_it_is_installed() -> None:
    installed = importlib.util.find_spec("trl") is not None
    assert ("trl" in step.parser().parse_args([]).candidates) == installed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--candidates", "verl"], "--candidates=.*verl.*: accepted is graph \\| "),
        (["--rows", "1"], "--rows=1: accepted is at least 2"),
        (["--prompt-tokens", "0"], "--prompt-tokens=0: accepted is at least 1"),
        (["--timeout", "-1"], "--timeout=-1.0: accepted is above 0"),
        (["--timeout", "nan"], "--timeout=nan: accepted is above 0"),
        (["--task", "quickstart", "--candidates", "trl"], "--candidates"),
        (["--task", "quickstart", "--rows", "4"], "--rows=4: accepted is only without --task"),
        (["--task", "quickstart", "--shape", "tiny"], "--shape='tiny': accepted is only without --task"),
        (["--cpu", "--profile"], "--profile=True: accepted is only without --cpu"),
        (["--shape", "tiny", "--prompt-tokens", "4000"], "--completion-tokens=768: accepted is at most 96"),
    ],
)
def test_mistakes(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        step.main(arguments)
