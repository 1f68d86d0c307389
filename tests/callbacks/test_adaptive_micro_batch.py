"""AdaptiveMicroBatch: packing by tokens, the rehearsal, the way back, and what it must not disturb."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader

from grpo_lit.callbacks import AdaptiveMicroBatch, MetricsFile, OOMReplay
from grpo_lit.callbacks._backoff import Backoff
from grpo_lit.callbacks.metrics_file import without_timings
from grpo_lit.checkpoint import rng_state
from grpo_lit.datamodules import MathDataModule
from grpo_lit.datamodules.loader import PromptBatch
from grpo_lit.errors import UserError
from grpo_lit.lora import LoRAConfig
from grpo_lit.module import GRPOModule
from grpo_lit.policy import PolicyConfig
from grpo_lit.rollout import RolloutConfig, SamplingConfig
from grpo_lit.step import worst_case_batch
from grpo_lit.testing import FaultInjector

BASE, PER_TOKEN = 10_000, 100  # bytes of the simulated device: what is there, and what a token adds


@pytest.fixture(autouse=True)
def _rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "size_rewards.py").write_text(
        "def digits(prompts, completions, **c):\n    return [float(sum(map(ord, t)) % 3) for t in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("size_rewards", None)


class SmallDevice(Callback):
    """A device of so many bytes: a forward with gradients over too many tokens runs out of memory."""

    def __init__(self, limit: int) -> None:
        self.limit, self.peak = limit, BASE
        self.largest: list[int] = []
        self.errors = 0

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        score = pl_module.live_policy.score

        def limited(prompt_ids: Any, prompt_mask: Any, completion_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                torch.rand(1), random.random(), np.random.random()  # as a model with noise would
                tokens = len(prompt_ids) * (prompt_ids.shape[1] + completion_ids.shape[1])
                if BASE + PER_TOKEN * tokens > self.limit:
                    self.errors += 1
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tokens}.00 MiB.")
                self.peak = max(self.peak, BASE + PER_TOKEN * tokens)
                self.largest.append(tokens)
            return score(prompt_ids, prompt_mask, completion_ids, *args, **kwargs)

        pl_module.live_policy.score = limited


class OnDevice(AdaptiveMicroBatch):
    """Reads the simulated device's memory."""

    def __init__(self, device: SmallDevice, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.device = device
        self.before: tuple[Any, ...] = ()
        self.after: tuple[Any, ...] = ()

    def measures(self, module: GRPOModule) -> bool:
        return True

    def memory(self, module: GRPOModule) -> tuple[int, int, int]:
        peak, self.device.peak = self.device.peak, BASE
        return self.device.limit, BASE, peak

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.before = everything(pl_module)
        super().on_train_start(trainer, pl_module)
        self.after = everything(pl_module)


def everything(module: GRPOModule) -> tuple[Any, ...]:
    state = rng_state()
    optimizer: Any = module.optimizers()
    return (
        [parameter.detach().clone() for parameter in module.live_policy.parameters()],
        [parameter.grad for parameter in module.live_policy.parameters()],
        json.dumps(optimizer.optimizer.state_dict(), default=lambda t: t.tolist()),
        state["torch"].tolist(),
        str(state["python"]),
        state["numpy"][1].tolist(),
    )


def fit(
    model: Path, root: Path, *callbacks: Any, max_steps: int = 4, batches: Any = None, **kwargs: Any
) -> list[dict[str, Any]]:
    seed_everything(7)
    module = GRPOModule(
        PolicyConfig(str(model), dtype="fp32"),
        lora=LoRAConfig(4, targets=["q_proj", "v_proj"]),
        rollout=RolloutConfig(4, sampling=SamplingConfig(max_completion_length=24)),
        rewards=["size_rewards.digits"],
        **{"micro_batch_size": 16, **kwargs},
    )
    data = MathDataModule("arithmetic", prompts_per_step=4, val_prompts=0, prompt_template="{question}=")
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=max_steps, max_epochs=-1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(root),
        callbacks=[*callbacks, MetricsFile()],
    )  # fmt: skip
    if batches is None:
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, train_dataloaders=batches)
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def test_prompts_of_unknown_length_do_not_lower_the_ceiling(tiny_llama: Path, tmp_path: Path) -> None:
    batch = PromptBatch(["prompt"] * 2, [list(range(3, 40))] * 2, [0, 1], {"answer": ["0"] * 2})
    device = SmallDevice(10**6)
    callback = OnDevice(device)
    loader = DataLoader([batch], collate_fn=lambda batches: batches[0])
    (line,) = fit(tiny_llama, tmp_path, device, callback, max_steps=1, batches=loader, micro_batch_size=8)
    assert line["micro_batch/rows"] == 8
    assert len(device.largest) == 1, "nothing was tried before"
    assert callback.bytes_per_token is not None, "and the first pass was measured"


