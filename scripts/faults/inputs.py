"""Reward functions that misbehave, and prompts that are garbage."""

from __future__ import annotations

import json
import random
from pathlib import Path

from faults.lab import Lab, Outcome, fault, said

KINDS = {
    "control characters": lambda draw: "".join(chr(draw.randrange(1, 32)) for _ in range(20)) + "?",
    "NUL": lambda draw: "\0" * 8 + "1+1",
    "right-to-left": lambda draw: "\u202e\u05d0\u05d1\u0627\u0644\u200f" * draw.randrange(1, 9),
    "template tokens": lambda draw: draw.choice(["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]) * 5,
    "braces": lambda draw: draw.choice(["{question}", "{", "{0}", "{{x}}", "%s %d", "{% raw %}{{ messages }}"]),
    "any of Unicode": lambda draw: "".join(chr(draw.randrange(0x20, 0xD800)) for _ in range(30)) + "x",
    "lone surrogates": lambda draw: "\ud800" * 3 + "2+2",
    "sums": lambda draw: f"{draw.randrange(10)}+{draw.randrange(10)}",
}


def _reward(lab: Lab, kind: str) -> Outcome:
    """The third call of a function goes wrong; with the function mended, the run is resumed."""
    root = lab.fresh(f"reward_{kind}")
    done = lab.run(root, *(["--model.reward_timeout_s=5"] if kind == "hangs" else []), env={"FAULT": kind})
    assert done.returncode == 2, done.stdout + done.stderr
    lab.resume(root)
    return Outcome(lab.difference(root), said(done.stderr), done.returncode)


@fault("reward function that raises, mended, resumed")
def reward_raises(lab: Lab, number: int) -> Outcome:
    """ValueError in the third step."""
    return _reward(lab, "raises")


@fault("reward function that hangs (limit set to 5 s), mended, resumed")
def reward_hangs(lab: Lab, number: int) -> Outcome:
    """It sleeps for hours."""
    return _reward(lab, "hangs")


@fault("reward function that returns a wrong length, mended, resumed")
def reward_short(lab: Lab, number: int) -> Outcome:
    """One number for 64 completions."""
    return _reward(lab, "short")


@fault("reward function that returns NaN, mended, resumed")
def reward_nan(lab: Lab, number: int) -> Outcome:
    """Nothing but NaN."""
    return _reward(lab, "nan")


@fault("reward function that returns infinity or texts, mended, resumed", tries=2)
def reward_no_numbers(lab: Lab, number: int) -> Outcome:
    """inf, then str."""
    return _reward(lab, ("infinite", "text")[number])


def write_garbage(path: Path, count: int, megabytes: int = 3) -> None:
    """So many rows, of every kind in turn, a few of a million characters among them."""
    draw = random.Random(1)
    kinds = list(KINDS.values())
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            long = number % (count // megabytes) == 5
            question = "x+" * 500_000 if long else kinds[number % len(kinds)](draw)
            answer = draw.choice(["1", "\u202e7", "</s>", "\\boxed{", "\x07", "nan", "1e999999"])
            file.write(json.dumps({"question": question, "answer": answer}) + "\n")


@fault("10,000 prompts of garbage, each trained on once")
def garbage(lab: Lab, number: int) -> Outcome:
    """Control characters, NUL, a million characters, right-to-left, template tokens, braces, lone surrogates."""
    path, root = lab.folder / "garbage.jsonl", lab.fresh("garbage")
    write_garbage(path, 10_000)
    done = lab.run(
        root,
        *("--data.dataset=custom", f"--data.path={path}", "--data.dataset_options=null", "--data.max_prompt_length=64"),
        *("--data.prompts_per_step=500", "--model.rollout.group_size=2", "--trainer.max_epochs=1"),
        *("--trainer.max_steps=-1", "--trainer.val_check_interval=100", "--model.rewards=[math_accuracy]"),
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-3000:]
    assert "Traceback" not in text
    seen = {
        json.loads(line)["prompt_index"]
        for file in (root / "completions").glob("step_*.jsonl")
        for line in file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    }
    assert len(seen) > 9000, len(seen)
    noticed = [line.strip() for line in text.splitlines() if "left out" in line]
    return Outcome("nothing", noticed[0] if noticed else f"trains on {len(seen)} prompts", 0)


@fault("an empty prompt among the rows", tries=2)
def empty_prompt(lab: Lab, number: int) -> Outcome:
    """Nothing at all, or spaces: the row is named before a model is loaded."""
    path, root = lab.folder / "empty.jsonl", lab.fresh("empty")
    rows = [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(9)]
    rows[6]["question"] = ("", " \t\u00a0")[number]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = lab.run(root, "--data.dataset=custom", f"--data.path={path}", "--data.dataset_options=null")
    assert done.returncode == 2, done.stdout + done.stderr
    assert not root.exists()
    return Outcome("nothing", said(done.stderr), done.returncode)
