"""Where faults are injected: real runs of the quick start, and what they are compared with."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from safetensors.torch import load_file

from grpo_lit.callbacks.metrics_file import without_timings
from grpo_lit.cli import main

ROOT = Path(__file__).parent.parent.parent
STEPS = 6
DDP = ("--trainer.devices=2", "--trainer.strategy=ddp")
LIMIT_S = 230.0
"""No command here takes a tenth of it on an idle machine."""
BASE = [
    "fit",
    "--config=quickstart",
    f"--trainer.max_steps={STEPS}",
    "--trainer.val_check_interval=3",
    "--checkpoint.every_n_rollout_steps=1",
    "--data.prompts_per_step=8",
    "--data.val_prompts=16",
    "--model.rewards=[math_accuracy,fault_rewards.extra]",
]
# Abstains, and takes so long that a signal lands inside a step; where FAULT says so, its third call goes wrong.
REWARDS = '''
import math, os, time

calls = 0

def extra(prompts, completions, **columns):
    global calls
    calls += 1
    time.sleep(0.2)
    fault = os.environ.get("FAULT") if calls == 3 else None
    if fault == "raises":
        raise ValueError("no such grader")
    if fault == "hangs":
        time.sleep(10_000)
    if fault == "short":
        return [0.0]
    if fault == "nan":
        return [math.nan] * len(completions)
    if fault == "infinite":
        return [math.inf] * len(completions)
    if fault == "text":
        return ["good"] * len(completions)
    return [None] * len(completions)

def for_the_worker(prompts, completions, **columns):
    """Answers that exact algebra can't decide, so that the verifier's worker process has to."""
    from grpo_lit.rewards.verify import default_pool

    global calls
    calls += 1
    numbers = [1000 * calls + row for row in range(len(completions))]
    responses = [rf"\\boxed{{{n}\\sin 2x}}" for n in numbers]
    golds = [rf"{2 * n + n % 2}\\sin x\\cos x" for n in numbers]
    verdicts = default_pool().verify_many(responses, golds)
    return [None if v.kind == "crashed" else float(v.correct) for v in verdicts]
'''


@dataclass(frozen=True)
class Outcome:
    """What became of one injected fault."""

    lost: str
    """"nothing", or what differs from the undisturbed run."""
    saw: str
    """The words on the terminal."""
    exit_code: int | None
    """Of the run that the fault met."""


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    name: str
    title: str
    tries: int
    inject: Callable[[Lab, int], Outcome]


FAULTS: dict[str, Fault] = {}


def fault(title: str, tries: int = 1) -> Callable[[Callable[[Lab, int], Outcome]], Callable[[Lab, int], Outcome]]:
    """Enter a function ``(lab, number of the try) -> Outcome`` into the table."""

    def enter(function: Callable[[Lab, int], Outcome]) -> Callable[[Lab, int], Outcome]:
        FAULTS[function.__name__] = Fault(function.__name__, title, tries, function)
        return function

    return enter


class NotPossibleError(RuntimeError):
    """This machine lacks what the fault needs."""


class Lab:
    """A folder to break things in; the undisturbed runs in it are kept from call to call.

    Args:
        folder: where runs go; made if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "fault_rewards.py").write_text(REWARDS)

    def fresh(self, name: str) -> Path:
        """Path of a run folder that does not exist yet."""
        number = 0
        while (path := self.folder / f"{name}-{number}").exists():
            number += 1
        return path

    def reference(self, *extra: str, name: str = "reference") -> Path:
        """The undisturbed run with these settings."""
        root = self.folder / name
        if not (root / "adapter" / "adapter_config.json").is_file():
            done = self.run(root, *extra)
            assert done.returncode == 0, done.stderr[-2000:]
        return root

    def command(self, root: Path, *extra: str) -> list[str]:
        """The command line of a run."""
        return [sys.executable, "-m", "grpo_lit", *BASE, f"--trainer.default_root_dir={root}", *extra]

    def environment(self, more: dict[str, str] | None = None) -> dict[str, str]:
        """The package of this checkout, no network, one thread."""
        return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(more or {})}

    def run(
        self, root: Path, *extra: str, env: dict[str, str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Train to the end, or until it stops by itself."""
        return self.call(self.command(root, *extra), env=env, **more)

    def call(
        self, command: list[str], env: dict[str, str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Any command of grpo-lit, in the lab's folder; with ``user`` and the like, in an interpreter of its own."""
        if more or "LD_PRELOAD" in (env or {}) or DDP[0] in command:
            more = {"capture_output": True, "text": True, "timeout": LIMIT_S, **more}
            return subprocess.run(command, cwd=self.folder, env=self.environment(env), **more)
        out, err = self.folder / "stdout.txt", self.folder / "stderr.txt"
        code = Forked(command[3:], self.folder, self.environment(env), out, err).wait(LIMIT_S)
        return subprocess.CompletedProcess(command, code, *(file.read_text(errors="replace") for file in (out, err)))

    def start(self, root: Path, *extra: str, env: dict[str, str] | None = None) -> Running:
        """Start training and return at once."""
        log, command = self.folder / f"{root.name}.log", self.command(root, *extra)
        if DDP[0] not in command:
            return Running(Forked(command[3:], self.folder, self.environment(env), log, log), log, root)
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment(env), stdout=file, stderr=subprocess.STDOUT
            )
        return Running(process, log, root)

    def resume(self, root: Path, *extra: str) -> None:
        """Go on from the last checkpoint, or from the start where there is none yet."""
        there = (root / "checkpoints" / "last.ckpt").exists()
        done = self.run(root, *extra, *(["--ckpt_path=last"] if there else []))
        assert done.returncode == 0, done.stderr[-2000:]

    def difference(self, root: Path, reference: Path | None = None) -> str:
        """What differs from the undisturbed run, in metrics without timings, completions and weights."""
        pair = (root, reference or self.reference())
        lines = [
            [without_timings(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in pair
        ]
        if lines[0] != lines[1]:
            return "metrics differ"
        texts = [{f.name: f.read_text() for f in (folder / "completions").glob("step_*.jsonl")} for folder in pair]
        if texts[0] != texts[1]:
            return "completions differ"
        weights = [load_file(folder / "adapter" / "adapter_model.safetensors") for folder in pair]
        if any(not weights[0][name].equal(value) for name, value in weights[1].items()):
            return "weights differ"
        return "nothing"


class Forked:
    """A command in a process of its own, forked after the libraries were imported; they take most of a short run.

    Args:
        arguments: after ``grpo-lit``.
        folder: working directory.
        environment: the whole of it.
        out: file of the standard output.
        err: file of the standard error.
    """

    def __init__(self, arguments: list[str], folder: Path, environment: dict[str, str], out: Path, err: Path) -> None:
        self.returncode: int | None = None
        for file in {out, err}:
            file.write_text("")
        preload()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be_the_command(arguments, folder, environment, out, err)

    def poll(self) -> int | None:
        """The exit code, minus the signal's number where one ended it; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = LIMIT_S) -> int:
        """The exit code.

        Raises:
            AssertionError: it still runs; it is killed.
        """
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                self.send_signal(signal.SIGKILL)
                raise AssertionError(f"still running after {timeout:.0f} s")
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, if the process is still there."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def preload() -> None:
    """Import what a run needs, into this process."""
    import tensorboard.compat.proto.event_pb2  # noqa: F401
    import torch.utils.tensorboard  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    import grpo_lit.cli.compare
    import grpo_lit.cli.generate
    import grpo_lit.cli.train  # noqa: F401


def _be_the_command(arguments: list[str], folder: Path, environment: dict[str, str], out: Path, err: Path) -> NoReturn:
    code = 1
    try:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        for number, file in ((1, out), (2, err)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
        sys.path.insert(0, str(folder))  # as python -m does
        sys.argv = ["grpo-lit", *arguments]
        code = main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        os._exit(code)


@dataclass
class Running:
    """A run that goes on while the fault is injected."""

    process: subprocess.Popen[bytes] | Forked
    log: Path
    root: Path

    def wait_for_lines(self, count: int) -> None:
        """Until the run has logged so many steps, or has ended."""
        file = self.root / "metrics.jsonl"
        while self.process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < count):
            time.sleep(0.02)

    def end(self, timeout: float = LIMIT_S) -> str:
        """Wait for the end; what was printed."""
        self.process.wait(timeout)
        return self.log.read_text(errors="replace")


def said(text: str) -> str:
    """The error line of a run, or its last line; a traceback is no message."""
    assert "Traceback" not in text, text[-3000:]
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    return errors[-1] if errors else lines[-1] if lines else "(nothing)"
