"""What a run shows, writes and survives, on the real command."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_lit.callbacks.completions_file import markdown_table
from grpo_lit.callbacks.progress import describe
from grpo_lit.cli import main

Fit = Callable[..., Sequence[str]]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_output_says_what_is_trained_where_and_what_came_of_it(
    grpo_lit_command: Run, fit_arguments: Fit, tiny_llama: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    result = grpo_lit_command(*fit_arguments(tiny_llama, root))
    assert result.returncode == 0, result.stderr
    out = result.stdout
    assert "4 prompts per step x 4 completions per prompt = 16 rows" in out
    assert "over 2 micro-batch(es) of 8 rows" in out
    assert "trainer.max_steps=3 optimizer steps = 3 rollout steps" in out
    assert out.count(str(root)) >= 2, "the run's folder at start and end"
    assert "validation after rollout step 0: accuracy" in out
    assert "held-out accuracy:" in out
    assert "no validation" not in out
    again = grpo_lit_command(*fit_arguments(tiny_llama, root), "--trainer.val_check_interval=9")
    assert again.returncode == 0
    assert "no validation in 3 rollout step(s) (trainer.val_check_interval)" in again.stdout
    assert f"kept in {root}.1" in again.stdout
    assert (tmp_path / "run.1" / "metrics.jsonl").read_text().count("\n") == 4
    assert (root / "metrics.jsonl").read_text().count("\n") == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.faults
def test_signal_finishes_the_step_saves_and_the_resume_is_exact(
    number: signal.Signals,
    grpo_lit_command: Run,
    start_grpo_lit: Callable[..., Any],
    fit_arguments: Fit,
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    arguments = [
        *fit_arguments(tiny_llama, tmp_path / "run"),
        "--trainer.max_steps=200",
        "--trainer.val_check_interval=500",
    ]
    process = start_grpo_lit(*arguments)
    while not (tmp_path / "run" / "completions" / "step_000003.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(120) == 0
    out, _ = process.read()
    assert "resume with --ckpt_path last" in out
    lines = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(len(lines)))
    last = lines[-1]
    assert 3 <= last < 200
    more = [f"--trainer.max_steps={last + 2}", "--ckpt_path=last"]
    result = grpo_lit_command(*arguments, *more)
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(last + 3))


SLOW = """
import pathlib, time
def wait(name):
    pathlib.Path(name).touch()
    time.sleep(60)
def reward(prompts, completions):
    wait("validating")
    return [0.0] * len(completions)
