from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_lit.callbacks.auto_checkpointing import AutoCheckpointing
from grpo_lit.callbacks.metrics_file import read_metrics
from grpo_lit.callbacks.vram_profiler import VRAMProfiler
from grpo_lit.cli.parser import GRPOCLI
from grpo_lit.cli.train import build
from grpo_lit.errors import UserError

Fit = Callable[..., Sequence[str]]


def run(arguments: Sequence[str], *callbacks: Any) -> GRPOCLI:
    cli = build("fit", list(arguments)[1:])
    cli.trainer.callbacks += list(callbacks)  # type: ignore[attr-defined]
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    return cli


def of_kind(cli: GRPOCLI, kind: type) -> Any:
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, kind))  # type: ignore[attr-defined]


def test_every_phase_is_measured_by_kind(fit_arguments: Fit, tiny_llama: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    cli = run(fit_arguments(tiny_llama, root, "--profiler.trace_steps=[2]"))
    profiler = of_kind(cli, VRAMProfiler)
    lines = [json.loads(line) for line in (root / "memory.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    weights = {n: p for n, p in cli.model.live_policy.model.named_parameters()}
    adapters = sum(p.nbytes for n, p in weights.items() if "lora_" in n)
    for line in lines:
        phases = {phase["phase"]: phase for phase in line["phases"]}
        assert {"rollout", "reward", "train", "optimizer"} <= phases.keys()
        for phase in phases.values():
            kinds = phase["kinds"]
            assert sum(kinds.values()) == phase["peak_allocated"] >= phase["allocated"] > 50 * 2**20
            assert kinds["adapters"] == adapters
            assert kinds["optimizer"] >= 2 * adapters
            assert kinds["base weights"] + kinds["embedding, head"] >= sum(
                p.nbytes for n, p in weights.items() if "lora_" not in n
            )
        assert phases["train"]["kinds"]["gradients"] == adapters
        assert phases["rollout"]["kinds"]["gradients"] == 0
    assert profiler.load.reading.peak_allocated > 0
    records = read_metrics(root / "metrics.jsonl")
    assert all(record["vram/peak_train_mib"] > 50 for record in records if record["step"])
    assert all("vram/fragmentation" in record for record in records if record["step"])
    assert len(json.loads((root / "trace_2.json").read_text())["traceEvents"]) > 100
    assert not (root / "trace_1.json").exists()
    events = list((root / "tensorboard").glob("events*"))
    assert b"memory/peak_allocated_mib" in events[0].read_bytes()
    assert profiler.warnings == []


def test_a_phase_near_the_limit_is_warned_about_once(
    fit_arguments: Fit, tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cli = run(fit_arguments(tiny_llama, tmp_path / "run", "--profiler.warn_at=0.000001"))
    warnings = of_kind(cli, VRAMProfiler).warnings
    assert sorted(text.partition(":")[0] for text in warnings) == [
        "optimizer",
        "reward",
        "rollout",
        "train",
        "validate",
    ]
    assert [record.message for record in caplog.records if record.name == "grpo_lit.memory"] == warnings
    assert all("MiB in live tensors" in text for text in warnings)


def test_it_can_be_left_out(fit_arguments: Fit, tiny_llama: Path, tmp_path: Path) -> None:
    run(fit_arguments(tiny_llama, tmp_path / "run", "--profiler.memory=false", "--trainer.max_steps=1"))
    assert not (tmp_path / "run" / "memory.jsonl").exists()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--profiler.warn_at=0", "profiler.warn_at=0.0"),
        ("--profiler.port=70000", "profiler.port=70000"),
        ("--profiler.trace_steps=[0]", "profiler.trace_steps=[0]"),
        ("--profiler.lives=true", "profiler.live"),
        ("--profiler=null", "profiler"),
    ],
)
def test_mistakes_end_in_one_line(
    argument: str, words: str, fit_arguments: Fit, tiny_llama: Path, refused: Callable[..., None]
) -> None:
    refused(fit_arguments(tiny_llama, "run", argument), words)


@pytest.mark.parametrize(
    "arguments", [{"warn_at": 0.0}, {"warn_at": 1.5}, {"trace_steps": [0]}, {"snapshot_steps": [-1]}]
)
def test_constructor_refuses(arguments: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(arguments))):
        VRAMProfiler(**arguments)


def test_auto_checkpointing_lets_layers_off_and_takes_them_back(
    fit_arguments: Fit, tiny_llama: Path, tmp_path: Path
) -> None:
    """Memory here is the host's, far below the lower share: all layers are let off at the first decision."""
    arguments = fit_arguments(tiny_llama, tmp_path / "run", "--model.policy.gradient_checkpointing=auto")
    eager = AutoCheckpointing(every_n_rollout_steps=1)
    cli = run(arguments, eager)
    checkpointing = cli.model.live_policy.checkpointing
    assert checkpointing is not None
    assert checkpointing.count == 0
    records = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["step"]]
    assert [r["vram/checkpointed_layers"] for r in records] == [2, 0, 0]
    assert of_kind(cli, AutoCheckpointing) is not eager  # `auto` brings its own, with the usual patience
    assert eager.on_out_of_memory(cli.trainer, cli.model, "train", RuntimeError("out of memory"))
    assert checkpointing.count == checkpointing.total == 2
    assert not eager.on_out_of_memory(cli.trainer, cli.model, "train", RuntimeError("out of memory"))
    assert eager.state_dict() == {"count": 2}


def test_decisions_of_auto_checkpointing() -> None:
    auto = AutoCheckpointing()
    assert auto.decide(28, 28, share=0.75, layer_share=0.01) == 28
    assert auto.decide(28, 28, share=0.57, layer_share=0.02) == 28 - 10  # halfway to 0.82 is 0.77
    assert auto.decide(3, 28, share=0.1, layer_share=0.01) == 0
    assert auto.decide(10, 28, share=0.83, layer_share=0.01) == 17
    assert auto.decide(26, 28, share=0.95, layer_share=0.01) == 28
    assert auto.decide(28, 28, share=0.71, layer_share=0.5) == 28  # one layer would be too much
    for arguments in ({"lower": 0.9}, {"upper": 1.1}, {"every_n_rollout_steps": 0}):
        with pytest.raises(UserError):
            AutoCheckpointing(**arguments)  # type: ignore[arg-type]
