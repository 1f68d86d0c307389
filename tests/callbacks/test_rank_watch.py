"""A killed rank: the other ends soon, says which one is gone, and the run goes on exactly from its checkpoint."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

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


@pytest.fixture(scope="module")
def undisturbed(accelerator: str, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks") / "undisturbed"
    subprocess.run(
        command(tiny_llama, root, accelerator), env=ENVIRONMENT, check=True, capture_output=True, timeout=200
    )
    return root


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.faults
def test_a_killed_rank_ends_the_other_and_the_run_goes_on(
    victim: int, accelerator: str, undisturbed: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    root, log = tmp_path / "run", tmp_path / "log.txt"
    slow = tmp_path / "slow_rewards.py"  # so that the kill lands inside the run
    slow.write_text(
        "import time\n"
        "def slow(prompts, completions, **columns):\n"
        "    time.sleep(0.5)\n"
        "    return [None] * len(completions)\n"
    )
    slowly = ("--model.rewards=[math_accuracy,slow_rewards.slow]", "--model.reward_weights=[1, 1]")
    with log.open("w") as file:
        main = subprocess.Popen(
            command(tiny_llama, root, accelerator, *slowly), cwd=tmp_path, env=ENVIRONMENT, stdout=file, stderr=file
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
    assert not Path(f"/proc/{pids[1]}/stat").exists(), "rank 1 still runs a minute after"
    assert re.search(rf"rank:? ?{victim}", log.read_text()), log.read_text()[-2000:]
    assert "Traceback" not in log.read_text()

    resumed = [*command(tiny_llama, root, accelerator), "--ckpt_path=last"]
    subprocess.run(resumed, env=ENVIRONMENT, check=True, capture_output=True, timeout=200)
    expected, weights = (load_file(folder / "adapter/adapter_model.safetensors") for folder in (undisturbed, root))
    for name, value in expected.items():
        # on the GPU the order of sums may differ from run to run
        same = weights[name].equal(value) if accelerator == "cpu" else weights[name].allclose(value, atol=1e-6, rtol=0)
        assert same, name
    assert [line["step"] for line in lines(root)] == [line["step"] for line in lines(undisturbed)]
