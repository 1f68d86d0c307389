"""--oom_replay and --adaptive_micro_batch: on where asked, off where not, never twice, and resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from grpo_lit.callbacks import AdaptiveMicroBatch, OOMReplay
from grpo_lit.cli import main
from grpo_lit.cli.train import build, check_data, start_text

Fit = Callable[..., Sequence[str]]


def guards(arguments: Sequence[str]) -> list[object]:
    callbacks = build("fit", arguments[1:]).trainer.callbacks
    return [callback for callback in callbacks if isinstance(callback, OOMReplay | AdaptiveMicroBatch)]


def test_on_and_off(fit_arguments: Fit, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = fit_arguments(tiny_llama, tmp_path)
    assert guards(arguments) == [], "a CPU run has none unless asked"
    assert [type(g) for g in guards([*arguments, "--oom_replay=true", "--adaptive_micro_batch=true"])] == [
        AdaptiveMicroBatch,
        OOMReplay,
    ]
    own = [
        "--trainer.callbacks+=grpo_lit.callbacks.AdaptiveMicroBatch",
        "--trainer.callbacks.max_rows=64",
        "--adaptive_micro_batch=true",
    ]
    (mine,) = guards([*arguments, *own])
    assert isinstance(mine, AdaptiveMicroBatch)
    assert mine.max_rows == 64, "the user's, with its settings, and no second one"
    # where there is a GPU both are on, and each flag takes its own away
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with_gpu = [*arguments, "--trainer.accelerator=cpu"]
    assert guards(with_gpu) == [], "training on the CPU of a machine with a GPU"


def test_sizes_and_counts_go_on_after_a_resume(fit_arguments: Fit, tiny_llama: Path, tmp_path: Path) -> None:
    arguments = [
        *fit_arguments(tiny_llama, tmp_path / "run"),
        "--oom_replay=true",
        "--adaptive_micro_batch=true",
        "--trainer.callbacks+=grpo_lit.testing.FaultInjector",
        "--trainer.callbacks.phase=train",
        "--trainer.callbacks.at=100",
        "--trainer.callbacks.rollout_step=1",
    ]
    assert main([*arguments, "--trainer.max_steps=2"]) == 0
    assert main([*arguments, "--trainer.max_steps=4", "--ckpt_path=last"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line.get("oom/replays") for line in lines] == [None, 0.0, 1.0, 1.0, 1.0]
    tokens = [line.get("micro_batch/tokens") for line in lines]
    assert tokens[2] == tokens[3] == tokens[4] < tokens[1] / 2 + 1


def test_a_4_bit_model_on_the_cpu_is_told(fit_arguments: Fit, tiny_llama: Path, tmp_path: Path) -> None:
    for quantization, told in (("null", False), ("nf4", True)):
        arguments = [*fit_arguments(tiny_llama, tmp_path), f"--model.policy.quantization={quantization}"]
        cli = build("fit", arguments[1:])
        check_data(cli)
        text = start_text(cli, tmp_path, None)
        assert ("device: the CPU" in text) is told, text
