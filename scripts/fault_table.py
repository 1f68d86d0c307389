"""Inject faults into real runs and write the table of docs/faults.md: what was tried, what was lost, what was said.

    python scripts/fault_table.py                     all faults; takes about a quarter of an hour on two cores
    python scripts/fault_table.py --only sigkill      one of them; prints, writes nothing

Every run trains the quick start's model for a few steps. An undisturbed run is the measure: after a fault and a resume,
the metrics without their timings, the completions and the final adapter must be those of the undisturbed run, bit for
bit. Linux only (it fills a small file system and sends signals).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from grpo_lit.callbacks.metrics_file import without_timings

STEPS = 6
BASE = [
    "fit",
    "--config=quickstart",
    f"--trainer.max_steps={STEPS}",
    "--trainer.val_check_interval=3",
    "--checkpoint.every_n_rollout_steps=1",
    "--data.prompts_per_step=8",
    "--data.val_prompts=16",
    "--model.rewards=[math_accuracy,fault_rewards.slow]",
]
REWARDS = """
import os, time
def slow(prompts, completions, **columns):
    time.sleep(0.4)
    return [None] * len(completions)
def raises(prompts, completions, **columns):
    raise ValueError("no such grader")
def hangs(prompts, completions, **columns):
    time.sleep(10_000)
def short(prompts, completions, **columns):
    return [0.0]
def nan(prompts, completions, **columns):
    return [float("nan")] * len(completions)
