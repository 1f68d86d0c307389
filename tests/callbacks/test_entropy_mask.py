"""EntropyMask: which tokens train, what they weigh, and the work that is skipped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor

from grpo_lit import policy as policy_module
from grpo_lit.callbacks import EntropyMask
from grpo_lit.datamodules import MathDataModule
from grpo_lit.errors import UserError
from grpo_lit.lora import LoRAConfig
from grpo_lit.loss import LossConfig, grpo_loss
from grpo_lit.module import GRPOModule
from grpo_lit.passes import Passes
from grpo_lit.policy import Policy, PolicyConfig
from grpo_lit.rollout import RolloutConfig, SamplingConfig
from grpo_lit.step import TrainingBatch


class Watch(Callback):
    """Keeps the batch that trains and the gradients of the step."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.gradients = [p.grad.clone() for _, p in pl_module.live_policy.trainable_parameters()]


def run(
    model: Path, root: Path, callbacks: list[Any], monkeypatch: pytest.MonkeyPatch, **kwargs: Any
) -> dict[str, Any]:
    """One step; the batch before the mask, the passes, the gradients and how many tokens each head call scored."""
    seen: dict[str, Any] = {"scored": [], "widths": []}
    original = Passes.__init__

    def init(self: Passes, module: GRPOModule, training: TrainingBatch) -> None:
        # rewards of a random model are flat; the mask does not look at them
        spread = torch.arange(len(training.advantages)) % 2 * 2.0 - 1
        original(self, module, replace(training, advantages=spread))
        seen["before"], seen["passes"] = self.training, self

    monkeypatch.setattr(Passes, "__init__", init)
    seed_everything(3)
    module = GRPOModule(
        PolicyConfig(str(model), dtype="fp32"),
        lora=LoRAConfig(4, targets=["q_proj", "v_proj"]),
        rollout=RolloutConfig(4, sampling=SamplingConfig(max_completion_length=12)),
        rewards=["exact_match"],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.0),
        max_grad_norm=None,
        **{"micro_batch_size": 3, **kwargs},
    )
    watch = Watch()
    data = MathDataModule("arithmetic", prompts_per_step=3, val_prompts=0, prompt_template="{question}=")
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=1, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(root),
        callbacks=[*callbacks, watch],
    )  # fmt: skip

    head = policy_module.linear_logprobs

    def counted(hidden: Tensor, weight: Tensor, ids: Tensor, **kw: Any) -> Any:
        if torch.is_grad_enabled():
            seen["scored"].append(len(ids))
        return head(hidden, weight, ids, **kw)

    monkeypatch.setattr(policy_module, "linear_logprobs", counted)
    score = Policy.score

    def watched(
        self: Policy, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, *rest: Any, **kw: Any
    ) -> Any:
        if torch.is_grad_enabled():
            seen["widths"].append(completion_ids.shape[1])
        return score(self, prompt_ids, prompt_mask, completion_ids, *rest, **kw)

    monkeypatch.setattr(Policy, "score", watched)
    trainer.fit(module, datamodule=data)
    return {**seen, "gradients": watch.gradients, "module": module}


def gradients_by_hand(found: dict[str, Any], kept: Tensor, weights: Tensor) -> list[Tensor]:
    """Gradient of the loss over all rows at once, every token scored, dropped ones masked afterwards."""
    module, training = found["module"], found["before"]
    rollout, policy = training.rollout, module.live_policy
    scores = type(policy).score(
        policy, rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask
    )
    loss = grpo_loss(
        scores.logprobs, scores.logprobs.detach(), training.advantages, weights, kept, config=module.loss_config
    ).loss
    return list(torch.autograd.grad(loss, [p for _, p in policy.trainable_parameters()], allow_unused=True))


@pytest.mark.parametrize("row_weight", ["preserve", "drop"])
def test_gradient_is_that_of_the_kept_tokens_alone(
    row_weight: Any, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = EntropyMask(keep=0.3, min_tokens=2, row_weight=row_weight)
    found = run(tiny_llama, tmp_path, [mask], monkeypatch)
    before, after = found["before"], found["passes"].training
    kept, counted = after.loss_mask, before.loss_mask
    assert not bool((kept & ~counted).any())
    rollout = before.rollout
    with torch.no_grad():
        policy = found["module"].live_policy
        entropy = (
            type(policy)
            .score(policy, rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask)
            .entropy
        )
    # by hand: the largest 30 % of all, then each row's own two where it has fewer
    values = entropy[counted].sort(descending=True).values
    threshold = values[-(-len(values) * 3 // 10) - 1]
    expected = counted & (entropy >= threshold - 1e-5)
    for row in range(len(expected)):
        if expected[row].sum() < 2:
            expected[row] = torch.zeros_like(expected[row])
            own = torch.where(counted[row], entropy[row], -1.0)
            expected[row, own.topk(min(2, int(counted[row].sum()))).indices] = True
    assert torch.equal(kept, expected)
    assert not bool(after.weights[~kept].any())
    if row_weight == "preserve":
        assert torch.allclose(after.weights.sum(1), before.weights.sum(1), rtol=1e-5)
    else:
        assert torch.equal(after.weights, torch.where(kept, before.weights, 0))
    for mine, theirs in zip(found["gradients"], gradients_by_hand(found, kept, after.weights), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6, rtol=0)
    assert max(float(g.abs().max()) for g in found["gradients"]) > 1e-3
    metrics = found["module"].step_metrics
    assert metrics["train/entropy_mask_kept"] == pytest.approx(float(kept.sum() / counted.sum()))
    assert metrics["train/entropy_mask_threshold"] == pytest.approx(float(threshold), abs=1e-5)
    assert metrics["train/token_count"] == int(kept.sum())


def test_dropped_tokens_skip_the_output_layer_and_a_tail_the_whole_model(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(tiny_llama, tmp_path, [EntropyMask(keep=0.1)], monkeypatch, micro_batch_size=1)
    kept = found["passes"].training.loss_mask
    rows = [row for row in kept if row.any()]
    assert sum(found["scored"]) == int(kept.sum())
    # a row goes no further than its last kept token, and one without any not at all
    assert sorted(found["widths"]) == sorted(int(row.nonzero().max()) + 1 for row in rows)
    assert len(rows) < len(kept)


def test_keeping_all_changes_nothing(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_mask = run(tiny_llama, tmp_path / "a", [EntropyMask(keep=1.0)], monkeypatch)["gradients"]
    without = run(tiny_llama, tmp_path / "b", [], monkeypatch)["gradients"]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(with_mask, without, strict=True))


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (LossConfig(ratio="sequence"), "model.loss.ratio"),
        (LossConfig(objective="vespo"), "model.loss.ratio"),
        (LossConfig(rollout_correction="sequence_mask"), "model.loss.rollout_correction"),
        (LossConfig(off_policy_threshold=0.1), "model.loss.off_policy_threshold"),
    ],
)
def test_losses_that_join_tokens_are_refused(
    loss: LossConfig, match: str, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=match):
        run(tiny_llama, tmp_path, [EntropyMask()], monkeypatch, loss=loss)


@pytest.mark.parametrize(("name", "value"), [("keep", 0.0), ("keep", 1.5), ("min_tokens", -1), ("row_weight", "half")])
def test_values_are_checked(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"EntropyMask.{name}"):
        EntropyMask(**{name: value})
