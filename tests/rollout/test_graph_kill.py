"""Killed or interrupted inside a rollout of the graph engine and resumed: every row once, the same to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
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
        "--model.optimizer=torch.optim.AdamW",
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


def run_all(requests: list[dict[str, Any]], mode: str, said: Path) -> list[int]:
    """Exit status of each command; what they say goes to a file."""
    with said.open("w") as file:
        done = subprocess.run(
            [sys.executable, str(WORKER), mode],
            input="".join(json.dumps(request) + "\n" for request in requests),
            cwd=said.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            timeout=270,
            check=False,
        )
    return [int(status) for status in done.stdout.split()]


def broken_off_and_resumed(
    model: Path | str, folder: Path, device: str, length: int, ends: Sequence[tuple[int, list[int], int]]
) -> tuple[Path, Path]:
    """Run folders of a fit that was broken off and resumed, and of one that was not.

    Args:
        model: what is trained.
        folder: where.
        device: cpu or gpu.
        length: of completions, tokens.
        ends: for each command its rollout that is broken off, the signals and the exit status to expect.
    """
    whole, broken = folder / "whole", folder / "broken"
    requests = [{"arguments": arguments(model, whole, device, length), "rollout": 0, "signals": []}]
    for number, (rollout, signals, _) in enumerate([*ends, (0, [], 0)]):
        command = arguments(model, broken, device, length) + ["--ckpt_path=last"] * (number > 0)
        requests.append({"arguments": command, "rollout": rollout, "signals": signals})
    # one after the other in one process, or side by side where a start takes long
    mode, chains = ("fork", [requests]) if device == "cpu" else ("spawn", [requests[:1], requests[1:]])
    said = [folder / f"said_{number}.txt" for number in range(len(chains))]
    with ThreadPoolExecutor() as pool:
        statuses = sum(pool.map(run_all, chains, [mode] * len(chains), said), [])
    expected = [0, *(status for *_, status in ends), 0]
    assert statuses == expected, f"{statuses}, not {expected}\n" + "".join(file.read_text()[-6000:] for file in said)
    return whole, broken


def assert_same_run(whole: Path, broken: Path) -> None:
    names = [f"step_{step:06d}.jsonl" for step in range(1, STEPS + 1)]
    for root in (whole, broken):
        assert sorted(file.name for file in (root / "completions").iterdir()) == names
    served = []
    for name in names:
        text = (broken / "completions" / name).read_text()
        assert text == (whole / "completions" / name).read_text(), name
        rows = [json.loads(line) for line in text.splitlines()]
        assert len(rows) == 20
        served += dict.fromkeys(row["prompt_index"] for row in rows)
    assert len(served) == 5 * STEPS
    mine, theirs = (
        [without_timings(json.loads(line)) for line in (root / "metrics.jsonl").read_text().splitlines()]
        for root in (broken, whole)
    )
    assert mine == theirs
    assert [line["step"] for line in mine] == list(range(1, STEPS + 1))
    assert len({line["train/grad_norm"] for line in mine}) == STEPS, "every step trains"
    assert not (broken / "metrics.repeated.jsonl").exists()
    mine, theirs = (
        torch.load(root / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for root in (broken, whole)
    )
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


def test_resumes_with_the_same_rows(tiny_llama: Path, tmp_path: Path) -> None:
    """SIGTERM finishes the first step, two of Ctrl-C lose the second, and so does a kill; another one in the third."""
    interrupted = [(1, [signal.SIGTERM], 0), (1, [signal.SIGINT, signal.SIGINT], 130)]
    ends = [*interrupted, (1, [signal.SIGKILL], -signal.SIGKILL), (2, [signal.SIGKILL], -signal.SIGKILL)]
    assert_same_run(*broken_off_and_resumed(tiny_llama, tmp_path, "cpu", 6, ends))


@pytest.mark.gpu
def test_resumes_with_the_same_rows_on_the_gpu(smollm2: str, tmp_path: Path) -> None:
    """Killed in the second rollout and in the third."""
    killed = (2, [signal.SIGKILL], -signal.SIGKILL)
    assert_same_run(*broken_off_and_resumed(smollm2, tmp_path, "gpu", 16, [killed, killed]))
