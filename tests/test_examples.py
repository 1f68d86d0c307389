"""The commands of examples/README.md run, in that order, and do what they say."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
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


def test_examples_run_as_written(
    folder: Path, grpo_lit_command: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    outputs = []
    for command in commands():
        program, *arguments = shlex.split(command)
        if program == "grpo-lit":
            result = grpo_lit_command(*arguments, cwd=folder)
        else:
            script = [sys.executable, *arguments]
            result = subprocess.run(script, cwd=folder, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, f"{command}\n{result.stderr[-2000:]}"
        outputs.append(result.stdout)
    reward, rows, dataset, callback, run = outputs
    assert "runs/reward" in reward
    assert "100 rows in doubles.jsonl" in rows
    assert "80 training prompts, 20 held out" in dataset
    assert "seconds by phase" in callback
    assert re.search(r"adapter: 28 matrices, [\d,]+ numbers", run), run