"""


@pytest.mark.parametrize(
    ("when", "number", "code", "what"),
    [
        ("importing", signal.SIGTERM, 143, "terminated by SIGTERM"),
        ("validating", signal.SIGTERM, 143, "terminated by SIGTERM"),
        ("validating", signal.SIGINT, 130, "interrupted"),
    ],
)
@pytest.mark.faults
def test_a_stop_before_the_first_step_is_told(
    when: str,
    number: signal.Signals,
    code: int,
    what: str,
    start_grpo_lit: Callable[..., Any],
    fit_arguments: Fit,
    tiny_llama: Path,
    tmp_path: Path,
) -> None:
    (tmp_path / "slow.py").write_text(SLOW + 'wait("importing")\n' * (when == "importing"))
    process = start_grpo_lit(*fit_arguments(tiny_llama, "run", "--model.rewards=[slow.reward]"))
    while not (tmp_path / when).exists():
        assert process.poll() is None, process.read()
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(30) == code
    told = f"{what} before the first step: nothing was trained, there is nothing to save"
    assert process.read()[1] == f"grpo-lit: error: {told}\n"
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.faults
def test_full_disk_ends_in_one_line_and_the_last_good_checkpoint_survives(
    grpo_lit_command: Run, fit_arguments: Fit, tiny_llama: Path, tmp_path: Path
) -> None:
    """The kernel refuses to let any file grow past a size that the checkpoint exceeds."""
    # without the count of lines that are run, whose file could not grow either
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    arguments = fit_arguments(tiny_llama, tmp_path / "run", "--trainer.max_steps=1")
    assert grpo_lit_command(*arguments).returncode == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    good = checkpoint.read_bytes()
    limit = len(good) // 2
    result = subprocess.run(
        [sys.executable, "-m", "grpo_lit", *arguments, "--trainer.max_steps=3", "--ckpt_path=last"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert result.returncode == 1
    error = result.stderr.strip().splitlines()
    assert len(error) == 1, result.stderr
    assert "can't be written (File too large)" in error[0]
    assert f"{checkpoint} keeps the last good checkpoint" in error[0]
    assert checkpoint.read_bytes() == good
    assert {path.name for path in checkpoint.parent.iterdir()} == {"last.ckpt"}
    again = grpo_lit_command(*arguments, "--ckpt_path=last", "--trainer.max_steps=2")
    assert again.returncode == 0


@pytest.mark.faults
@pytest.mark.parametrize(("step", "validated"), [(1, [0]), (2, [0, 2])])
def test_stop_makes_the_validation_of_its_step_and_no_other(
    step: int,
    validated: list[int],
    fit_arguments: Fit,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "asked_to_stop.py").write_text(
        "import os, signal\n"
        "from lightning.pytorch import Callback\n"
        "class Stop(Callback):\n"
        "    def on_train_batch_start(self, trainer, module, batch, batch_idx):\n"
        f"        if module.rollout_step == {step - 1}:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "asked_to_stop", raising=False)
    root = tmp_path / "run"
    assert main([*fit_arguments(tiny_llama, root), "--trainer.callbacks+=asked_to_stop.Stop"]) == 0
    records = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(step + 1))
    assert [record["step"] for record in records if "val/accuracy" in record] == validated


@pytest.mark.faults
def test_stopped_at_once_ends_with_a_word(
    fit_arguments: Fit,
    tiny_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "impatient.py").write_text(
        "import os, signal, time\n"
        "from lightning.pytorch import Callback\n"
        "class TwoCtrlC(Callback):\n"
        "    def on_train_batch_start(self, trainer, module, batch, batch_idx):\n"
        "        for _ in range(2):\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "            time.sleep(0.01)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.getsignal(signal.SIGINT)
    try:
        code = main([*fit_arguments(tiny_llama, tmp_path / "run"), "--trainer.callbacks+=impatient.TwoCtrlC"])
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    assert code == 130
    assert err == "grpo-lit: error: interrupted before the first step: nothing was trained, there is nothing to save\n"
    assert "stopping at once, this step is lost" in out
    saved = [*fit_arguments(tiny_llama, tmp_path / "run", "--trainer.max_steps=1")]
    assert main(saved) == 0
    more = [*saved, "--ckpt_path=last", "--trainer.max_steps=3", "--trainer.callbacks+=impatient.TwoCtrlC"]
    try:
        assert main(more) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert capsys.readouterr().err == (f"grpo-lit: error: interrupted; {last} is whole: resume with --ckpt_path last\n")


def test_table_cells_can_break_nothing() -> None:
    record = {"prompt": "a|b\n<script>", "completion": "x" * 1000, "reward": None, "num_tokens": 3}
    table = markdown_table([record])
    assert len(table.splitlines()) == 3
    row = table.splitlines()[2]
    assert row.count("|") == 5
    assert "<script>" not in row
    assert "a&#124;b<br>&lt;script>" in row


def test_progress_names_reward_length_and_speed() -> None:
    text = describe(
        {
            "rollout/reward_mean": 0.5,
            "rollout/completion_length": 12.3,
            "rollout/zero_variance_groups": 0.25,
            "perf/tokens_per_sec": 99.6,
        }
    )
    assert text == "reward 0.500  length 12  flat 25%  100 tok/s"