def test_rows_are_packed_by_length_under_a_budget_of_tokens() -> None:
    batch = worst_case_batch(12, 5, 30, 50, torch.device("cpu"))
    lengths = torch.tensor([30, 2, 7, 29, 1, 15, 3, 3, 0, 12, 30, 5])
    mask = torch.arange(30) < lengths[:, None]
    batch = type(batch)(batch.rollout, batch.rewards, batch.advantages, mask, batch.weights)
    whole = batch.micro_batches(100)
    assert len(whole) == 1
    assert sorted(whole[0].tolist()) == [row for row in range(12) if row != 8], "a row without tokens trains nothing"
    packed = batch.micro_batches(100, 80)
    assert sorted(row for rows in packed for row in rows.tolist()) == sorted(whole[0].tolist())
    for rows in packed:
        assert batch.load(rows) == (len(rows), len(rows) * (5 + int(lengths[rows].max())))
        assert batch.load(rows)[1] <= 80
    # 35 + 35, 34 + 20, then 17 wide and 10 wide
    assert [len(rows) for rows in packed] == [2, 2, 4, 3]
    assert [len(rows) for rows in batch.micro_batches(3, 80)] == [2, 2, 3, 3, 1]
    assert [len(rows) for rows in batch.micro_batches(100, 1)] == [1] * 11


def test_the_worst_case_is_tried_once_and_then_nothing_fails(tiny_llama: Path, tmp_path: Path) -> None:
    # 16 rows of up to 5 + 24 tokens are 464; 250 of them fit
    device = SmallDevice(BASE + 250 * PER_TOKEN)
    adaptive = OnDevice(device, target=1.0)
    lines = fit(tiny_llama, tmp_path, device, adaptive, OOMReplay())
    assert device.errors == 1, "the whole worst case, in the rehearsal"
    assert [line["oom/replays"] for line in lines] == [0.0] * 4
    for mine, theirs in zip(adaptive.before, adaptive.after, strict=True):
        if isinstance(mine, list) and mine and isinstance(mine[0], torch.Tensor):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        else:
            assert mine == theirs
    used = [line["micro_batch/largest_tokens"] for line in lines]
    assert all(150 < tokens <= 250 for tokens in used), used
    assert lines[0]["micro_batch/mib_per_1k_tokens"] == pytest.approx(PER_TOKEN * 1000 / 2**20)
    free = fit(tiny_llama, tmp_path / "free")
    for mine, theirs in zip(map(without_timings, lines), map(without_timings, free), strict=True):
        for name, value in theirs.items():
            assert mine[name] == pytest.approx(value, rel=1e-4, abs=1e-4 if "mismatch" in name else 1e-6), name


