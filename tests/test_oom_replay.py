"""A step that ran out of memory anywhere is the step that did not."""

from __future__ import annotations

import copy
import json
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo_lit.callbacks import CompletionsFile, MetricsFile, OOMReplay
from grpo_lit.callbacks.metrics_file import without_timings
from grpo_lit.datamodules import MathDataModule
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.lora import LoRAConfig
from grpo_lit.loss import LossConfig
from grpo_lit.module import GRPOModule, ValidationConfig
from grpo_lit.oom import is_out_of_memory, shortage
from grpo_lit.passes import Passes
from grpo_lit.phases import PhaseListener
from grpo_lit.policy import PolicyConfig
from grpo_lit.rollout import RolloutConfig, SamplingConfig
from grpo_lit.snapshot import OptimizerSnapshot
from grpo_lit.testing import FaultInjector

REWARDS = '''
import torch

def digits(prompts, completions, **columns):
    """Share of digits; in tensors, so that memory can run out here too."""
    return [float(torch.tensor([c.isdigit() for c in text or " "]).float().mean()) for text in completions]
'''


@pytest.fixture(autouse=True)
def _rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "oom_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("oom_rewards", None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """The tiny Llama with smaller weights: rounding of one split or another stays below 1e-6 over four passes."""
    folder = tmp_path_factory.mktemp("calm")
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(tiny_llama)
    config.initializer_range = 0.1
    calm = LlamaForCausalLM(config)
    calm.generation_config.eos_token_id = 2
    calm.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_llama).save_pretrained(folder)
    return folder


class Gradients(Callback):
    """Keeps the gradients that every optimizer step took, the last attempt's where there were several."""

    def __init__(self) -> None:
        self.steps: dict[int, list[Tensor]] = {}

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        parameters = [parameter for _, parameter in pl_module.live_policy.trainable_parameters()]
        self.steps[trainer.global_step] = [p.grad.clone() for p in parameters if p.grad is not None]


class Run:
    """A training of two rollout steps and what came of it."""

    def __init__(self, model: Path, root: Path, *callbacks: Any, **kwargs: Any) -> None:
        seed_everything(7)
        passes, accelerator = kwargs.pop("ppo_passes", 1), kwargs.pop("accelerator", "cpu")
        self.gradients = Gradients()
        self.module = GRPOModule(
            PolicyConfig(str(model), dtype=kwargs.pop("dtype", "fp32")),
            lora=LoRAConfig(4, targets=["q_proj", "v_proj"]),
            rollout=kwargs.pop("rollout", None) or RolloutConfig(4, sampling=SamplingConfig(max_completion_length=6)),
            rewards=["oom_rewards.digits"],
            micro_batch_size=kwargs.pop("micro_batch_size", 4),
            optimizer=kwargs.pop("optimizer", lambda p: torch.optim.SGD(p, lr=2e-3)),
            validation=ValidationConfig(SamplingConfig(max_completion_length=4)),
            max_grad_norm=kwargs.pop("max_grad_norm", None),
            ppo_passes=passes,
            **kwargs,
        )
        data = MathDataModule("arithmetic", prompts_per_step=3, val_prompts=4, prompt_template="{question}=")
        trainer = Trainer(
            accelerator=accelerator,
            devices=1,
            max_steps=2 * passes,
            max_epochs=-1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            val_check_interval=1,
            check_val_every_n_epoch=None,
            default_root_dir=str(root),
            callbacks=[self.gradients, *callbacks, MetricsFile(), CompletionsFile()],
        )
        trainer.fit(self.module, datamodule=data)
        self.metrics = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
        self.completions = [f.read_text() for f in sorted((root / "completions").glob("*.jsonl"))]
        self.weights = [p.detach().clone() for _, p in self.module.live_policy.trainable_parameters()]

    def equals(self, other: Run) -> None:
        """Gradients of every pass to 1e-6 (of their norm where that is above 1), weights, completions, metrics."""
        assert self.gradients.steps.keys() == other.gradients.steps.keys()
        largest = 0.0
        for step, gradients in other.gradients.steps.items():
            norm = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
            for mine, theirs in zip(self.gradients.steps[step], gradients, strict=True):
                largest = max(largest, float(theirs.abs().max()))
                assert float((mine - theirs).abs().max()) <= 1e-6 * max(norm, 1.0), step
        assert largest > 1e-3, "the comparison would not see a missing gradient"
        for mine, theirs in zip(self.weights, other.weights, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6, rtol=0)
        assert self.completions == other.completions
        assert len(self.metrics) == len(other.metrics)
        for mine, theirs in zip(map(without_timings, self.metrics), map(without_timings, other.metrics), strict=True):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                # the mismatch of engine and scoring is itself rounding, at these batch shapes
                absolute = 1e-4 if "mismatch" in name else 2e-6
                assert mine[name] == pytest.approx(value, rel=2e-5, abs=absolute), name


