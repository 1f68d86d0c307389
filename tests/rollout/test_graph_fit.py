"""Whole fits with the graph engine: the same training as with hf, also after a fault in the middle of a rollout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from grpo_lit.callbacks.progress import StepProgress
from grpo_lit.datamodules import MathDataModule
from grpo_lit.lora import LoRAConfig
from grpo_lit.module import GRPOModule, ValidationConfig
from grpo_lit.policy import PolicyConfig
from grpo_lit.rollout import RolloutConfig, SamplingConfig
from grpo_lit.testing import FaultInjector


class Watch(StepProgress):
    """Keeps what it is told of rollouts; grants one retry with half the rows in flight."""

    def __init__(self) -> None:
        super().__init__(seconds_between_lines=0.0)
        self.told: list[tuple[int, int, int]] = []
        self.num_retries = 0
        self.completions: list[list[list[int]]] = []
        self.held: list[bool] = []

    def on_rollout_progress(
        self, trainer: Trainer, pl_module: LightningModule, rows_done: int, num_rows: int, num_tokens: int
    ) -> None:
        super().on_rollout_progress(trainer, pl_module, rows_done, num_rows, num_tokens)
        self.told.append((rows_done, num_rows, num_tokens))

    def on_out_of_memory(self, trainer: Any, pl_module: Any, phase: Any, error: Exception) -> bool:
        self.num_retries += 1
        pl_module.engine.batch_size = 2
        return True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args)
        self.completions.append(pl_module.step_rows.rollout.completion_ids.tolist())
        self.held.append(getattr(pl_module.engine, "_held", None) is not None)


def fit(model: Path, root: Path, rollout: RolloutConfig, *callbacks: Callback) -> tuple[GRPOModule, Watch]:
    seed_everything(7)
    (root / "user_rewards.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]\n"
    )
    watch = Watch()
    module = GRPOModule(
        PolicyConfig(str(model), dtype="fp32"),
        lora=LoRAConfig(4, targets=["q_proj", "v_proj"]),
        rollout=rollout,
        rewards=["user_rewards.digits"],
        micro_batch_size=4,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        validation=ValidationConfig(SamplingConfig(temperature=0.0, max_completion_length=4)),
    )
    data = MathDataModule("arithmetic", prompts_per_step=3, val_prompts=4, prompt_template="{question}=")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        val_check_interval=1,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[watch, *callbacks],
        default_root_dir=root,
    )
    trainer.fit(module, data)
    return module, watch


@pytest.fixture(autouse=True)
def _user_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("user_rewards", None)


def config(engine: Any, **options: Any) -> RolloutConfig:
    return RolloutConfig(4, engine=engine, sampling=SamplingConfig(max_completion_length=7), **options)


def assert_equal_training(one: GRPOModule, other: GRPOModule) -> None:
    pairs = list(zip(one.live_policy.trainable_parameters(), other.live_policy.trainable_parameters(), strict=True))
    assert any(bool(mine.abs().max() > 0) for (name, mine), _ in pairs if name.endswith("lora_B"))
    for (_, mine), (_, theirs) in pairs:
        assert torch.allclose(mine, theirs, atol=1e-5)
    assert one.validation_metrics["val/completion_length"] == other.validation_metrics["val/completion_length"]


@pytest.mark.parametrize("allocator", ["uniform", "vigor"])
def test_training_is_that_with_hf(
    allocator: Any, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"allocator": allocator, "vigor_rounds": 2} if allocator == "vigor" else {}
    hf, _ = fit(tiny_llama, tmp_path, config("hf", **options))
    graph, watch = fit(tiny_llama, tmp_path, config("graph", **options))
    assert graph.engine.name == "graph"
    assert_equal_training(hf, graph)
    assert watch.held == [False, False], "cache and graphs are given back before the passes"
    assert watch.told[-1][0] == watch.told[-1][1]
    assert "sampling, " in capsys.readouterr().out
    assert graph.step_metrics["rollout/logprob_mismatch"] < 1e-4


def test_out_of_memory_in_the_middle_of_a_rollout_is_replayed_with_the_same_rows(
    tiny_llama: Path, tmp_path: Path
) -> None:
    calm, undisturbed = fit(tiny_llama, tmp_path, config("graph"))
    fault = FaultInjector("rollout", at=5, event="forward", rollout_step=1)  # prompts are one forward, then tokens
    module, watch = fit(tiny_llama, tmp_path, config("graph"), fault)
    assert fault.raised == watch.num_retries == 1
    assert module.engine.batch_size == 2
    assert watch.completions == undisturbed.completions
    assert_equal_training(calm, module)
