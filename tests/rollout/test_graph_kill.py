"""Killed inside a rollout of the graph engine, twice, and resumed: every row there once, the same to the last bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lit.callbacks.metrics_file import without_timings

WORKER = Path(__file__).with_name("kill_in_rollout.py")
STEPS = 3


def arguments(model: Path | str, root: Path, device: str, length: int) -> list[str]:
    """5 prompts x 4 rows a step, fewer rows in flight than that, one-digit sums."""
    return [
        "fit",
        f"--model.policy.path={model}",
        "--model.policy.dtype=fp32",
        "--data=MathDataModule",
        "--data.dataset=arithmetic",
        '--data.dataset_options={"high": 4}',
        "--data.prompt_template={question}=",
        "--data.prompts_per_step=5",
        "--data.val_prompts=0",
        "--model.rollout.engine=graph",
        "--model.rollout.group_size=4",
        "--model.rollout.batch_size=7",
        f"--model.rollout.sampling.max_completion_length={length}",
        "--model.rewards=[kill_in_rollout.odd_digits]",
        "--model.loss.mask_truncated=false",
        "--model.lora.rank=4",
        "--model.optimizer=AdamW",
        "--model.optimizer.lr=0.01",
        "--model.lr_schedule.warmup_steps=0",
        "--model.micro_batch_size=10",
        "--adaptive_micro_batch=false",
        f"--trainer.accelerator={device}",
        "--trainer.devices=1",
        "--trainer.logger=false",
        f"--trainer.default_root_dir={root}",
        f"--trainer.max_steps={STEPS}",
    ]


def run_all(requests: list[dict[str, Any]], mode: str, cwd: Path) -> tuple[list[int], str]:
    """Exit status of each command, and what they said."""
    done = subprocess.run(
        [sys.executable, str(WORKER), mode],
        input="".join(json.dumps(request) + "\n" for request in requests),
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )
    return [int(status) for status in done.stdout.split()], done.stderr[-6000:]


def killed_twice_and_resumed(model: Path | str, folder: Path, device: str, length: int) -> tuple[Path, Path]:
    """Run folders of a fit killed in its second and third rollout, and of one that was not."""
    whole, killed = folder / "whole", folder / "killed"
    plan = [(whole, 0, False), (killed, 2, False), (killed, 2, True), (killed, 0, True)]
    requests = [
        {
            "arguments": [*arguments(model, root, device, length), *(["--ckpt_path=last"] if resume else [])],
            "rollout": rollout,
            "tokens": 20 * length // 2,
        }
        for root, rollout, resume in plan
    ]
    chains = [requests] if device == "cpu" else [requests[:1], requests[1:]]  # side by side where a start takes long
    with ThreadPoolExecutor() as pool:
        ends = list(pool.map(lambda chain: run_all(chain, "fork" if device == "cpu" else "spawn", folder), chains))
    assert sum((status for status, _ in ends), []) == [0, -9, -9, 0], "".join(said for _, said in ends)
    return whole, killed


def assert_same_run(whole: Path, killed: Path) -> None:
    names = [f"step_{step:06d}.jsonl" for step in range(1, STEPS + 1)]
    for root in (whole, killed):
        assert sorted(file.name for file in (root / "completions").iterdir()) == names
    served = []
    for name in names:
        text = (killed / "completions" / name).read_text()
        assert text == (whole / "completions" / name).read_text(), name
        rows = [json.loads(line) for line in text.splitlines()]
        assert len(rows) == 20
        served += dict.fromkeys(row["prompt_index"] for row in rows)
    assert len(served) == 5 * STEPS
    mine, theirs = (
        [without_timings(json.loads(line)) for line in (root / "metrics.jsonl").read_text().splitlines()]
        for root in (killed, whole)
    )
    assert mine == theirs
    assert [line["step"] for line in mine] == list(range(1, STEPS + 1))
    assert len({line["train/grad_norm"] for line in mine}) == STEPS, "every step trains"
    assert not (killed / "metrics.repeated.jsonl").exists()
    mine, theirs = (
        torch.load(root / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for root in (killed, whole)
    )
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


def test_resumes_with_the_same_rows(tiny_llama: Path, tmp_path: Path) -> None:
    assert_same_run(*killed_twice_and_resumed(tiny_llama, tmp_path, "cpu", 6))


@pytest.mark.gpu
def test_resumes_with_the_same_rows_on_the_gpu(smollm2: str, tmp_path: Path) -> None:
    assert_same_run(*killed_twice_and_resumed(smollm2, tmp_path, "gpu", 16))