LOSSES = {
    "sequence_mean": LossConfig(beta=0.05),
    "token_mean": LossConfig(reduction="token_mean", beta=0.05, entropy_coef=0.01),
    "alpha": LossConfig(reduction="alpha", alpha=0.5, beta=0.05, objective="cispo"),
    "fixed_length": LossConfig(reduction="fixed_length", advantage_scale="none", beta=0.05, ratio="sequence"),
}
RAGGED = RolloutConfig(allocator="vigor", vigor_rounds=2, sampling=SamplingConfig(max_completion_length=6))
FAULTS = {
    "rollout": [FaultInjector("rollout", at=3, event="forward")],
    "reward": [FaultInjector("reward", at=5)],
    "score": [FaultInjector("score", at=2, event="forward")],
    "second micro-batch": [FaultInjector("train", at=2, event="forward")],
    "backward": [FaultInjector("train", at=260)],
    "second pass": [FaultInjector("train", at=2, event="forward", occurrence=2)],
    "fourth pass": [FaultInjector("train", at=150, occurrence=4)],
    "optimizer": [FaultInjector("optimizer", at=4)],
    "validate": [FaultInjector("validate", at=2, event="forward")],
    "two phases": [FaultInjector("rollout", at=30), FaultInjector("train", at=200, times=2)],
}
ON_CUDA = {
    **FAULTS,
    "rollout": [FaultInjector("rollout", at=30)],
    "decode": [FaultInjector("rollout", at=5, event="forward")],  # three prompts in float32, a step, its recording
    "validate": [FaultInjector("validate", at=20)],
}
HALVED = {"rollout": ("rollout_batch_size", 6), "score": ("score_batch_size", 2), "train": ("micro_batch_size", 2)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "oom_rewards.py").write_text(REWARDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return Run(model, folder, ppo_passes=4, loss=LOSSES["sequence_mean"])


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_replayed_step_is_the_undisturbed_one(name: str, undisturbed: Run, model: Path, tmp_path: Path) -> None:
    faults = copy.deepcopy(FAULTS[name])
    run = Run(model, tmp_path, OOMReplay(), *faults, ppo_passes=4, loss=LOSSES["sequence_mean"])
    assert [fault.raised for fault in faults] == [fault.times for fault in faults]
    run.equals(undisturbed)
    # the metrics of the validation at the end of the step come after those of the step
    last = run.metrics[-1]
    if name != "validate":
        assert last["oom/replays"] == sum(fault.times for fault in faults)
        assert last["oom/seconds_lost"] > 0
        assert all(last[f"oom/replays_{fault.phase}"] == fault.times for fault in faults)
    if faults[0].phase in HALVED and len(faults) == 1:
        knob, size = HALVED[faults[0].phase]
        assert last[f"oom/{knob}"] == size


@pytest.mark.parametrize("name", list(LOSSES))
def test_every_reduction_with_ragged_groups(name: str, model: Path, tmp_path: Path) -> None:
    faults = [
        FaultInjector("rollout", at=2, event="forward"),
        FaultInjector("score", at=40),
        FaultInjector("train", at=250),
        FaultInjector("train", at=3, event="forward", rollout_step=1, occurrence=3),
        FaultInjector("optimizer", at=2, rollout_step=1),
    ]
    options: dict[str, Any] = {"ppo_passes": 4, "loss": LOSSES[name], "rollout": RAGGED}
    whole = Run(model, tmp_path / "whole", **options)
    run = Run(model, tmp_path / "faulty", OOMReplay(), *faults, **options)
    assert [fault.raised for fault in faults] == [1] * 5
    run.equals(whole)


def test_an_optimizer_step_that_broke_off_anywhere_is_undone(model: Path, tmp_path: Path) -> None:
    """AdamW with clipping: gradients are scaled and moments move before memory runs out in between."""
    options: dict[str, Any] = {
        "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
        "max_grad_norm": 0.05,
    }
    whole = Run(model, tmp_path / "whole", **options)
    state = whole.module.optimizers().optimizer.state_dict()["state"]
    moment = 0
    for at in (1, 2, 4, 8, 16, 32, 64):
        fault = FaultInjector("optimizer", at=at, rollout_step=1)
        run = Run(model, tmp_path / str(at), OOMReplay(), fault, **options)
        if not fault.raised:
            break
        for mine, theirs in zip(run.weights, whole.weights, strict=True):
            assert torch.equal(mine, theirs), at
        mine_state = run.module.optimizers().optimizer.state_dict()["state"]
        assert all(torch.equal(mine_state[i]["exp_avg_sq"], state[i]["exp_avg_sq"]) for i in state), at
        assert all(torch.equal(mine_state[i]["step"], state[i]["step"]) for i in state), at
        moment = at
    assert moment > 3


def test_old_logprobs_follow_a_replay_to_its_shapes(model: Path, tmp_path: Path) -> None:
    """With a rate of 0 every pass has the weights of the first, so its ratios are 1 to the last bit, also in bf16."""
    fault = FaultInjector("train", at=1, event="forward", occurrence=3)
    options: dict[str, Any] = {"ppo_passes": 4, "dtype": "bf16", "micro_batch_size": 12}
    still = Run(model, tmp_path, OOMReplay(), fault, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), **options)
    assert fault.raised == 1
    assert still.module.micro_batch_size == 6
    assert [line["train/ratio_max"] for line in still.metrics] == [1.0, 1.0]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["hf", "auto"])
