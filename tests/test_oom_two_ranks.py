"""Memory runs out on one of two ranks: both replay, none waits, and the weights stay equal."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from grpo_lit.callbacks.metrics_file import without_timings

Run = Callable[..., "subprocess.CompletedProcess[str]"]
FAULTS: list[dict[str, Any]] = [
    {"phase": "rollout", "at": 2, "event": "forward", "rank": 1, "rollout_step": 0},
    {"phase": "reward", "at": 1, "rank": 0, "rollout_step": 0},
    {"phase": "score", "at": 30, "rank": 1, "rollout_step": 0},
    {"phase": "train", "at": 2, "event": "forward", "rank": 1, "rollout_step": 0},
    {"phase": "train", "at": 200, "rank": 0, "rollout_step": 1, "occurrence": 2},
    {"phase": "optimizer", "at": 3, "rank": 1, "rollout_step": 1},
    {"phase": "validate", "at": 2, "event": "forward", "rank": 1},
]


def arguments(fit_arguments: Callable[..., Sequence[str]], model: Path, root: Path, *extra: str) -> list[str]:
    return [
        *fit_arguments(model, root),
        "--data.prompts_per_step=5",
        "--model.rollout.group_size=6",
        "--model.micro_batch_size=4",
        "--model.ppo_passes=2",
        "--model.loss.beta=0.05",
        "--model.rewards=[user_rewards.digits]",
        "--model.optimizer=torch.optim.SGD",
        "--model.optimizer.lr=0.001",
        "--trainer.max_steps=4",
        "--trainer.devices=2",
        "--trainer.strategy=ddp",
        *extra,
    ]


@pytest.fixture(autouse=True)
def _rewards(tmp_path: Path) -> None:
    (tmp_path / "user_rewards.py").write_text(
        "import torch\n"
        "def digits(prompts, completions, **columns):\n"
        "    return [float(torch.tensor([c.isdigit() for c in text or ' ']).float().mean()) for text in completions]\n"
    )


@pytest.fixture
def faults(tmp_path: Path) -> Path:
    callbacks = [{"class_path": "grpo_lit.testing.FaultInjector", "init_args": fault} for fault in FAULTS]
    path = tmp_path / "faults.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"callbacks": callbacks}, "oom_replay": True}))
    return path


def test_both_ranks_replay(
    faults: Path, tiny_llama: Path, tmp_path: Path, fit_arguments: Callable[..., Sequence[str]], grpo_lit_command: Run
) -> None:
    for name, extra in (("whole", []), ("faulty", [f"--config={faults}"])):
        result = grpo_lit_command(*arguments(fit_arguments, tiny_llama, tmp_path / name, *extra))
        assert result.returncode == 0, result.stderr[-2000:]
    whole, faulty = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "faulty")
    )
    for mine, theirs in zip(map(without_timings, faulty), map(without_timings, whole), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            # the mismatch of engine and scoring is itself rounding, at these batch shapes
            absolute = 1e-4 if "mismatch" in key else 2e-6
            assert mine[key] == pytest.approx(value, rel=2e-5, abs=absolute), key
    assert faulty[-1]["oom/replays"] == len(FAULTS), "rank 0 counts every replay, those for rank 1 too"
    weights, expected = (load_file(tmp_path / n / "adapter/adapter_model.safetensors") for n in ("faulty", "whole"))
    assert max(float(value.abs().max()) for name, value in expected.items() if "lora_B" in name) > 1e-4
    for name, value in expected.items():
        assert torch.allclose(weights[name], value, atol=1e-6, rtol=0), name
    texts = [[p.read_text() for p in sorted((tmp_path / n / "completions").iterdir())] for n in ("whole", "faulty")]
    assert texts[0] == texts[1]


def test_a_rank_that_gives_up_takes_the_other_along_at_once(
    tiny_llama: Path, tmp_path: Path, fit_arguments: Callable[..., Sequence[str]], grpo_lit_command: Run
) -> None:
    extra = [
        "--oom_replay=true",
        "--trainer.callbacks+=grpo_lit.testing.FaultInjector",
        "--trainer.callbacks.phase=train",
        "--trainer.callbacks.event=forward",
        "--trainer.callbacks.times=9",
        "--trainer.callbacks.rank=1",
        "--trainer.val_check_interval=100",
        "--data.val_prompts=0",
    ]
    result = grpo_lit_command(*arguments(fit_arguments, tiny_llama, tmp_path / "run", *extra), timeout=120)
    assert result.returncode == 1, result.stderr[-2000:]
    assert "rank 1: out of memory in the train phase at one row at a time" in result.stderr
    assert "Traceback" not in result.stderr
