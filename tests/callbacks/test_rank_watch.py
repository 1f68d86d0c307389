"""A killed rank: the other ends soon, says which one is gone, and the run goes on exactly from its checkpoint."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_lit.testing.ranks import run_on_ranks

STEPS = 6


def command(model: Path, root: Path, accelerator: str, *extra: str) -> list[str]:
    return [
        *(sys.executable, "-m", "grpo_lit", "fit"),
        f"--model.policy.path={model}",
        "--model.policy.dtype=fp32",
        "--data=MathDataModule",
        "--data.dataset=arithmetic",
        "--data.prompt_template={question}=",
        "--data.prompts_per_step=2",
        "--data.val_prompts=0",
        "--model.rollout.sampling.max_completion_length=6",
        "--model.rollout.group_size=2",
        "--model.lora.rank=4",
        "--model.optimizer=torch.optim.SGD",
        "--model.optimizer.lr=0.001",
        f"--trainer.accelerator={accelerator}",
        "--trainer.devices=2",
        "--trainer.strategy=ddp",
        "--checkpoint.every_n_rollout_steps=1",
        f"--trainer.default_root_dir={root}",
        f"--trainer.max_steps={STEPS}",
        *extra,
    ]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def lines(root: Path) -> list[dict[str, float]]:
    file = root / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def rank_one_of(pid: int) -> int:
    """The process that Lightning's launcher started for rank 1."""
    for _ in range(600):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for child in map(int, children):
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if b"LOCAL_RANK=1" in environment:
                return child
        time.sleep(0.05)
    raise AssertionError("rank 1 did not start")


@pytest.fixture(
    scope="module",
    params=[
        "cpu",
        pytest.param(
            "gpu",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices on one host"),
            ],
        ),
    ],
)
def accelerator(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@dataclass(frozen=True)
class Ending:
    """What became of a run whose rank was killed."""

    log: str
    exited_in_s: float
    """Until both processes were gone; infinite where one was not."""


def kill_a_rank(victim: int, model: Path, folder: Path, accelerator: str) -> Ending:
    """Start a run, kill one of its ranks after some steps, and wait for the other to end."""
    root, log = folder / f"killed_{victim}", folder / f"log_{victim}.txt"
    slowly = ("--model.rewards=[math_accuracy,slow_rewards.slow]", "--model.reward_weights=[1, 1]")
    with log.open("w") as file:
        main = subprocess.Popen(
            command(model, root, accelerator, *slowly), cwd=folder, env=ENVIRONMENT, stdout=file, stderr=file
        )
        pids = {0: main.pid, 1: rank_one_of(main.pid)}
        deadline = time.monotonic() + 120
        while len(lines(root)) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert main.poll() is None, log.read_text()[-2000:]
        os.kill(pids[victim], signal.SIGKILL)
        killed = time.monotonic()
        main.wait(timeout=60)
        while Path(f"/proc/{pids[1]}/stat").exists() and time.monotonic() - killed < 60:
            time.sleep(0.1)
        gone = not Path(f"/proc/{pids[1]}/stat").exists()
    return Ending(log.read_text(), time.monotonic() - killed if gone else math.inf)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "slow_rewards.py").write_text(  # so that the kill lands inside the run
        "import time\n"
        "def slow(prompts, completions, **columns):\n"
        "    time.sleep(0.5)\n"
        "    return [None] * len(completions)\n"
    )
    return folder


@pytest.fixture(scope="module")
def endings(accelerator: str, tiny_llama: Path, folder: Path) -> list[Ending]:
    """Both ranks killed, in a run each, side by side."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda victim: kill_a_rank(victim, tiny_llama, folder, accelerator), [0, 1]))


@pytest.fixture(scope="module")
def resumed(accelerator: str, tiny_llama: Path, folder: Path, endings: list[Ending]) -> Path:
    """The same run undisturbed, and both killed ones resumed, in one pair of processes."""
    runs = [
        command(tiny_llama, folder / "undisturbed", accelerator),
        *([*command(tiny_llama, folder / f"killed_{victim}", accelerator), "--ckpt_path=last"] for victim in (0, 1)),
    ]
    for rank in run_on_ranks([run[3:] for run in runs], 2, folder):
        assert rank.codes == [0, 0, 0], rank.stderr[-2000:]
    return folder


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_other_and_is_named(victim: int, endings: list[Ending]) -> None:
    ending = endings[victim]
    assert ending.exited_in_s < 60, ending.log[-2000:]
    assert re.search(rf"rank:? ?{victim}", ending.log), ending.log[-2000:]
    assert "Traceback" not in ending.log


@pytest.mark.parametrize("victim", [0, 1])
def test_the_run_goes_on_exactly(victim: int, accelerator: str, resumed: Path) -> None:
    undisturbed, root = resumed / "undisturbed", resumed / f"killed_{victim}"
    expected, weights = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (undisturbed, root))
    for name, value in expected.items():
        # on the GPU the order of sums may differ from run to run
        same = weights[name].equal(value) if accelerator == "cpu" else weights[name].allclose(value, atol=1e-6, rtol=0)
        assert same, name
    assert [line["step"] for line in lines(root)] == [line["step"] for line in lines(undisturbed)]