def test_on_cuda_with_the_allocators_own_errors(engine: str, model: Path, tmp_path: Path) -> None:
    rollout = RolloutConfig(4, engine=engine, sampling=SamplingConfig(max_completion_length=6))  # type: ignore[arg-type]
    options: dict[str, Any] = {"accelerator": "gpu", "ppo_passes": 4, "rollout": rollout}
    for reduction, loss in LOSSES.items():
        whole = Run(model, tmp_path / reduction, loss=loss, **options)
        names = list(ON_CUDA) if reduction == "sequence_mean" and engine == "auto" else ["two phases"]
        for name, faults in ((name, copy.deepcopy(ON_CUDA[name])) for name in names):
            run = Run(model, tmp_path / f"{reduction} {name}", OOMReplay(), *faults, loss=loss, **options)
            assert [fault.raised for fault in faults] == [fault.times for fault in faults], name
            run.equals(whole)


class LostLogprobs(PhaseListener, Callback):
    """Spoils the old log-probs when memory runs out: a replay at other shapes must not use them."""

    def __init__(self) -> None:
        self.passes: list[Passes] = []

    def on_out_of_memory(self, *args: Any) -> bool:
        self.passes[-1].old.fill_(-1.0)
        return False


def test_old_logprobs_are_made_anew_from_the_first_weights(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiler = LostLogprobs()
    original = Passes.__init__

    def init(self: Passes, *args: Any) -> None:
        original(self, *args)
        spoiler.passes.append(self)

    monkeypatch.setattr(Passes, "__init__", init)
    fault = FaultInjector("train", at=1, event="forward", occurrence=3)
    whole = Run(model, tmp_path / "whole", ppo_passes=4)
    run = Run(model, tmp_path / "run", spoiler, OOMReplay(), fault, ppo_passes=4)
    assert fault.raised == 1
    run.equals(whole)


class CountingSGD(torch.optim.SGD):
    """Keeps a plain number in its state, as some optimizers do, and fails once it has counted."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
                group["lr"] *= 2
        if self.param_groups[0].pop("fails", False):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().step(closure)


def test_numbers_in_an_optimizers_state_are_put_back_too() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = CountingSGD([parameter], lr=0.5, momentum=0.9)
    for expected in ({}, {"count": 1}):
        parameter.grad = torch.ones(3)
        before = OptimizerSnapshot(optimizer, [parameter])
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["fails"] = True
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
        before.restore()
        assert optimizer.param_groups[0]["lr"] == rate
        assert {k: v for k, v in optimizer.state.get(parameter, {}).items() if k == "count"} == expected
        optimizer.step()


def test_one_row_is_tried_twice_and_then_the_run_ends_with_the_reason(model: Path, tmp_path: Path) -> None:
    fault = FaultInjector("train", at=1, event="forward", times=5)
    with pytest.raises(SystemFault) as caught:
        Run(model, tmp_path, OOMReplay(), fault, micro_batch_size=4)
    assert fault.raised == 4  # at 4, 2, 1 and 1 rows
    message = str(caught.value)
    assert "train phase at one row at a time" in message
    assert "1024 MiB more were wanted, 512 MiB of them missing" in message
    assert "Lower model.rollout.sampling.max_completion_length" in message
    assert "\n" not in message


def test_without_a_callback_the_error_goes_through(model: Path, tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        Run(model, tmp_path, FaultInjector("train", at=2, event="forward"))


class HeldTensors(PhaseListener, Callback):
    """Sees whether the tensors of a failed forward are gone when callbacks are asked."""

    def __init__(self) -> None:
        self.alive: list[bool] = []
        self.refs: list[weakref.ref[Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        score = pl_module.live_policy.score

        def keep(*args: Any, **kwargs: Any) -> Any:
            scores = score(*args, **kwargs)
            self.refs.append(weakref.ref(scores.logprobs))
            return scores

        pl_module.live_policy.score = keep

    def on_out_of_memory(self, *args: Any) -> bool:
        self.alive += [ref() is not None for ref in self.refs]
        return False


def test_nothing_of_the_failed_attempt_is_alive_when_memory_is_counted(model: Path, tmp_path: Path) -> None:
    held = HeldTensors()
    # in the backward of the second micro-batch
    Run(model, tmp_path, held, OOMReplay(), FaultInjector("train", at=380))
    assert len(held.alive) >= 1
    assert not any(held.alive)


def test_other_errors_are_no_shortage() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")
    )
    wrapped = UserError("reward function", "f", "numbers")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert is_out_of_memory(wrapped)
    gave_up = SystemFault("out of memory in the train phase")
    gave_up.__cause__ = wrapped
    assert not is_out_of_memory(gave_up)
    assert not is_out_of_memory(ValueError("out of memory"))
    assert shortage("nothing of use").missing is None


@pytest.mark.parametrize(("name", "value"), [("phase", "training"), ("at", 0), ("times", 0), ("occurrence", -1)])
def test_faults_are_checked(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"FaultInjector.{name}"):
        FaultInjector(**{"phase": "train", name: value})
