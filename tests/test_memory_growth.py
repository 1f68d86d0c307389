"""Two hundred steps take no more memory than ten."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from grpo_lit.callbacks import AdaptiveMicroBatch, CompletionsFile, MetricsFile, OOMReplay
from grpo_lit.datamodules import MathDataModule
from grpo_lit.lora import LoRAConfig
from grpo_lit.module import GRPOModule
from grpo_lit.policy import PolicyConfig
from grpo_lit.rollout import RolloutConfig, SamplingConfig
from grpo_lit.testing import FaultInjector

REWARDS = "def letters(prompts, completions, **c):\n    return [float(sum(map(ord, t)) % 3) for t in completions]\n"


class MemoryCurve(Callback):
    """Resident host memory and allocated device memory after every step, in bytes."""

    def __init__(self) -> None:
        self.host: list[int] = []
        self.device: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.host.append(4096 * int(Path("/proc/self/statm").read_text().split()[1]))
        if pl_module.device.type == "cuda":
            self.device.append(torch.cuda.memory_allocated(pl_module.device))


def curve(model: Path, root: Path, accelerator: str, steps: int = 200) -> MemoryCurve:
    """A run of steps with random lengths, and with memory running out now and then."""
    seed_everything(7)
    module = GRPOModule(
        PolicyConfig(str(model), dtype="fp32", cpu_threads=1),
        lora=LoRAConfig(4, targets=["q_proj", "v_proj"]),
        rollout=RolloutConfig(4, sampling=SamplingConfig(max_completion_length=20)),
        rewards=["growth_rewards.letters"],
        micro_batch_size=4,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4),
    )
    data = MathDataModule("arithmetic", prompts_per_step=2, val_prompts=0, prompt_template="{question}=")
    found = MemoryCurve()
    faults = [FaultInjector("train", at=150, rollout_step=step) for step in (5, 60, 120, 180)]
    trainer = Trainer(
        accelerator=accelerator, devices=1, max_steps=steps, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(root),
        callbacks=[AdaptiveMicroBatch(cool_down=2), OOMReplay(), *faults, found, MetricsFile(), CompletionsFile()],
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert [fault.raised for fault in faults] == [1] * 4
    return found


@pytest.fixture(autouse=True)
def _rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "growth_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("growth_rewards", None)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the process's memory from Linux's /proc")
def test_host_memory(tiny_llama: Path, tmp_path: Path) -> None:
    found = curve(tiny_llama, tmp_path, "cpu")
    assert found.host[199] <= 1.01 * found.host[9]


@pytest.mark.gpu
def test_device_memory(tiny_llama: Path, tmp_path: Path) -> None:
    found = curve(tiny_llama, tmp_path, "gpu")
    assert found.device[199] <= 1.01 * found.device[9]
    assert found.host[199] <= 1.01 * found.host[9]