def test_a_completion_that_can_not_fit_is_told_before_the_run(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = SmallDevice(BASE + 20 * PER_TOKEN)  # a prompt and 15 tokens
    adaptive = OnDevice(device, target=1.0)
    with pytest.raises(Exception, match="one row at a time"):
        fit(tiny_llama, tmp_path, device, adaptive, OOMReplay())
    message = next(record.message for record in caplog.records if "does not fit into" in record.message)
    assert "at most 15 tokens of completion" in message
    assert "max_completion_length" in message


def test_sizes_grow_back_after_errors(tiny_llama: Path, tmp_path: Path) -> None:
    faults = [FaultInjector("train", at=1, event="forward", rollout_step=0), FaultInjector("rollout", at=2)]
    adaptive = AdaptiveMicroBatch(cool_down=2, growth=2.0)
    lines = fit(tiny_llama, tmp_path, adaptive, OOMReplay(), *faults, max_steps=8)
    ceiling = lines[-1]["micro_batch/tokens"]
    tokens = [line["micro_batch/tokens"] for line in lines]
    assert tokens[0] < ceiling / 2 + 1
    assert tokens == sorted(tokens)
    assert tokens[1] == tokens[0], "not before the cool-down is over"
    assert tokens[-1] == ceiling == 16 * (5 + 24)
    rows = [line.get("oom/rollout_batch_size") for line in lines]
    assert rows[0] == rows[1] == 8.0
    assert rows[-1] is None, "as configured again: all rows at once"


def test_ceiling_of_rows(tiny_llama: Path, tmp_path: Path) -> None:
    lines = fit(tiny_llama, tmp_path / "a", AdaptiveMicroBatch(), micro_batch_size=3, max_steps=1)
    assert lines[0]["micro_batch/rows"] == 3
    lines = fit(tiny_llama, tmp_path / "b", AdaptiveMicroBatch(max_rows=16), micro_batch_size=3, max_steps=1)
    assert lines[0]["micro_batch/rows"] == 16


def test_the_way_back_is_slow_where_it_keeps_failing() -> None:
    bound = Backoff(wait=2, growth=1.5)
    bound.fail(100, 50)
    seen = []
    for _ in range(8):
        bound.step(1000)
        seen.append(bound.bound)
    # grows to just below what failed, then the failure is believed a little less
    assert seen == [50, 76, 76, 90, 90, 135, 135, 203]
    bound.fail(203, 101)
    assert (bound.wait, bound.failed_at) == (4, 203)
    assert [bound.step(1000) for _ in range(4)] == [False, False, False, True]
    copy = Backoff(wait=1, growth=1.5)
    copy.load_state_dict(json.loads(json.dumps(bound.state_dict())))
    assert copy == bound
    bound.fail(10, 5)
    while bound.bound is not None:
        assert bound.bound <= 1000
        bound.step(12)


def test_state_goes_through_a_checkpoint(tiny_llama: Path, tmp_path: Path) -> None:
    device = SmallDevice(BASE + 250 * PER_TOKEN)
    adaptive = OnDevice(device, target=1.0)
    fit(tiny_llama, tmp_path, device, adaptive, OOMReplay(), max_steps=2)
    torch.save(adaptive.state_dict(), tmp_path / "state.pt")
    again = AdaptiveMicroBatch()
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert again.state_dict() == adaptive.state_dict()
    assert again.bytes_per_token == PER_TOKEN
    assert again.state_dict()["bounds"][0]["failed_at"] == 464


@pytest.mark.parametrize(
    ("name", "value"), [("target", 0.0), ("target", 1.1), ("max_rows", 0), ("cool_down", 0), ("growth", 1.0)]
)
def test_values_are_checked(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"AdaptiveMicroBatch.{name}"):
        AdaptiveMicroBatch(**{name: value})


def test_a_resumed_run_may_ask_for_less_than_what_was_learnt() -> None:
    before = AdaptiveMicroBatch(cool_down=2, growth=1.25)
    before.bytes_per_token, before._measured_tokens = 100.0, 10
    for bound in (before._tokens, before._score_rows, before._rollout_rows):
        bound.fail(64, 32)
    state = json.loads(json.dumps(before.state_dict()))

    after = AdaptiveMicroBatch(cool_down=5, growth=2.0)
    after.load_state_dict(state)
    assert [(b.bound, b.wait, b.growth) for b in (after._tokens, after._rollout_rows)] == [(32, 5, 2.0)] * 2
    for configured, used in ((4, 4), (None, 32), (50, 32)):
        after._configured = (configured, configured)
        module = SimpleNamespace(engine=SimpleNamespace(batch_size=0), score_batch_size=0, micro_batch_tokens=0)
        after._apply(module)  # type: ignore[arg-type]
        assert (module.score_batch_size, module.engine.batch_size) == (used, used)