"""


@dataclass
class Row:
    """A line of the table."""

    fault: str
    tried: int
    lost: str
    saw: str


class Lab:
    """A folder to break things in, with one undisturbed run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "fault_rewards.py").write_text(REWARDS)
        self.reference = folder / "reference"
        done = self.run(self.reference)
        assert done.returncode == 0, done.stderr

    def command(self, root: Path, *extra: str) -> list[str]:
        return [sys.executable, "-m", "grpo_lit", *BASE, f"--trainer.default_root_dir={root}", *extra]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def run(self, root: Path, *extra: str, timeout: float = 200, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(root, *extra),
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            **more,
        )

    def start(self, root: Path, *extra: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(root, *extra),
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def resume(self, root: Path) -> None:
        """Go on from the last checkpoint, or from the start where there is none yet."""
        there = (root / "checkpoints" / "last.ckpt").exists()
        done = self.run(root, *(["--ckpt_path=last"] if there else []))
        assert done.returncode == 0, done.stderr[-2000:]

    def difference(self, root: Path) -> str:
        """What differs from the undisturbed run; "nothing" where nothing does."""
        lines, expected = (
            [without_timings(json.loads(line)) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (root, self.reference)
        )
        if lines != expected:
            return "metrics"
        texts, expected_texts = (
            {file.name: file.read_text() for file in sorted((folder / "completions").glob("step_*.jsonl"))}
            for folder in (root, self.reference)
        )
        if texts != expected_texts:
            return "completions"
        weights, expected_weights = (
            load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (root, self.reference)
        )
        if any(not weights[name].equal(value) for name, value in expected_weights.items()):
            return "weights"
        return "nothing"


def one_line(text: str) -> str:
    """The error line of a run."""
    lines = [line for line in text.strip().splitlines() if "error:" in line]
    assert "Traceback" not in text, text[-2000:]
    return lines[-1].strip() if lines else text.strip().splitlines()[-1]


def wait_for_lines(root: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until a run has logged so many steps."""
    file = root / "metrics.jsonl"
    while process.poll() is None and (not file.exists() or len(file.read_text().splitlines()) < count):
        time.sleep(0.02)


# ---- faults ---------------------------------------------------------------------------------------------------------


def sigkill(lab: Lab) -> Row:
    """SIGKILL at a random moment, then a resume."""
    numbers, losses, tries = random.Random(0), [], 20
    for number in range(tries):
        root = lab.folder / f"kill{number}"
        process = lab.start(root)
        wait_for_lines(root, numbers.randrange(STEPS), process)
        time.sleep(numbers.random() * 0.6)
        process.kill()
        process.wait()
        lab.resume(root)
        losses.append(lab.difference(root))
        shutil.rmtree(root)
    return Row("SIGKILL at a random moment, resumed", tries, worst(losses), "`--ckpt_path last` goes on with the step")


def signals(lab: Lab) -> Row:
    """SIGTERM and Ctrl-C."""
    losses, said = [], ""
    for name in (signal.SIGTERM, signal.SIGINT):
        root = lab.folder / name.name
        process = lab.start(root)
        wait_for_lines(root, 2, process)
        process.send_signal(name)
        said = process.communicate()[0]
        assert process.returncode == 0, said
        lab.resume(root)
        losses.append(lab.difference(root))
    words = "stopping as asked; resume with --ckpt_path last"
    assert words in said
    return Row("SIGTERM, Ctrl-C", 2, worst(losses), words)


def full_disk(lab: Lab) -> Row:
    """No space left while a checkpoint is written."""
    root = lab.folder / "full"
    small = lab.folder / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2600k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode:
        return Row("full disk", 0, "not run", "needs the right to mount a small file system")
    try:
        done = lab.run(small / "run")
        assert done.returncode == 1, done.stdout
        shutil.copytree(small / "run", root)
    finally:
        subprocess.run(["umount", str(small)], check=True)
    lab.resume(root)
    return Row("disk full in the middle of a run, resumed elsewhere", 1, lab.difference(root), one_line(done.stderr))


def bad_checkpoints(lab: Lab) -> Row:
    """A truncated checkpoint, and one of another configuration."""
    root = Path(shutil.copytree(lab.reference, lab.folder / "bad"))
    last = root / "checkpoints" / "last.ckpt"
    before = sorted(path.name for path in root.rglob("*"))
    other = lab.run(root, "--ckpt_path=last", "--model.lora.rank=4")
    assert other.returncode == 2, other.stderr
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    torn = lab.run(root, "--ckpt_path=last")
    assert torn.returncode in (1, 2), torn.stderr
    same = before == sorted(path.name for path in root.rglob("*") if ".lock" not in path.name) or before
    assert same
    return Row("checkpoint truncated; of another LoRA section", 2, "nothing", one_line(torn.stderr))


def read_only(lab: Lab) -> Row:
    """A run folder that can't be written."""
    blocked = lab.folder / "file"
    blocked.write_text("a file where the folder should be")
    done = lab.run(blocked / "run")
    assert done.returncode == 1, done.stderr
    return Row("run folder that can't be written", 1, "nothing", one_line(done.stderr))


def torn_metrics(lab: Lab) -> Row:
    """metrics.jsonl ends in half a line."""
    root = lab.folder / "torn"
    process = lab.start(root, "--checkpoint.every_n_rollout_steps=2")  # a line is on disk before its step's checkpoint
    wait_for_lines(root, 4, process)  # before training, and steps 1 to 3
    process.kill()
    process.wait()
    file = root / "metrics.jsonl"
    text = file.read_text()
    file.write_text(text[: len(text) - 40])
    lab.resume(root)
    return Row("metrics.jsonl with a torn last line, resumed", 1, lab.difference(root), "the line is written again")


def rewards(lab: Lab) -> Row:
    """A reward function that raises, hangs, returns a wrong length or NaN."""
    said = []
    for name in ("raises", "short", "nan"):
        done = lab.run(lab.folder / name, f"--model.rewards=[fault_rewards.{name}]")
        assert done.returncode in (1, 2), (name, done.stdout)
        said.append(one_line(done.stderr))
    try:
        done = lab.run(lab.folder / "hangs", "--model.rewards=[fault_rewards.hangs]", timeout=170)
        assert done.returncode in (1, 2), done.stdout
        said.append(one_line(done.stderr))
    except subprocess.TimeoutExpired:
        said.append("a function that hangs: still waiting after 170 s")
    return Row("reward function that raises, returns a wrong length, NaN, hangs", 4, "nothing", " / ".join(said))


def verifier_killed(lab: Lab) -> Row:
    """The verifier's worker processes are killed again and again."""
    root = lab.folder / "verifier"
    process = lab.start(root)
    kills = 0
    while process.poll() is None:
        for task in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            line = Path(f"/proc/{task}/cmdline")
            if line.exists() and b"grpo_lit.rewards" in line.read_bytes():
                os.kill(int(task), signal.SIGKILL)
                kills += 1
        time.sleep(0.2)
    assert process.returncode == 0, process.communicate()[0]
    return Row("verifier worker killed", max(kills, 1), lab.difference(root), "a new worker; the run goes on")


def nan_weights(lab: Lab) -> Row:
    """NaN in the weights of a checkpoint."""
    root = Path(shutil.copytree(lab.reference, lab.folder / "nan_weights"))
    last = root / "checkpoints" / "last.ckpt"
    content = torch.load(last, weights_only=True)
    name = next(iter(content["state_dict"]))
    content["state_dict"][name].view(-1)[0] = float("nan")
    torch.save(content, last)
    done = lab.run(root, "--ckpt_path=last", f"--trainer.max_steps={STEPS + 2}")
    said = one_line(done.stderr) if done.returncode else one_line(done.stdout)
    return Row("NaN in the weights", 1, "nothing", f"exit {done.returncode}: {said}")


def clock_jumps(lab: Lab) -> Row:
    """time.time runs a day ahead, then a day behind."""
    (lab.folder / "sitecustomize.py").write_text(
        "import time, itertools\n_real, _turn = time.time, itertools.count()\n"
        "time.time = lambda: _real() + (86400 if next(_turn) % 2 else -86400)\n"
    )
    root = lab.folder / "clock"
    try:
        done = subprocess.run(
            lab.command(root),
            cwd=lab.folder,
            env={**lab.environment(), "PYTHONPATH": f"{lab.folder}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            timeout=200,
        )
    finally:
        (lab.folder / "sitecustomize.py").unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    return Row("clock that jumps by two days at every look", 1, lab.difference(root), "nothing: times are monotonic")


def two_runs(lab: Lab) -> Row:
    """A second run into the folder of one that is going on."""
    root = lab.folder / "two"
    process = lab.start(root)
    wait_for_lines(root, 1, process)
    second = lab.run(root)
    process.communicate()
    assert second.returncode in (1, 2), second.stdout
    assert process.returncode == 0
    return Row("two runs into one folder", 1, lab.difference(root), one_line(second.stderr))


def garbage(lab: Lab) -> Row:
    """10,000 prompts of garbage."""
    numbers = random.Random(1)
    kinds: list[Callable[[], str]] = [
        lambda: "",
        lambda: "".join(chr(numbers.randrange(32)) for _ in range(20)),
        lambda: "x" * 1_000_000,
        lambda: "\u202e\u05d0\u05d1\u0627\u0644" * 5,
        lambda: "<s></s><pad>" * 3,
        lambda: "".join(chr(numbers.randrange(0x20, 0x2FFFF)) for _ in range(30)).encode("utf-8", "ignore").decode(),
        lambda: f"{numbers.randrange(10)}+{numbers.randrange(10)}",
    ]
    weights = [20, 20, 0.02, 20, 20, 20, 20]
    path = lab.folder / "garbage.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for _ in range(10_000):
            question = numbers.choices(kinds, weights)[0]() or " "
            file.write(json.dumps({"question": question, "answer": "1"}) + "\n")
    root = lab.folder / "garbage"
    done = lab.run(
        root,
        *("--data.dataset=custom", f"--data.path={path}", "--data.dataset_options=null", "--data.max_prompt_length=64"),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    left_out = [line for line in (done.stdout + done.stderr).splitlines() if "left out" in line]
    return Row("10,000 prompts of garbage", 1, "nothing", left_out[0].strip()[:160] if left_out else "trains")


FAULTS: dict[str, Callable[[Lab], Row]] = {
    function.__name__: function
    for function in (
        sigkill,
        signals,
        full_disk,
        bad_checkpoints,
        read_only,
        torn_metrics,
        rewards,
        verifier_killed,
        nan_weights,
        clock_jumps,
        two_runs,
        garbage,
    )
}


def worst(losses: list[str]) -> str:
    """ "nothing" only where every try lost nothing."""
    bad = [loss for loss in losses if loss != "nothing"]
    return f"{len(bad)} of {len(losses)}: {bad[0]}" if bad else "nothing"


def table(rows: list[Row]) -> str:
    """The Markdown table."""
    lines = ["| fault | times tried | what was lost | what the user saw |", "|---|---|---|---|"]
    lines += [f"| {row.fault} | {row.tried} | {row.lost} | {row.saw.replace('|', chr(92) + '|')} |" for row in rows]
    return "\n".join(lines)


def main() -> int:
    """Run the faults."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=sorted(FAULTS), action="append")
    parser.add_argument("--output", type=Path, default=None, help="write the table to this file")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(Path(scratch))
        for name in options.only or FAULTS:
            start = time.monotonic()
            rows.append(FAULTS[name](lab))
            print(f"{name} ({time.monotonic() - start:.0f} s): {rows[-1]}", flush=True)
    text = f"{table(rows)}\n\nRun on {date.today()}, torch {torch.__version__}, on a CPU.\n"
    if options.output is not None:
        options.output.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
