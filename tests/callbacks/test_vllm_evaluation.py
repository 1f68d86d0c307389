"""Evaluation during training: when, of which weights, on how many ranks, and that training does not notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lit.callbacks import BaselineEvaluation, VLLMEvaluation
from grpo_lit.callbacks.metrics_file import without_timings
from grpo_lit.cli import main
from grpo_lit.errors import UserError
from grpo_lit.evaluation.in_training import evaluate_in_child

Fit = Callable[..., Sequence[str]]
SUMS = {"sums": {"name": "arithmetic", "options": {"low": 1, "high": 4}, "prompt_template": "{question}="}}
SETTINGS = {"datasets": SUMS, "max_completion_length": 5, "limit": 9, "batch_size": 4}


def text(value: Any) -> str:
    """A setting as typed on the command line."""
    return value if isinstance(value, str) else json.dumps(value)


def callback(name: str = "VLLMEvaluation", **settings: Any) -> list[str]:
    """Arguments that add the callback."""
    given = {**SETTINGS, **settings} if name == "VLLMEvaluation" else settings
    prefix = "--trainer.callbacks"
    return [f"{prefix}+=grpo_lit.callbacks.{name}", *(f"{prefix}.{k}={text(v)}" for k, v in given.items())]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def answers(folder: Path) -> list[tuple[int, str, bool]]:
    texts, verdicts = lines_of(folder / "generations.jsonl"), lines_of(folder / "verdicts.jsonl")
    return [(t["example"], t["completion"], v["correct"]) for t, v in zip(texts, verdicts, strict=True)]


MOVES = ["--model.optimizer=torch.optim.AdamW", "--model.optimizer.lr=0.05", "--model.rewards=[boxed_format]"]
MOVES += ["--model.length_penalty=0.2", "--trainer.enable_progress_bar=false"]


def test_training_is_the_same_and_every_evaluation_is_of_the_weights_of_its_step(
    fit_arguments: Fit, tiny_llama: Path, tmp_path: Path
) -> None:
    assert main(list(fit_arguments(tiny_llama, tmp_path / "without", *MOVES))) == 0
    extra = callback(every_n_rollout_steps=2, before_training=True, protocol="both", samples=2)
    assert main(list(fit_arguments(tiny_llama, tmp_path / "with", *MOVES, *extra))) == 0
    records = {name: lines_of(tmp_path / name / "metrics.jsonl") for name in ("without", "with")}
    assert [without_timings(r) for r in records["with"]] == [without_timings(r) for r in records["without"]]
    weights = [(tmp_path / name / "adapter/adapter_model.safetensors").read_bytes() for name in records]
    assert weights[0] == weights[1]
    folder = tmp_path / "with" / "evaluation"
    scores = lines_of(folder / "scores.jsonl")
    assert [record["step"] for record in scores] == [0, 2, 3]
    for record in scores:
        assert {"eval/sums/pass@1", "eval/sums/sampled/maj@2", "eval/sums/sampled/pass@2"} <= record.keys()
        own = [right for _, _, right in answers(folder / f"step_{record['step']:06d}")][:9]
        assert record["eval/sums/pass@1"] == pytest.approx(sum(own) / 9)
    # no stale adapter: what the command answers with the saved weights is what was answered in training
    models = {"base": {"run": str(tmp_path / "with"), "which": "base"}, "final": {"run": str(tmp_path / "with")}}
    given = {**SETTINGS, "models": models, "protocol": "deterministic", "device": "cpu", "output": str(tmp_path / "o")}
    assert main(["evaluate", *(f"--{k}={text(v)}" for k, v in given.items())]) == 0
    outside = answers(tmp_path / "o")
    assert outside[:9] == answers(folder / "step_000000")[:9]
    assert outside[9:] == answers(folder / "step_000003")[:9]
    assert outside[:9] != outside[9:], "training moved the answers"
    events = next((tmp_path / "with" / "tensorboard").glob("events*")).read_bytes()
    assert b"eval/sums/pass@1" in events
    assert b"eval/answers" in events


def test_baseline_is_remembered_and_what_a_resumed_run_owes_is_made_up(
    fit_arguments: Fit, tiny_llama: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    extra = callback("BaselineEvaluation", datasets=SUMS, options={"limit": 3, "max_completion_length": 4})
    common = [*extra, "--trainer.enable_progress_bar=false"]

    def fit(*more: str) -> list[int]:
        assert main(list(fit_arguments(tiny_llama, root, *common, *more))) == 0
        return [record["step"] for record in lines_of(root / "evaluation/scores.jsonl")]

    assert fit("--trainer.max_steps=1") == [0]
    early = root / "checkpoints" / "early.ckpt"
    early.write_bytes((root / "checkpoints/last.ckpt").read_bytes())
    stamps = {path: path.stat().st_mtime_ns for path in (root / "evaluation").glob("step_*/verdicts.jsonl")}
    assert fit("--trainer.max_steps=2", "--ckpt_path=last") == [0]
    second = root / "checkpoints" / "second.ckpt"
    second.write_bytes((root / "checkpoints/last.ckpt").read_bytes())
    every_second = callback(every_n_rollout_steps=2, at_end=False)
    assert fit("--trainer.max_steps=3", "--ckpt_path=last", *every_second) == [0, 2], "what step 2 still owed"
    stamps |= {path: path.stat().st_mtime_ns for path in (root / "evaluation").glob("step_*/verdicts.jsonl")}
    for again in (early, second):
        assert fit("--trainer.max_steps=3", f"--ckpt_path={again}", *every_second) == [0, 2], "step 2 came by again"
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert len(stamps) == 2


def test_child_process_answers_with_the_same_weights(fit_arguments: Fit, tiny_llama: Path, tmp_path: Path) -> None:
    for process in ("inside", "child"):
        extra = [*callback(process=process, engine="hf"), "--model.reward_timeout_s=null"]
        assert main(list(fit_arguments(tiny_llama, tmp_path / process, *MOVES, *extra))) == 0
    child, inside = (tmp_path / name / "evaluation" for name in ("child", "inside"))
    assert json.loads((child / "step_000003/run_config.json").read_text())["settings"]["reward_timeout_s"] is None
    assert answers(child / "step_000003") == answers(inside / "step_000003")
    ours, theirs = (lines_of(folder / "scores.jsonl")[0] for folder in (inside, child))
    assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.faults
def test_a_child_is_not_left_behind_and_ctrl_c_is_not_for_it(tmp_path: Path) -> None:
    """A second Ctrl-C ends the training at once; the first one lets the step be finished, evaluation included."""

    class Interrupted:
        rank, size, pid, group = 0, 2, 0, 0

        def gather(self, status: object) -> list[object]:
            while not (tmp_path / "pid").exists():
                time.sleep(0.01)
            self.pid = int((tmp_path / "pid").read_text() or 0)
            if self.pid:
                self.group = os.getpgid(self.pid)
                raise KeyboardInterrupt
            return [status]

    world = Interrupted()
    module: Any = SimpleNamespace(world=world)
    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        evaluate_in_child(module, [sys.executable, "-c", code], tmp_path / "log", 60)
    assert world.group == world.pid, "a group of its own"
    with pytest.raises(ProcessLookupError):
        os.kill(world.pid, 0)


def run_two_ranks(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    two = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "grpo_lit", *arguments, *two]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=150)


def test_two_ranks_share_the_problems_and_none_waits_for_ever(
    fit_arguments: Fit, two_ranks: Callable[..., Any], tiny_llama: Path, tmp_path: Path
) -> None:
    """The baseline in a child process while both ranks wait, then both answer their share."""
    root = tmp_path / "two"
    options = {name: value for name, value in SETTINGS.items() if name != "datasets"} | {"process": "child"}
    extra = callback("BaselineEvaluation", datasets=SUMS, options={**options, "engine": "hf"})
    extra += callback(every_n_rollout_steps=2)
    (tmp_path / "user_rewards.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]\n"
    )
    moves = ["--model.optimizer=torch.optim.AdamW", "--model.optimizer.lr=0.1", "--model.rewards=[user_rewards.digits]"]
    arguments = fit_arguments(tiny_llama, root, *moves, *extra, "--trainer.max_steps=2")
    result = two_ranks(*arguments)
    assert result.returncode == 0, result.stderr[-2000:]
    scores = lines_of(root / "evaluation/scores.jsonl")
    assert [record["step"] for record in scores] == [0, 2]
    models = {"base": {"path": str(tiny_llama)}, "final": {"run": str(root)}}
    given = {**SETTINGS, "models": models, "protocol": "deterministic", "device": "cpu", "output": str(tmp_path / "o")}
    assert main(["evaluate", *(f"--{k}={text(v)}" for k, v in given.items())]) == 0
    outside = answers(tmp_path / "o")
    assert outside[:9] == answers(root / "evaluation/step_000000")
    assert outside[9:] == answers(root / "evaluation/step_000002")
    assert outside[:9] != outside[9:]


def test_failure_on_one_rank_ends_both(fit_arguments: Fit, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import os\n"
        "def judge(prompts, completions, **columns):\n"
        "    if os.environ.get('LOCAL_RANK') == '1':\n"
        "        raise RuntimeError('this rank fails')\n"
        "    return [0.0] * len(completions)\n"
    )
    data = {"sums": {**SUMS["sums"], "judge": "judge.judge"}}
    extra = callback(datasets=data, before_training=True)
    start = time.monotonic()
    result = run_two_ranks(fit_arguments(tiny_llama, tmp_path / "two", *extra), tmp_path)
    assert time.monotonic() - start < 100
    assert result.returncode == 1
    assert "the evaluation failed: rank 1" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"datasets": {}}, "VLLMEvaluation.datasets"),
        ({"datasets": SUMS, "every_n_rollout_steps": 0}, "every_n_rollout_steps"),
        ({"datasets": SUMS, "at_end": False}, "at_end"),
        ({"datasets": SUMS, "process": "child", "python": "/nope/python"}, "python"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        VLLMEvaluation(**settings)
    assert BaselineEvaluation(SUMS).before_training


def test_checkpoint_may_not_be_chosen_by_a_final_test_set(
    fit_arguments: Fit, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "math500.jsonl"
    path.write_text('{"problem": "1+1", "answer": "2"}\n')
    extra = callback(datasets={"math500": {"path": str(path)}}, before_training=True)
    monitor = ["--checkpoint.monitor=eval/math500/pass@1"]
    assert main(list(fit_arguments(tiny_llama, tmp_path / "run", *extra, *monitor))) == 2
    assert "final test set" in capsys.readouterr().err
