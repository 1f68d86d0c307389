"""`grpo-lit compare`: differences of settings, results with intervals, curves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from grpo_lit.cli import main
from grpo_lit.evaluation.compare_runs import differences, evaluation_rows, read_runs
from grpo_lit.evaluation.intervals import wilson_interval


def altered(run: Path, folder: Path) -> Path:
    """A copy of a run with another learning rate and better numbers."""
    shutil.copytree(run, folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["model"]["optimizer"]["init_args"]["lr"] = 0.5
    config["data"]["init_args"]["seed"] = 7
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "val/accuracy" in line:
            line["val/accuracy"] = 0.75
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_two_runs_side_by_side(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = altered(finished_run, tmp_path / "other")
    assert main(["compare", str(finished_run), str(other), f"--output={tmp_path / 'out'}"]) == 0
    printed = capsys.readouterr().out
    text = (tmp_path / "out/comparison.md").read_text()
    assert text in printed
    runs = read_runs([str(finished_run), str(other)])
    assert dict(differences(runs)) == {"data.seed": [42, 7], "model.optimizer.lr": [0.02, 0.5]}
    assert "| `model.optimizer.lr` | 0.02 | 0.5 |" in text
    _, low, high = wilson_interval(6, 8)
    assert f"0.750 [{low:.3f}, {high:.3f}]" in text
    row = next(line for line in text.splitlines() if line.startswith("| other |"))
    assert row.split("|")[2].strip() == "4"
    assert (tmp_path / "out/curves.png").read_bytes().startswith(b"\x89PNG")


def test_benchmarks_in_training_are_compared_in_pairs(finished_run: Path, tmp_path: Path) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    for index, run in enumerate(runs):
        shutil.copytree(finished_run, run)
        folder = run / "evaluation" / "step_000004"
        folder.mkdir(parents=True)
        head = {"model": "policy", "dataset": "sums", "protocol": "deterministic", "sample": 0}
        rows = [{**head, "example": i, "correct": i < 4 + 5 * index} for i in range(10)]
        (folder / "verdicts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row,) = evaluation_rows(read_runs([str(run) for run in runs]))
    assert row[:4] == ["sums", "10", "b", "a"]
    assert row[4].startswith("+0.500 [")
    assert float(row[5]) == pytest.approx(2 / 2**5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "two run folders"),
        (["RUN"], "two run folders"),
        (["RUN", "missing"], "metrics.jsonl"),
        (["RUN", "RUN"], "different folders"),
    ],
)
def test_compare_refuses(arguments: list[str], words: str, finished_run: Path, refused: Callable[..., None]) -> None:
    refused(["compare", *(str(finished_run) if a == "RUN" else a for a in arguments)], words)
