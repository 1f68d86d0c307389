from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from grpo_lit.cli import COMMANDS, main
from grpo_lit.cli.config_files import shipped_configs
from grpo_lit.cli.parser import GRPOCLI

Fit = Callable[..., Sequence[str]]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_help_lists_every_command_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, (description, _) in COMMANDS.items():
        assert sum(line.split() == [name, *description.split()] for line in lines) == 1, name
    for required in ("fit", "validate", "check", "generate"):
        assert required in COMMANDS
    assert main([]) == 2


@pytest.mark.parametrize("command", ["fit", "validate", "check", "generate"])
def test_command_help_exits_with_0(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"grpo-lit {command}" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(set(shipped_configs()) - {"evaluate"}))
def test_shipped_config_parses_and_says_what_it_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = shipped_configs()[name]
    text = path.read_text()
    assert f"grpo-lit fit --config {name}" in text.splitlines()[5] or f"grpo-lit fit --config {name}" in text
    for word in ("# Hardware:", "# Launch:", "# Expect:"):
        assert word in text
    settings = yaml.safe_load(text)
    assert settings["trainer"]["default_root_dir"] == f"runs/{name}"
    # every value is accepted and every object can be built; only the device differs from the file
    cli = GRPOCLI(
        [f"--config={name}", "--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"], "fit"
    )
    assert cli.model.policy_config.path == settings["model"]["policy"]["path"]
    assert cli.trainer.max_steps == settings["trainer"]["max_steps"]


def test_check_reports_a_line_each_and_fails_on_a_bad_one(
    capsys: pytest.CaptureFixture[str], fit_arguments: Fit, tiny_llama: Path, tmp_path: Path
) -> None:
    arguments = list(fit_arguments(tiny_llama, tmp_path / "run"))[1:]
    assert main(["check", *arguments]) == 0
    out = capsys.readouterr().out
    assert all(line.startswith(("ok  ", "      ")) for line in out.splitlines())
    assert "92 training prompts, 8 held out" in out
    assert "0 M parameters" in out
    assert not (tmp_path / "run").exists()
    assert main(["check", *arguments, "--data.path=missing.jsonl"]) == 1
    bad = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL")]
    assert len(bad) == 1
    assert "missing.jsonl" in bad[0]
    assert main(["check", *arguments, "--model.loss.beta=x"]) == 1
    assert "model.loss.beta" in capsys.readouterr().out
    for wrong, words in (
        ("--model.rewards=[gym_score]", "it needs 'task'"),
        ("--model.rollout.sampling.max_completion_length=9999", "the longest prompt"),
    ):
        assert main(["check", *arguments, wrong]) == 1
        assert words in capsys.readouterr().out


def test_trained_adapter_and_checkpoint_answer_alike(
    grpo_lit_command: Run, fit_arguments: Fit, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    optimizer = ["--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=5", "--model.rewards=[boxed_format]"]
    penalty = ["--model.length_penalty=0.5"]
    result = grpo_lit_command(*fit_arguments(tiny_llama, root, *optimizer, *penalty))
    assert result.returncode == 0, result.stderr
    common = ["generate", "--policy.dtype=fp32", "--sampling.max_completion_length=8", "--device=cpu", "--samples=3"]
    prompts = ["--prompt=1+2=", "--prompt=3+4="]
    answers = {}
    for name, extra in {
        "base": [f"--policy.path={tiny_llama}"],
        "adapter": [f"--adapter={root / 'adapter'}"],
        "ckpt": [f"--policy.path={tiny_llama}", f"--ckpt_path={root / 'checkpoints/last.ckpt'}"],
    }.items():
        assert main([*common, *prompts, *extra]) == 0
        answers[name] = capsys.readouterr().out.splitlines()
        assert len(answers[name]) == 6
    assert answers["adapter"] == answers["ckpt"]


def test_validate_measures_the_base_and_a_checkpoint(
    grpo_lit_command: Run, fit_arguments: Fit, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = list(fit_arguments(tiny_llama, tmp_path / "run"))[1:]
    assert main(["validate", *arguments]) == 0
    assert "val/accuracy: " in capsys.readouterr().out


@pytest.mark.faults
@pytest.mark.parametrize(("number", "code", "word"), [(2, 130, "interrupted"), (15, 143, "terminated by SIGTERM")])
def test_a_stop_while_libraries_are_imported_is_one_line(number: int, code: int, word: str, tmp_path: Path) -> None:
    """Libraries take an error of their imports for something else; numpy raised an AttributeError of its own."""
    (tmp_path / "torch.py").write_text(
        "import pathlib, time\n"
        "try:\n"
        "    pathlib.Path('importing').touch()\n"
        "    time.sleep(30)\n"
        "except BaseException:\n"
        "    raise AttributeError('module has no attribute') from None\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])}
    process = subprocess.Popen(
        [sys.executable, "-m", "grpo_lit", "fit"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "importing").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, error = process.communicate(timeout=20)
    assert (process.returncode, error) == (code, f"grpo-lit: error: {word}\n")
