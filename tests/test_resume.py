"""A run that is killed and resumed is the run that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_lit.callbacks.metrics_file import without_timings

STEPS = 8


def start(arguments: Sequence[str], cwd: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([sys.executable, "-m", "grpo_lit", *arguments], cwd=cwd, env=environment)


def metrics(root: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) == len(lines), "a step was recorded twice"
    return [without_timings(line) for line in lines]


def prompts(root: Path) -> list[int]:
    """Dataset rows in the order they were trained on."""
    served: list[int] = []
    for file in sorted((root / "completions").glob("*.jsonl")):
        served += dict.fromkeys(json.loads(line)["prompt_index"] for line in file.read_text().splitlines())
    return served


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    root = tmp_path_factory.mktemp("undisturbed")
    assert start(arguments(tiny_llama, root), root).wait(240) == 0
    return root


def arguments(model: Path, root: Path) -> list[str]:
    return [
        "fit",
        f"--model.policy.path={model}",
        "--model.policy.dtype=fp32",
        "--data=MathDataModule",
        "--data.dataset=arithmetic",
        '--data.dataset_options={"high": 4}',
        "--data.prompt_template={question}=",
        "--data.prompts_per_step=4",
        "--data.val_prompts=5",
        "--model.rollout.group_size=4",
        "--model.rollout.sampling.max_completion_length=3",
        "--model.validation.sampling={temperature: 1.0, max_completion_length: 3}",
        "--model.rewards=[math_accuracy, think_format]",
        "--model.length_penalty=0.1",
        "--model.lora.rank=4",
        "--model.ppo_passes=2",
        "--model.micro_batch_size=5",
        "--model.optimizer=AdamW",
        "--model.optimizer.lr=0.01",
        "--model.lr_schedule.name=cosine",
        "--trainer.accelerator=cpu",
        f"--trainer.default_root_dir={root}",
        f"--trainer.max_steps={2 * STEPS}",
        "--trainer.val_check_interval=3",
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.faults
def test_killed_at_a_random_moment_and_resumed(
    seed: int,
    start_grpo_lit: Callable[..., Any],
    grpo_lit_command: Callable[..., subprocess.CompletedProcess[str]],
    undisturbed: Path,
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    draw = random.Random(seed)
    root = tmp_path / "run"
    process = start_grpo_lit(*arguments(tiny_llama, root))
    after = draw.randint(1, STEPS - 2)
    while not (root / "completions" / f"step_{after:06d}.jsonl").exists():
        assert process.poll() is None, "the run ended early"
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.25))
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = grpo_lit_command(*arguments(tiny_llama, root), "--ckpt_path", "last")
    assert resumed.returncode == 0, resumed.stderr
    assert metrics(root) == metrics(undisturbed)
    assert prompts(root) == prompts(undisturbed)
    served = prompts(root)
    assert len(served) == 4 * STEPS
    assert len(set(served[:20])) == 20, "an epoch serves each of its 20 prompts once"
    mine, theirs = (torch.load(r / "checkpoints/last.ckpt", weights_only=True) for r in (root, undisturbed))
    for name, value in theirs["state_dict"].items():
        assert torch.equal(mine["state_dict"][name], value), name
    assert not (root / "metrics.repeated.jsonl").exists()


def test_checkpoint_is_small_and_holds_no_base(undisturbed: Path) -> None:
    checkpoint = torch.load(undisturbed / "checkpoints/last.ckpt", weights_only=True)
    assert {name.rpartition(".")[2] for name in checkpoint["state_dict"]} == {"lora_A", "lora_B"}
    adapter = sum(value.numel() * value.element_size() for value in checkpoint["state_dict"].values())
    overhead = 64 * 1024  # loops, random number generators, names
    assert (undisturbed / "checkpoints/last.ckpt").stat().st_size <= 3 * (3 * adapter) + overhead


def test_run_folder_has_everything(undisturbed: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "checkpoints/last.ckpt", "adapter/adapter_config.json"):
        assert (undisturbed / name).is_file(), name
    events = EventAccumulator(str(undisturbed / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("val/accuracy")] == [0, 3, 6]
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, STEPS + 1))
    table = events.Tensors("rollout/completions/text_summary")[0].tensor_proto.string_val[0].decode()
    assert table.startswith("| prompt | completion | reward | tokens |")
    assert len(table.splitlines()) == 2 + 8
    best = [path for path in (undisturbed / "checkpoints").glob("*.ckpt") if path.name != "last.ckpt"]
    assert len(best) == 1
    lines = metrics(undisturbed)
    for kind in ("correct", "wrong", "unparsable", "timeout", "crashed"):
        assert f"rollout/verdict_{kind}" in lines[1]
    assert sum(lines[1][name] for name in lines[1] if "verdict" in name) == 16
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    validated = [line["step"] for line in lines if "val/accuracy" in line]
    assert validated == [0, 3, 6]
    # the best checkpoint is the first with the highest accuracy after training began
    accuracy = {line["step"]: line["val/accuracy"] for line in lines if "val/accuracy" in line and line["step"]}
    top = max(accuracy, key=lambda step: (accuracy[step], -step))
    assert torch.load(best[0], weights_only=True)["grpo_lit"]["rollout_step"] == top


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.faults
def test_checkpoint_of_another_model_is_refused_before_loading(
    undisturbed: Path, tiny_gpt2: Path, tiny_llama: Path, grpo_lit_command: Run
) -> None:
    checkpoint = str(undisturbed / "checkpoints/last.ckpt")
    base = arguments(tiny_llama, undisturbed)
    other = [*base, f"--model.policy.path={tiny_gpt2}", "--model.lora.targets=[c_attn]"]
    for extra, words in (
        ([*other, f"--ckpt_path={checkpoint}"], "base model"),
        ([*base, "--model.lora.rank=8", f"--ckpt_path={checkpoint}"], "LoRA section"),
    ):
        result = grpo_lit_command(*extra)
        assert result.returncode == 2, result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
        assert "ckpt_path" in result.stderr
        assert words in result.stderr
