"""Every command of README.md runs, or at least is one that the program accepts, and every link leads somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_lit.cli import COMMANDS, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Lines of the shell blocks, without comments; parts of a line joined by && count one by one."""
    lines: list[str] = []
    for block in re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            lines += [part.split("  #")[0].strip() for part in line.split("&&")]
    return [line for line in lines if line]


def own() -> list[list[str]]:
    """Arguments of the program's own commands; braces stand for each of their words."""
    found = []
    for line in commands():
        if line.startswith("grpo-lit "):
            words = shlex.split(line)[1:]
            braces = next((word for word in words if re.fullmatch(r"\{[a-z,]+\}", word)), None)
            options = braces[1:-1].split(",") if braces else [None]
            found += [[option if word == braces else word for word in words] for option in options]
    return found


# These need a GPU, a network, or hours: they are parsed to the end instead of run.
TRAINING = [arguments for arguments in own() if arguments[0] == "fit" and "quickstart" not in arguments]


@pytest.mark.parametrize("arguments", TRAINING, ids=" ".join)
def test_training_commands_are_accepted(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if "..." in arguments:  # "grpo-lit fit --config ... --ckpt_path last"
        arguments = ["quickstart" if word == "..." else word for word in arguments]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--print_config"])
    assert ended.value.code == 0


@pytest.mark.parametrize("arguments", [a for a in own() if a[0] == "bench"], ids=" ".join)
def test_benchmarks_are_there(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *([] if "--help" in arguments else ["--help"])])
    assert ended.value.code == 0


def test_every_command_is_known() -> None:
    assert {arguments[0] for arguments in own()} <= set(COMMANDS)


def test_what_follows_a_run(tmp_path: Path, grpo_lit_command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """evaluate, export and compare as written, after two short runs into the folders that the README names."""
    short = (
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=1",
        "--data.prompts_per_step=4",
        "--data.val_prompts=6",
    )
    for _ in range(2):
        assert grpo_lit_command("fit", "--config", "quickstart", *short).returncode == 0
    run = [arguments for arguments in own() if arguments[0] in ("evaluate", "export", "compare", "verify")]
    assert {arguments[0] for arguments in run} == {"evaluate", "export", "compare", "verify"}
    for arguments in run:
        result = grpo_lit_command(*arguments)
        assert result.returncode == 0, f"{arguments}\n{result.stderr[-1500:]}"
    assert (tmp_path / "scores" / "report.html").exists()
    assert (tmp_path / "exported" / "config.json").exists()


def test_check_without_a_gpu(grpo_lit_command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    """The planner's command, on a model that needs no network."""
    result = grpo_lit_command("check", "--config", "quickstart", "--vram", "8GiB")
    assert result.returncode == 0, result.stderr
    assert "MiB" in result.stdout


def test_links_lead_somewhere() -> None:
    missing = [
        target
        for target in re.findall(r"\]\(([^)#]+)\)", README)
        if not target.startswith("http") and not (ROOT / target).exists()
    ]
    assert not missing
