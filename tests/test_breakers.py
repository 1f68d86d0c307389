"""Mistakes and accidents that once ended in a traceback, in silence, or in a lost file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import yaml  # type: ignore[import-untyped]

from grpo_lit.cli import main
from grpo_lit.step import GlobalRows, rollout_metrics

Fit = Callable[..., Sequence[str]]
Refused = Callable[..., None]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--trainer.max_steps=0"], ["trainer.max_steps=0", "at least 1"]),
        (["--trainer.max_steps=-1"], ["trainer.max_steps=-1", "trainer.max_epochs"]),
        (["--trainer.max_epochs=0"], ["trainer.max_epochs=0", "at least 1"]),
        (["--trainer.limit_train_batches=0"], ["trainer.limit_train_batches=0"]),
        (["--trainer.val_check_interval=0"], ["trainer.val_check_interval=0", "at least 1"]),
        (["--trainer.gradient_clip_val=1.0"], ["trainer.gradient_clip_val=1.0", "model.max_grad_norm"]),
        (["--trainer.devices=-1"], ["trainer.devices=", "-1"]),
        (["--trainer.accelerator=cpuu"], ["trainer.accelerator=", "cpuu"]),
        (["--seed_everything=-1"], ["seed_everything=-1"]),
        (["--model.policy.tokenizer=./nowhere"], ["model.policy.tokenizer='./nowhere'"]),
        (["--model.length_penalty=.nan"], ["model.length_penalty=nan"]),
        (["--model.overlong_cache=100"], ["model.overlong_cache=100", "from 1 to"]),
        (["--model.reward_weights=[.nan]"], ["model.reward_weights=[nan]"]),
        (
            ["--model.rollout.sampling.max_completion_length=1000"],
            ["model.rollout.sampling.max_completion_length=1000", "128 positions"],
        ),
        (
            ["--model.validation.sampling.max_completion_length=1000"],
            ["model.validation.sampling.max_completion_length=1000", "128 positions"],
        ),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else None,
)
def test_refused_before_the_model_is_loaded(
    extra: list[str], words: list[str], tiny_llama: Path, fit_arguments: Fit, refused: Refused
) -> None:
    refused(fit_arguments(tiny_llama, "run", *extra), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["sections"]),
        (b"hello", ["sections"]),
        (b"- a\n- b", ["sections"]),
        (b"model: [1,\n  a: : b", ["valid YAML", "line 2"]),
        (b"\xff\xfe\x00\x80", ["UTF-8"]),
        (b"trainer: null", ["trainer=None", "a section"]),
        (b"model: {loss: null}", ["model.loss=None", "a section"]),
        (b"model: {optimizer: null}", ["model.optimizer=None", "a section"]),
        (b"model: {rollout: {sampling: null}}", ["model.rollout.sampling=None", "a section"]),
        (b"model: {rollout: {group_sise: 4}}", ["model.rollout.group_sise", "did you mean model.rollout.group_size?"]),
        (b"model: {loss: {epsilon_hig: 4}}", ["did you mean model.loss.epsilon_high?"]),
        (b"trainer: {max_step: 4}", ["did you mean trainer.max_steps?"]),
    ],
)
def test_bad_config_file(
    content: bytes, words: list[str], tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, refused: Refused
) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)
    if "None" not in words[0] and "model" not in words[0] and "did" not in words[0]:
        words = ["--config='mine.yaml'", *words]
    refused([*fit_arguments(tiny_llama, "run"), "--config=mine.yaml"], *words)


def write_row(path: Path, encoding: str) -> Path:
    path.write_text(json.dumps({"question": "1+1", "answer": "#### 2"}) + "\n", encoding=encoding)
    return path


@pytest.mark.faults
def test_damaged_parquet_and_byte_order_mark(
    tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, refused: Refused
) -> None:
    from grpo_lit.datamodules.datasets import load_rows

    assert load_rows("gsm8k", path=str(write_row(tmp_path / "bom.jsonl", "utf-8-sig")))[0]["answer"] == "2"
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    extra = ["--data.dataset=gsm8k", "--data.path=torn.parquet"]
    refused(fit_arguments(tiny_llama, "run", *extra), "data.path='torn.parquet'")


def test_unknown_metric_of_early_stopping_is_one_line(tiny_llama: Path, fit_arguments: Fit, refused: Refused) -> None:
    extra = ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val/acc"]
    refused(fit_arguments(tiny_llama, "run", *extra), "trainer.callbacks", "val/accuracy", loads=True)


def records(root: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def test_epochs_set_length_and_schedule(tiny_llama: Path, tmp_path: Path, fit_arguments: Fit) -> None:
    """25 sums, 8 held out: 5 steps of at most 4 prompts an epoch, 2 optimizer steps each."""
    for steps in ("-1", "1000"):
        root = tmp_path / f"run{steps}"
        extra = [f"--trainer.max_steps={steps}", "--trainer.max_epochs=1", "--model.ppo_passes=2"]
        extra += ['--data.dataset_options={"high": 4}', "--model.lr_schedule.name=linear"]
        assert main(list(fit_arguments(tiny_llama, root, *extra))) == 0
        lines = records(root)
        assert [line["step"] for line in lines] == list(range(6))
        # the mean of two passes: factors 1, 0.9, ... of the default rate
        rates = [line["train/lr"] for line in lines[1:]]
        assert rates == pytest.approx([1e-5 * (0.95 - 0.2 * step) for step in range(5)], rel=1e-9)


def test_all_abstained_ends_well(
    tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "abstaining.py").write_text(
        "def none(prompts, completions, **c):\n    return [None] * len(completions)\n"
    )
    assert main(list(fit_arguments(tiny_llama, tmp_path / "run", "--model.rewards=[abstaining.none]"))) == 0
    captured = capsys.readouterr()
    assert "held-out accuracy" not in captured.out
    assert captured.err == ""
    assert [line["rollout/abstained_fraction"] for line in records(tmp_path / "run")[1:]] == [1.0] * 3


KILLED_BEFORE_EXPORT = """
import os, sys
from grpo_lit.callbacks import AdapterExport
from grpo_lit.cli import main
for hook in ("on_train_end", "on_fit_end"):
    if hook in vars(AdapterExport):
        setattr(AdapterExport, hook, lambda *a: os._exit(77))
