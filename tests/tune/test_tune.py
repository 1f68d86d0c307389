"""`grpo-lit tune`: what it accepts, what it refuses to compare, and that a killed search goes on."""

from __future__ import annotations

import fcntl
import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_lit.tune import Measurement, comparable, decide, default_space, search
from grpo_lit.tune.space import resolve_value

Fit = Callable[..., Sequence[str]]
GOOD = Measurement("ok", 100.0, [1.0] * 4, [16] * 5, [0.01] * 5, [0.5] * 5, [0.25] * 5)


def at(*speeds: float) -> list[Measurement]:
    return [replace(GOOD, tokens_per_s=speed) for speed in speeds]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": [16, 16, 15, 16, 16]}, "rows per step"),
        ({"rows": [8] * 5}, "rows per step"),
        ({"loss": [0.02] * 5}, "other loss"),
        ({"reward": [0.3] * 5}, "other reward"),
        ({"grad_norm": [0.8] * 5}, "other grad_norm"),
        ({"loss": [float("nan")] * 5}, "other loss"),
        ({"status": "oom", "error": None}, "oom: memory ran out"),
        ({"status": "failed", "error": "boom"}, "failed: boom"),
    ],
)
def test_what_can_not_be_compared_is_rejected_however_fast(change: dict[str, Any], words: str) -> None:
    fast = replace(GOOD, tokens_per_s=1000.0, **change)
    decision = decide(at(100, 100), [fast, fast], tolerance=2e-3, min_gain=0.02)
    assert not decision.accepted
    assert words in decision.reason
    assert comparable(GOOD, replace(GOOD, loss=[0.011] * 5), 2e-3) is None


@pytest.mark.parametrize(
    ("incumbent", "candidate", "accepted"),
    [
        ((100, 101, 99), (110, 111, 109), True),
        ((100, 101, 99), (100, 102, 99), False),
        ((100, 101, 99), (101, 102, 100), False),  # faster in every pair, but within the noise
        ((100, 120, 80), (110, 130, 90), False),  # a gain of 10 % where runs differ by 20 %
        ((100, 100, 100), (130, 99, 130), False),  # slower once
        ((100, 100), (90, 91), False),
    ],
)
def test_only_a_gain_beyond_the_noise_is_accepted(
    incumbent: tuple[float, ...], candidate: tuple[float, ...], accepted: bool
) -> None:
    assert decide(at(*incumbent), at(*candidate), tolerance=2e-3, min_gain=0.02).accepted is accepted


def test_search_climbs_alternates_and_proves_the_winner() -> None:
    speed = {None: 1.0, 2: 1.3, 4: 1.2}
    order: list[str] = []

    def measure(changes: Any, name: str) -> Measurement:
        order.append(name.rpartition("-")[2])
        factor = speed[changes.get("model.policy.cpu_threads")] * (
            1.5 if changes.get("model.micro_batch_size") == 32 else 1
        )
        if changes.get("model.micro_batch_size") == 64:
            return Measurement("oom", error="full")
        return replace(GOOD, tokens_per_s=100 * factor)

    config = {"model": {"policy": {"cpu_threads": None}, "micro_batch_size": 16}}
    space = {"model.policy.cpu_threads": [2, 4], "model.micro_batch_size": ["x2", "x2", "x0.5"]}
    said: list[str] = []
    settings = {"rounds": 2, "tolerance": 2e-3, "min_gain": 0.02, "rows": 64}
    outcome = search(config, space, measure, say=said.append, **settings)  # type: ignore[arg-type]
    assert outcome.winner == {"model.policy.cpu_threads": 2, "model.micro_batch_size": 32}
    accepted = [comparison.decision.accepted for comparison in outcome.comparisons]
    assert accepted == [True, False, True, False, False]
    assert outcome.final is not None
    assert outcome.final.decision.gain == pytest.approx(0.95)
    assert order[:4] == ["incumbent", "candidate", "candidate", "incumbent"]
    assert any("oom: full" in line for line in said)
    slow = search(config, space, lambda c, n: replace(GOOD, tokens_per_s=100 - len(c)), say=said.append, **settings)  # type: ignore[arg-type]
    assert slow.winner == {}
    assert slow.final is None


