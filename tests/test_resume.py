"""A run that is killed and resumed is the run that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from grpo_lit.callbacks.metrics_file import without_timings

STEPS = 8
OPTIONS = (
    '--data.dataset_options={"high": 4}',
    "--data.val_prompts=5",
    "--model.rollout.sampling.max_completion_length=3",
    "--model.validation.sampling={temperature: 1.0, max_completion_length: 3}",
    "--model.rewards=[math_accuracy, think_format]",
    "--model.length_penalty=0.1",
    "--model.ppo_passes=2",
    "--model.micro_batch_size=5",
    "--model.optimizer=torch.optim.AdamW",
    "--model.optimizer.lr=0.01",
    "--model.lr_schedule.name=cosine",
    f"--trainer.max_steps={2 * STEPS}",
    "--trainer.val_check_interval=3",
)
Fit = Callable[..., Sequence[str]]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


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
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, _forks: Callable[..., Any], fit_arguments: Fit, tiny_llama: Path
) -> Path:
    root = tmp_path_factory.mktemp("undisturbed")
    assert _forks(fit_arguments(tiny_llama, root, *OPTIONS), root, dict(os.environ)).wait() == 0
    return root


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.faults
def test_killed_at_a_random_moment_and_resumed(
    seed: int,
    start_grpo_lit: Callable[..., Any],
    grpo_lit_command: Run,
    fit_arguments: Fit,
    undisturbed: Path,
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    draw = random.Random(seed)
    root = tmp_path / "run"
    arguments = fit_arguments(tiny_llama, root, *OPTIONS)
    process = start_grpo_lit(*arguments)
    after = draw.randint(2, STEPS - 2)  # there is a checkpoint by then
    while not (root / "completions" / f"step_{after:06d}.jsonl").exists():
        assert process.poll() is None, "the run ended early"
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.25))
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = grpo_lit_command(*arguments, "--ckpt_path", "last")
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


@pytest.mark.faults
def test_checkpoint_of_another_model_is_refused_before_loading(
    undisturbed: Path, tiny_gpt2: Path, tiny_llama: Path, fit_arguments: Fit, refused: Callable[..., None]
) -> None:
    base = fit_arguments(tiny_llama, "run", *OPTIONS, f"--ckpt_path={undisturbed / 'checkpoints/last.ckpt'}")
    refused([*base, f"--model.policy.path={tiny_gpt2}", "--model.lora.targets=[c_attn]"], "ckpt_path", "base model")
    refused([*base, "--model.lora.rank=8"], "ckpt_path", "LoRA section")
