from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from grpo_lit.callbacks import CompletionsFile, MetricsFile
from grpo_lit.callbacks.metrics_file import read_metrics
from grpo_lit.datamodules import MathDataModule
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.lora import LoRAConfig
from grpo_lit.loss import LossConfig
from grpo_lit.module import GRPOModule, ValidationConfig
from grpo_lit.policy import PolicyConfig
from grpo_lit.rollout import RolloutConfig, SamplingConfig

REWARDS = '''
def digits(prompts, completions, **columns):
    """Share of digits: varies within a group of a random model."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

def some_abstain(prompts, completions, **columns):
    return [None if set("abcdefgh") & set(text) else float(sum(map(ord, text)) % 3) for text in completions]

def broken(prompts, completions, **columns):
    raise RuntimeError("no reward today")
'''


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of reward functions that a user could have written."""
    (tmp_path / "user_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("user_rewards", None)
    return "user_rewards"


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def fit(
    model: Path,
    root: Path,
    reward: str,
    *,
    loss: LossConfig = LossConfig(),  # noqa: B008
    micro_batch_size: int = 4,
    max_steps: int = 1,
    prompts_per_step: int = 3,
    rollout: RolloutConfig | None = None,
    callbacks: list[Any] | None = None,
    **kwargs: Any,
) -> GRPOModule:
    seed_everything(7)
    module = GRPOModule(
        PolicyConfig(str(model), dtype="fp32"),
        lora=LoRAConfig(4, targets=["c_attn"] if "gpt2" in model.name else ["q_proj", "v_proj"]),
        rollout=rollout or RolloutConfig(3, sampling=SamplingConfig(max_completion_length=6)),
        loss=loss,
        rewards=[reward],
        micro_batch_size=micro_batch_size,
        optimizer=kwargs.pop("optimizer", sgd),
        validation=ValidationConfig(SamplingConfig(max_completion_length=4)),
        max_grad_norm=kwargs.pop("max_grad_norm", None),
        **kwargs,
    )
    data = MathDataModule("arithmetic", prompts_per_step=prompts_per_step, val_prompts=4, prompt_template="{question}=")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks or []),
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=str(root),
        callbacks=callbacks,
    )
    trainer.fit(module, datamodule=data)
    return module


def weights(module: GRPOModule) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.live_policy.trainable_parameters()}


LOSSES = {
    "sequence_mean": LossConfig(),
    "token_mean": LossConfig(reduction="token_mean", beta=0.05, entropy_coef=0.01),
    "alpha": LossConfig(reduction="alpha", alpha=0.5, objective="cispo"),
    "fixed_length": LossConfig(reduction="fixed_length", advantage_scale="none", ratio="sequence"),
    "masked": LossConfig(reduction="token_mean", mask_truncated=True),
    "sent": LossConfig(reduction="token_mean", token_rule="sent", token_rule_share=0.2),
}


# SENT's penalty |log-ratio| has a kink where the ratio is 1. In a third pass of this batch one picked token stands at
# 1e-6 from it, on either side by rounding alone, so that its gradient's sign does not follow from the batch.
CASES = [(name, passes) for name in LOSSES for passes in ((1, 2) if name == "sent" else (1, 3))]


@pytest.mark.parametrize(("name", "passes"), CASES)
def test_gradient_and_loss_do_not_depend_on_the_micro_batch(
    name: str, passes: int, tiny_llama: Path, tmp_path: Path, rewards: str
) -> None:
    """Weights after `passes` SGD steps differ from the start and agree to 1e-6 for every split."""
    runs = {
        size: fit(
            tiny_llama,
            tmp_path,
            f"{rewards}.digits",
            loss=LOSSES[name],
            micro_batch_size=size,
            # long enough that some random completions end and some are cut
            rollout=RolloutConfig(6, sampling=SamplingConfig(max_completion_length=80)) if name == "masked" else None,
            max_steps=passes,
            ppo_passes=passes,
            optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        )
        for size in (1, 2, 3, 100)
    }
    whole = weights(runs[100])
    moved = max(float(value.abs().max()) for key, value in whole.items() if key.endswith("lora_B"))
    assert moved > 1e-4
    for size in (1, 2, 3):
        for key, value in weights(runs[size]).items():
            assert torch.allclose(value, whole[key], atol=1e-6, rtol=0), (size, key)
        for metric in ("train/loss", "train/grad_norm", "train/entropy", "train/clip_fraction", "train/approx_kl"):
            expected = runs[100].step_metrics[metric]
            assert runs[size].step_metrics[metric] == pytest.approx(expected, rel=2e-5, abs=1e-6), (size, metric)


def test_first_pass_has_a_ratio_of_exactly_one_and_later_ones_have_not(
    tiny_gpt2: Path, tmp_path: Path, rewards: str
) -> None:
    one = fit(tiny_gpt2, tmp_path, f"{rewards}.digits").step_metrics
    assert one["train/ratio_max"] == one["train/ratio_mean"] == 1.0
    assert one["train/approx_kl"] == 0.0
    more = fit(tiny_gpt2, tmp_path, f"{rewards}.digits", ppo_passes=3, max_steps=3).step_metrics
    assert more["train/ratio_max"] > 1.001
    assert more["train/approx_kl"] > 0


def test_steps_and_checkpoints_count_as_lightning_counts(tiny_llama: Path, tmp_path: Path, rewards: str) -> None:
    """A plain ModelCheckpoint and global_step work, since steps go through self.optimizers()."""
    checkpoint = ModelCheckpoint(dirpath=tmp_path / "plain", every_n_train_steps=2, save_top_k=-1)
    module = fit(
        tiny_llama, tmp_path, f"{rewards}.digits", ppo_passes=2, max_steps=6, callbacks=[checkpoint, MetricsFile()]
    )
    assert module.trainer.global_step == 6
    assert module.rollout_step == 3
    assert len(list((tmp_path / "plain").glob("*.ckpt"))) == 3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["rollout_step"], line["optimizer_step"]) for line in lines] == [
        (1, 1, 2),
        (2, 2, 4),
        (3, 3, 6),
    ]


def test_max_steps_is_not_overrun_inside_a_rollout(tiny_llama: Path, tmp_path: Path, rewards: str) -> None:
    module = fit(tiny_llama, tmp_path, f"{rewards}.digits", ppo_passes=4, max_steps=6)
    assert module.trainer.global_step == 6


def test_abstained_rows_stay_out_of_group_and_loss(tiny_llama: Path, tmp_path: Path, rewards: str) -> None:
    module = fit(tiny_llama, tmp_path, f"{rewards}.some_abstain")
    rows = module.step_rows
    assert rows is not None
    out = rows.rewards.isnan()
    assert 0 < int(out.sum()) < len(out)
    assert module.step_metrics["rollout/abstained_fraction"] == pytest.approx(float(out.float().mean()))
    assert module.step_metrics["train/row_count"] == int((~out).sum())


def test_vigor_drives_the_rounds_of_a_step(tiny_llama: Path, tmp_path: Path, rewards: str) -> None:
    """Eight prompts, ranked by reward variance after each round: 30 14 6 6 2 2 2 2, read from what the run wrote."""
    rollout = RolloutConfig(allocator="vigor", sampling=SamplingConfig(max_completion_length=6))
    module = fit(
        tiny_llama, tmp_path, f"{rewards}.digits", rollout=rollout, prompts_per_step=8, callbacks=[CompletionsFile()]
    )
    records = [json.loads(line) for line in (tmp_path / "completions/step_000001.jsonl").read_text().splitlines()]
    by_prompt: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        by_prompt.setdefault(record["prompt_index"], []).append(record)
    assert sorted(map(len, by_prompt.values()), reverse=True) == [30, 14, 6, 6, 2, 2, 2, 2]
    for group in by_prompt.values():
        assert [record["completion_index"] for record in group] == list(range(len(group)))
    variance = {prompt: statistics.pvariance([r["reward"] for r in group[:2]]) for prompt, group in by_prompt.items()}
    kept = {prompt for prompt, group in by_prompt.items() if len(group) > 2}
    assert min(variance[prompt] for prompt in kept) >= max(variance[p] for p in by_prompt.keys() - kept)
    assert module.step_metrics["rollout/reward_mean"] == pytest.approx(statistics.fmean(r["reward"] for r in records))
    assert module.step_metrics["train/row_count"] == 64
    alone = fit(
        tiny_llama, tmp_path / "again", f"{rewards}.digits", rollout=rollout, prompts_per_step=8, micro_batch_size=7
    )
    assert alone.step_metrics["train/loss"] == pytest.approx(module.step_metrics["train/loss"], rel=1e-4, abs=1e-6)


class _Poison:
    """Makes chosen steps non-finite."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def __call__(self, original: Callable[..., Any], module: GRPOModule) -> Callable[..., Any]:
        def score(*args: Any, **kwargs: Any) -> Any:
            scores = original(*args, **kwargs)
            if module.rollout_step in self.steps and torch.is_grad_enabled():
                return scores._replace(logprobs=scores.logprobs * float("nan"))
            return scores

        return score


