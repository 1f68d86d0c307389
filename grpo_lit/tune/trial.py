"""One measured run of a configuration: a few rollout steps of ``grpo-lit fit`` in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lit.callbacks.metrics_file import read_metrics

Changes = Mapping[str, Any]
"""Dotted key -> value, over the configuration that is tuned."""


@dataclass
class Measurement:
    """What one run gave."""

    status: str
    """ok, oom (ended by it, or replayed after it), timeout or failed."""
    tokens_per_s: float | None = None
    """Sampled tokens over the time of the steps after the warm-up."""
    step_s: list[float] = field(default_factory=list)
    """Seconds of each step after the warm-up."""
    rows: list[int] = field(default_factory=list)
    """Completions of every step."""
    loss: list[float] = field(default_factory=list)
    """Loss of every step."""
    grad_norm: list[float] = field(default_factory=list)
    """Gradient norm of every step."""
    reward: list[float] = field(default_factory=list)
    """Mean reward of every step."""
    peak_mib: float | None = None
    """Largest peak of GPU memory over the phases."""
    error: str | None = None
    seconds: float = 0.0
    """Of the whole run, start included."""


def trial_arguments(base: Sequence[str], changes: Changes, folder: Path, steps: int, passes: int) -> list[str]:
    """Arguments of ``fit``: the base with the changes, without validation and checkpoints on the way."""
    own = {
        "trainer.default_root_dir": str(folder),
        "trainer.max_steps": steps * passes,
        "trainer.limit_val_batches": 0,
        "trainer.num_sanity_val_steps": 0,
        "trainer.enable_progress_bar": False,
        "trainer.logger": False,
        "checkpoint.every_n_rollout_steps": 1_000_000,
    }
    return [*base, *options_of({**changes, **own})]


def options_of(changes: Changes) -> list[str]:
    """Changes as typed on the command line."""
    return [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in changes.items()]


def run_trial(arguments: Sequence[str], folder: Path, *, fork: bool, timeout_s: float, warmup: int) -> Measurement:
    """Run ``fit`` and read what it recorded.

    Args:
        arguments: of `trial_arguments`.
        folder: its run folder; what an earlier, killed trial left there is deleted.
        fork: start it as a copy of this process, libraries loaded; not where CUDA may be in use.
        timeout_s: after which it is killed.
        warmup: steps that do not count.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder.with_suffix(".log")
    start = time.monotonic()
    status = _forked(arguments, log, timeout_s) if fork else _spawned(arguments, log, timeout_s)
    measured = read_measurement(folder, log, status, warmup)
    measured.seconds = time.monotonic() - start
    shutil.rmtree(folder, ignore_errors=True)
    return measured


def _spawned(arguments: Sequence[str], log: Path, timeout_s: float) -> int | None:
    command = [sys.executable, "-m", "grpo_lit", "fit", *arguments]
    with log.open("w") as output:
        try:
            return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, timeout=timeout_s).returncode
        except subprocess.TimeoutExpired:
            return None


def _forked(arguments: Sequence[str], log: Path, timeout_s: float) -> int | None:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            from grpo_lit.cli import main

            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = main(["fit", *arguments])
        finally:
            os._exit(code)  # nothing of the parent's may run in its copy
    return _wait(child, timeout_s)


def _wait(child: int, timeout_s: float) -> int | None:
    import signal

    deadline = time.monotonic() + timeout_s
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                child = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def read_measurement(folder: Path, log: Path, status: int | None, warmup: int) -> Measurement:
    """From a finished run's files to a measurement."""
    records = [record for record in read_metrics(folder / "metrics.jsonl") if record["step"] > 0]
    said = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    last = said[-1][-300:] if said else ""
    if status is None:
        return Measurement("timeout", error="longer than the limit")
    if status != 0:
        return Measurement("oom" if "out of memory" in last.lower() or "GPU memory" in last else "failed", error=last)
    counted = records[warmup:]
    if not counted:
        return Measurement("failed", error="no step after the warm-up")
    seconds = [record["perf/step_s"] for record in counted]
    tokens = sum(record["perf/tokens_per_sec"] * record["perf/step_s"] for record in counted)
    replays = max(record.get("oom/replays", 0.0) or 0.0 for record in records)
    peaks = [value for record in records for name, value in record.items() if name.startswith("vram/peak")]
    return Measurement(
        "oom" if replays else "ok",
        tokens / sum(seconds),
        seconds,
        [_rows(folder, record["step"]) for record in records],
        [record["train/loss"] for record in records],
        [record["train/grad_norm"] for record in records],
        [record["rollout/reward_mean"] for record in records],
        max(peaks, default=None),
        None,
    )


def _rows(folder: Path, step: int) -> int:
    path = folder / "completions" / f"step_{step:06d}.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0
