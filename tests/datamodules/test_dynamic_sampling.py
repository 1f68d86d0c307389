"""Flat groups are replaced by further prompts: which are trained on, what counts as consumed, on one rank and two."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_lit.cli import main

Fit = Callable[..., Sequence[str]]

# The reward is the same for every answer to a sum that begins with an even digit.
REWARD = """
def odd(prompts, completions, question):
    return [float(int(q[0]) % 2 and sum(map(ord, c))) for q, c in zip(question, completions)]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "tests_odd_reward.py").write_text(REWARD)
    sys.path.insert(0, str(tmp_path))
    yield tmp_path
    sys.path.remove(str(tmp_path))
    sys.modules.pop("tests_odd_reward", None)


@pytest.fixture
def arguments(fit_arguments: Fit, tiny_llama: Path) -> Fit:
    own = ['--data.dataset_options={"high": 5}', "--data.val_prompts=0", "--trainer.max_steps=4"]
    own += ["--model.rollout.sampling.max_completion_length=6", "--model.rollout.refill_rounds=3"]
    own += ["--model.rewards=[tests_odd_reward.odd]", "--model.micro_batch_size=16", "--trainer.logger=false"]
    return lambda root, *extra: fit_arguments(tiny_llama, root, *own, *extra)


def records(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def served(root: Path) -> list[list[str]]:
    """Prompts of each step."""
    files = sorted((root / "completions").glob("*.jsonl"))
    return [list(dict.fromkeys(json.loads(line)["prompt"] for line in f.read_text().splitlines())) for f in files]


def test_flat_groups_are_replaced_and_the_cursor_moves_on(folder: Path, arguments: Fit) -> None:
    assert main(arguments(folder / "run", "--data.shuffle=false")) == 0
    steps, lines = served(folder / "run"), records(folder / "run")
    # rows 0 to 5 are 0+0 .. 0+5 (flat), 6 to 11 are 1+0 .. 1+5, then flat again, ...
    assert steps[0] == ["1+0=", "1+1=", "1+2=", "1+3="], "4 flat, 2 flat and 2 not, then 2 more"
    assert (lines[0]["rollout/refill_rounds"], lines[0]["rollout/refill_prompts"]) == (2, 6)
    assert lines[0]["rollout/refill_useful_share"] == 0.4
    assert lines[0]["rollout/zero_variance_groups"] == 0
    assert steps[1] == ["1+4=", "1+5=", "3+0=", "3+1="], "the next two, six flat ones in between"
    assert (lines[1]["rollout/refill_rounds"], lines[1]["rollout/refill_prompts"]) == (3, 6)
    assert steps[2] == ["3+2=", "3+3=", "3+4=", "3+5="]
    # the epoch ends with 5+x: nothing crosses into the next
    assert steps[3] == ["5+0=", "5+1=", "5+2=", "5+3="]


def test_the_cap_leaves_flat_groups_and_off_is_the_default(folder: Path, arguments: Fit) -> None:
    capped = ["--data.shuffle=false", "--model.rollout.refill_rounds=1", "--trainer.max_steps=1"]
    assert main(arguments(folder / "capped", *capped)) == 0
    # 4 flat, then 2 flat and 2 that differ: two of the flat ones fill the batch up
    assert served(folder / "capped")[0] == ["0+0=", "0+1=", "1+0=", "1+1="]
    assert records(folder / "capped")[0]["rollout/zero_variance_groups"] == 0.5
    off = [argument for argument in arguments(folder / "off") if "refill" not in argument]
    assert main([*off, "--data.shuffle=false", "--trainer.max_steps=1"]) == 0
    assert served(folder / "off")[0] == ["0+0=", "0+1=", "0+2=", "0+3="]
    assert "rollout/refill_prompts" not in records(folder / "off")[0]


def without_times(root: Path) -> list[dict[str, Any]]:
    return [{n: v for n, v in line.items() if not n.startswith(("perf/", "vram/"))} for line in records(root)]


def test_a_resumed_run_draws_the_same_replacements(folder: Path, arguments: Fit) -> None:
    assert main(arguments(folder / "whole")) == 0
    assert main(arguments(folder / "run", "--trainer.max_steps=2")) == 0
    assert main(arguments(folder / "run", "--ckpt_path=last")) == 0
    assert served(folder / "run") == served(folder / "whole")
    assert without_times(folder / "run") == without_times(folder / "whole")
    used = [prompt for step in served(folder / "run") for prompt in step]
    assert len(set(used)) == len(used)


def test_two_ranks_replace_what_one_does(folder: Path, arguments: Fit, two_ranks: Callable[..., Any]) -> None:
    more = ["--trainer.max_steps=3"]  # with refills of a single prompt, which leave a rank without rows
    assert main(arguments(folder / "one", *more)) == 0
    result = two_ranks(*arguments(folder / "two", *more))
    assert result.returncode == 0, result.stderr[-2000:]
    assert served(folder / "two") == served(folder / "one")
    for mine, theirs in zip(without_times(folder / "two"), without_times(folder / "one"), strict=True):
        for name, value in theirs.items():
            if "mismatch" not in name:
                assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_not_with_vigor(folder: Path, arguments: Fit, refused: Callable[..., None]) -> None:
    words = "model.rollout.refill_rounds=3: accepted is 0 with the allocator vigor"
    refused(arguments(folder / "run", "--model.rollout.allocator=vigor"), words)
