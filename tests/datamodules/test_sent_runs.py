"""SENT on the real commands: the cache survives kills, and a run serves its order on any ranks, killed or not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
Start = Callable[..., Any]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def arguments(model: Path, *extra: str) -> list[str]:
    """30 prompts in two stages of 15, 4 a step."""
    return [
        f"--model.policy.path={model}",
        "--model.policy.dtype=fp32",
        "--data=MathDataModule",
        "--data.dataset=arithmetic",
        '--data.dataset_options={"high": 5}',
        "--data.prompt_template={question}=",
        "--data.prompts_per_step=4",
        "--data.val_prompts=6",
        "--model.rollout.group_size=4",
        "--model.rollout.sampling.max_completion_length=2",
        "--model.validation.sampling={temperature: 1.0, max_completion_length: 2}",
        "--model.lora.rank=4",
        "--model.micro_batch_size=16",
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        *extra,
    ]


def sent_arguments(model: Path, output: Path) -> list[str]:
    extra = [f"--sent.output={output}", "--sent.samples=3", "--sent.prompts_per_batch=2"]
    return ["sent", *arguments(model, *extra)]


def fit_arguments(model: Path, cache: Path, root: Path, *extra: str) -> list[str]:
    own = [f"--data.sent_cache={cache}", f"--trainer.default_root_dir={root}", "--trainer.val_check_interval=1000"]
    return ["fit", *arguments(model, *own, "--trainer.max_steps=8", *extra)]


@pytest.fixture(scope="module")
def cache(_forks: Start, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    command = _forks(sent_arguments(tiny_llama, folder / "sent.jsonl"), folder, ENVIRONMENT)
    assert command.wait() == 0, command.read()
    return folder / "sent.jsonl"


def passed(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def served(root: Path) -> list[list[int]]:
    """Dataset rows of each step, in order."""
    files = sorted((root / "completions").glob("*.jsonl"))
    return [list(dict.fromkeys(json.loads(line)["prompt_index"] for line in f.read_text().splitlines())) for f in files]


def test_cache_goes_from_easy_to_hard_with_table_and_figure(
    cache: Path, grpo_lit_command: Run, tiny_llama: Path
) -> None:
    found = entries(cache)
    assert len(found) == 30
    keys = [(e["entropy"], -e["pass_rate"], e["index"]) for e in found]
    assert keys == sorted(keys)
    assert len({e["entropy"] for e in found}) == 3
    table = cache.with_suffix(".md").read_text()
    assert "semantic entropy of 30 prompts, 3 answers each" in table
    assert cache.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    before = cache.read_bytes()
    assert "is complete already" in passed(grpo_lit_command(*sent_arguments(tiny_llama, cache)))
    assert cache.read_bytes() == before


def batches(output: Path) -> int:
    """Lines of a cache's unfinished file, its first line included."""
    partial = output.with_name(output.name + ".partial")
    try:
        return partial.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


@pytest.mark.faults
def test_cache_killed_ten_times_ends_the_same(
    cache: Path, start_grpo_lit: Start, tiny_llama: Path, tmp_path: Path
) -> None:
    draw = random.Random(7)
    kills = number = went_on = 0
    while kills < 10:
        output = tmp_path / f"{number}.jsonl"
        number += 1
        while not output.exists():
            command = start_grpo_lit(*sent_arguments(tiny_llama, output))
            if kills < 10:
                # by the batches written, not by the clock, which says little where other programs run too
                goal, end = batches(output) + draw.randint(0, 4), time.monotonic() + 60
                while batches(output) < goal and not output.exists() and time.monotonic() < end:
                    time.sleep(0.001)
                time.sleep(draw.uniform(0, 0.05))
                command.send_signal(signal.SIGKILL)
            status = command.wait()
            assert status in (0, -signal.SIGKILL), command.read()
            kills += status != 0
            went_on += "going on after" in command.read()[0]
        assert output.read_bytes() == cache.read_bytes()
    assert went_on >= 3, "no kill fell into the sampling"


def test_first_epoch_is_the_low_entropy_half_on_one_rank_and_on_two(
    cache: Path, grpo_lit_command: Run, two_ranks: Run, tiny_llama: Path, tmp_path: Path
) -> None:
    order = [entry["index"] for entry in entries(cache)]
    one = tmp_path / "one"
    passed(grpo_lit_command(*fit_arguments(tiny_llama, cache, one)))
    steps = served(one)
    assert [len(step) for step in steps] == [4, 4, 4, 3] * 2
    assert sum(steps[:4], []) == order[:15]
    assert sum(steps[4:], []) == order[15:]
    two = tmp_path / "two"
    passed(two_ranks(*fit_arguments(tiny_llama, cache, two)))
    assert served(two) == steps


@pytest.mark.faults
def test_five_kills_and_still_each_prompt_once_an_epoch(
    cache: Path, start_grpo_lit: Start, grpo_lit_command: Run, tiny_llama: Path, tmp_path: Path
) -> None:
    """Uneven stages: 15 prompts are no whole number of steps, and both epochs end in a smaller one."""
    order = [entry["index"] for entry in entries(cache)]
    draw, root = random.Random(3), tmp_path / "run"
    run = fit_arguments(tiny_llama, cache, root, "--trainer.max_steps=8")
    for kill, after in enumerate((2, 3, 4, 6, 7)):  # the first leaves a checkpoint, of step 1 at least
        more = ["--ckpt_path=last"] if kill else []
        command = start_grpo_lit(*run, *more)
        limit = time.monotonic() + 60
        while not (root / "completions" / f"step_{after:06d}.jsonl").exists() and time.monotonic() < limit:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.08))
        command.send_signal(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL, command.read()
    passed(grpo_lit_command(*run, "--ckpt_path=last"))
    steps = served(root)
    assert sum(steps, []) == order
    assert len(steps) == 8
    undisturbed = tmp_path / "whole"
    passed(grpo_lit_command(*fit_arguments(tiny_llama, cache, undisturbed, "--trainer.max_steps=8")))
    for file in sorted((undisturbed / "completions").glob("*.jsonl")):
        assert (root / "completions" / file.name).read_text() == file.read_text()