def test_space_follows_device_and_configuration() -> None:
    config = {"model": {"policy": {"cpu_threads": 1}, "micro_batch_size": 8, "rollout": {"batch_size": None}}}
    assert set(default_space(config, False)) == {
        *("model.policy.cpu_threads", "model.micro_batch_size", "model.rollout.batch_size"),
    }
    config["model"]["rollout"]["engine"] = "auto"  # type: ignore[index]
    assert default_space(config, True)["model.rollout.engine"][:2] == ["graph", "hf"]
    assert resolve_value("x0.5", None, 64) == 32
    assert resolve_value("xyz", 3, 64) == "xyz"


def tune_arguments(fit_arguments: Fit, model: Path, root: Path) -> list[str]:
    space = '{"model.micro_batch_size": [16, 1], "data.prompts_per_step": [2]}'
    own = [f"--tune.space={space}", "--tune.steps=3", "--tune.warmup=1", "--tune.rounds=2"]
    return ["tune", *list(fit_arguments(model, root))[1:], "--model.policy.cpu_threads=1", *own]


@pytest.mark.faults
def test_killed_search_goes_on_and_the_winner_is_a_configuration(
    start_grpo_lit: Callable[..., Any],
    grpo_lit_command: Callable[..., Any],
    fit_arguments: Fit,
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    arguments = tune_arguments(fit_arguments, tiny_llama, root)
    runs = root / "tune" / "runs.jsonl"
    process = start_grpo_lit(*arguments)
    while not runs.exists() or runs.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with (root / "tune" / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the trial that was under way outlives the search, and keeps its folder
    before = runs.read_bytes()
    before = before[: before.rfind(b"\n") + 1]
    result = grpo_lit_command(*arguments)
    assert result.returncode == 0, result.stderr
    after = runs.read_bytes()
    assert after.startswith(before)
    names = [json.loads(line)["name"] for line in after.splitlines()]
    assert len(names) == len(set(names)) >= 11, "three comparisons of two rounds, the one of other rows cut short"
    decisions = [json.loads(line) for line in (root / "tune/decisions.jsonl").read_text().splitlines()]
    rows = next(d for d in decisions if d["key"] == "data.prompts_per_step")
    assert "other rows per step" in rows["decision"]["reason"]
    tried = {d["value"]: d for d in decisions if d["key"] == "model.micro_batch_size"}
    assert not tried[1]["decision"]["accepted"], "sixteen micro-batches of one row are slower than two of eight"
    assert "tokens/s" in tried[1]["decision"]["reason"]
    winner = yaml.safe_load((root / "tune/winner.yaml").read_text())
    changes = yaml.safe_load((root / "tune/changes.yaml").read_text())
    assert winner["model"]["micro_batch_size"] == changes.get("model", {}).get("micro_batch_size", 8)
    assert winner["trainer"]["max_steps"] == 3, "what was changed to measure is not part of the winner"
    assert (root / "tune/tune.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--tune.rounds=1"], "tune.rounds=1"),
        (["--tune.tolerance=-1"], "tune.tolerance=-1"),
        (["--tune.timeout_s=0"], "tune.timeout_s=0"),
        (["--tune.steps=2", "--tune.warmup=2"], "tune.steps=2"),
        (['--tune.space={"model.nothing.at_all": [1]}'], "model.nothing.at_all"),
        (['--tune.space={"model.loss.beta": [0.1]}'], "model.loss.beta"),
        (['--tune.space={"model.optimizer.lr": [0.1]}'], "model.optimizer.lr"),
        (['--tune.space={"model.micro_batch_size": []}'], "model.micro_batch_size: []"),
        (["--model.loss.beta=-1"], "beta"),
    ],
)
def test_tune_refuses(
    extra: list[str], words: str, fit_arguments: Fit, tiny_llama: Path, refused: Callable[..., None]
) -> None:
    refused(["tune", *fit_arguments(tiny_llama, "run")[1:], *extra], words)
