"""The commands of examples/README.md run, in that order, and do what they say."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def commands() -> list[str]:
    block = re.search(r"```bash\n(.*?)```", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.S)
    assert block is not None
    return [line for line in block[1].splitlines() if not line.startswith("cd ")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(EXAMPLES, tmp_path_factory.mktemp("examples") / "examples"))


def test_examples_run_as_written(folder: Path) -> None:
    outputs = []
    for command in commands():
        program, *arguments = shlex.split(command)
        start = [sys.executable, "-m", "grpo_lit"] if program == "grpo-lit" else [sys.executable]
        result = subprocess.run(
            [*start, *arguments],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, f"{command}\n{result.stderr[-2000:]}"
        outputs.append(result.stdout)
    reward, rows, dataset, callback, run = outputs
    assert "runs/reward" in reward
    assert "100 rows in doubles.jsonl" in rows
    assert "80 training prompts, 20 held out" in dataset
    assert "seconds by phase" in callback
    assert re.search(r"adapter: 28 matrices, [\d,]+ numbers", run), run