main(sys.argv[1:])
"""


@pytest.mark.faults
def test_killed_between_last_checkpoint_and_export(tiny_llama: Path, tmp_path: Path, fit_arguments: Fit) -> None:
    arguments = list(fit_arguments(tiny_llama, tmp_path / "run"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run([sys.executable, "-c", KILLED_BEFORE_EXPORT, *arguments], env=environment, timeout=240)
    assert process.returncode == 77
    assert not (tmp_path / "run" / "adapter").exists()
    assert main([*arguments, "--ckpt_path=last"]) == 0
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()


def test_a_checkpoint_of_another_folder_does_not_mix_two_runs(
    tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(list(fit_arguments(tiny_llama, one))) == 0
    assert main(list(fit_arguments(tiny_llama, two, "--seed_everything=7", "--trainer.max_steps=5"))) == 0
    before = records(two)
    extra = ["--ckpt_path=one/checkpoints/last.ckpt", "--trainer.max_steps=5"]
    assert main(list(fit_arguments(tiny_llama, two, *extra))) == 0
    assert "is kept in" in capsys.readouterr().out
    assert records(tmp_path / "two.1") == before
    assert [line["step"] for line in records(two)] == [4, 5]
    assert yaml.safe_load((two / "config.yaml").read_text())["seed_everything"] == 42


def test_flat_groups_are_told_by_the_rows_that_count() -> None:
    nan = float("nan")
    everyone = GlobalRows(
        rewards=torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0, nan, nan, 0.5, 0.2, 1.0, 0.0]),
        group_ids=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]),
        lengths=torch.ones(12, dtype=torch.long),
        truncated=torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1]).bool(),
        own=slice(0, 12),
    )
    expected = {False: (3 / 6, 1, 1, 0, 1), True: (5 / 6, 2, 1, 1, 1)}
    for mask_truncated, (flat, right, wrong, truncated, abstained) in expected.items():
        metrics = rollout_metrics(everyone, mask_truncated=mask_truncated)
        assert metrics["zero_variance_groups"] == pytest.approx(flat)
        kinds = {"right": right, "wrong": wrong, "truncated": truncated, "abstained": abstained}
        for name, count in kinds.items():
            assert metrics[f"zero_variance_groups_all_{name}"] == pytest.approx(count / 6), (mask_truncated, name)


def test_resume_with_another_optimizer_is_refused_and_another_seed_is_said(
    fit_arguments: Fit, tiny_llama: Path, tmp_path: Path, refused: Refused, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = list(fit_arguments(tiny_llama, tmp_path / "run"))
    assert main(arguments) == 0
    capsys.readouterr()
    other = ["--ckpt_path=last", "--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=1"]
    refused([*arguments, *other], "model.optimizer='SGD': accepted is AdamW")
    assert main([*arguments, "--ckpt_path=last", "--seed_everything=7"]) == 0
    assert "trained with seed 42, this run goes on with seed 7" in capsys.readouterr().out
    assert main(["validate", *arguments[1:], "--ckpt_path=best"]) == 0
    other = ["--trainer.default_root_dir=other", "--checkpoint.monitor=val/acc"]
    refused([*arguments, *other], "checkpoint.monitor='val/acc': accepted is one of val/accuracy", loads=True)


def test_reward_class_that_needs_arguments_is_one_line(
    fit_arguments: Fit, tiny_llama: Path, tmp_path: Path, refused: Refused
) -> None:
    needy = "def __init__(self, scale):\n        pass\n\n    def __call__(self, **columns):\n        pass\n"
    (tmp_path / "needy_rewards.py").write_text(f"class Needy:\n    {needy}")
    arguments = fit_arguments(tiny_llama, "run", "--model.rewards=[needy_rewards.Needy]")
    refused(arguments, "model.rewards='needy_rewards.Needy'", "missing 1 required")