def poisoned(module_class: type[GRPOModule], steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    original = module_class.configure_model

    def configure_model(self: GRPOModule) -> None:
        original(self)
        self.live_policy.score = _Poison(steps)(self.live_policy.score, self)  # type: ignore[method-assign]

    monkeypatch.setattr(module_class, "configure_model", configure_model)


@pytest.mark.faults
def test_non_finite_step_is_skipped_kept_and_counted(
    tiny_llama: Path, tmp_path: Path, rewards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(GRPOModule, {0}, monkeypatch)
    module = fit(tiny_llama, tmp_path, f"{rewards}.digits", max_steps=1, callbacks=[MetricsFile()])
    assert module.rollout_step == 2  # the first took no optimizer step
    assert module.guard.skipped == 1
    kept = torch.load(next((tmp_path / "nonfinite").glob("*.pt")), weights_only=True)
    assert kept["completion_ids"].shape == kept["weights"].shape
    assert all(bool(value.isfinite().all()) for value in weights(module).values())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["train/nonfinite_skips"] for line in lines] == [1.0, 1.0]


class _PlantNaN(Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.rollout_step == 1:
            _, weight = pl_module.live_policy.trainable_parameters()[0]
            weight.data.view(-1)[0] = float("nan")


@pytest.mark.faults
def test_weights_that_are_no_longer_finite_are_not_saved(tiny_llama: Path, tmp_path: Path, rewards: str) -> None:
    with pytest.raises(SystemFault, match=r"no longer finite in rollout step 2.*--ckpt_path last"):
        fit(tiny_llama, tmp_path, f"{rewards}.digits", max_steps=3, callbacks=[MetricsFile(), _PlantNaN()])
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1]


@pytest.mark.faults
def test_three_in_a_row_stop_the_run(
    tiny_llama: Path, tmp_path: Path, rewards: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned(GRPOModule, {0, 1, 2, 3, 4}, monkeypatch)
    with pytest.raises(SystemFault, match="3 optimizer steps in a row"):
        fit(tiny_llama, tmp_path, f"{rewards}.digits", max_steps=10)
    assert len(list((tmp_path / "nonfinite").glob("*.pt"))) == 3


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"ppo_passes": 0}, "model.ppo_passes=0"),
        ({"micro_batch_size": 0}, "model.micro_batch_size=0"),
        ({"max_grad_norm": 0.0}, "model.max_grad_norm=0.0"),
        ({"rewards": []}, "model.rewards"),
        ({"reward_weights": [1.0, 2.0]}, "model.reward_weights"),
        ({"rewards": ["no_such_reward"]}, "no_such_reward"),
    ],
)
def test_bad_arguments_are_refused_before_anything_loads(kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match):
        GRPOModule(PolicyConfig("nowhere/at-all"), **kwargs)
