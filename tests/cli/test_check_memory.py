"""``grpo-lit check --vram``: the plan of a configuration, without a GPU and without weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from grpo_lit.bench.shapes import write_model_folder
from grpo_lit.cli import main
from grpo_lit.cli.check import _take_vram

FIXED = ["--data=MathDataModule", "--data.dataset=arithmetic", "--data.val_prompts=8", "--trainer.accelerator=cpu"]


@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shape of DeepSeek-R1-Distill-Qwen-1.5B: a config and a tokenizer, no weights."""
    return write_model_folder("1.5b", tmp_path_factory.mktemp("r1"))


def check(capsys: pytest.CaptureFixture[str], model: Path, *arguments: str) -> tuple[int, list[str]]:
    code = main(["check", "--config=3060ti", f"--model.policy.path={model}", *FIXED, *arguments])
    return code, capsys.readouterr().out.splitlines()


def table(lines: list[str]) -> dict[str, list[int]]:
    rows = [line.strip() for line in lines if line.startswith("      ")]
    return {
        match.group(1): [int(cell.replace(",", "")) for cell in match.group(2).split()]
        for row in rows[1:]
        if (match := re.fullmatch(r"(\D+?)\s+([\d, ]+)", row))
    }


def test_the_8_gb_recipe_fits_with_room_for_long_completions(capsys: pytest.CaptureFixture[str], r1: Path) -> None:
    code, lines = check(capsys, r1, "--vram=7.4GiB")
    assert code == 0
    rows = table(lines)
    assert next(line.split() for line in lines if "MiB at the peak" in line)[-4:] == [
        "load",
        "rollout",
        "train",
        "optimizer",
    ]
    assert rows["base weights"] == [645] * 4
    assert rows["embedding, head"] == [890] * 4
    assert rows["KV cache"][1] > 100
    for column in range(4):
        total = sum(cells[column] for name, cells in rows.items() if name != "in all")
        assert abs(total - rows["in all"][column]) <= len(rows)
    summary = next(line for line in lines if "fits 7.40 GiB" in line)
    longest, alone = (int(number.replace(",", "")) for number in re.findall(r"at most ([\d,]+) tokens", summary))
    assert 4096 < longest < alone
    assert alone > 16384


def test_a_budget_that_is_too_small_fails_and_says_where(capsys: pytest.CaptureFixture[str], r1: Path) -> None:
    code, lines = check(capsys, r1, "--vram", "2GiB")
    assert code == 1
    assert any(line.startswith("FAIL") and "peak" in line and "in train" in line for line in lines)
    code, lines = check(capsys, r1, "--vram", "1GiB")
    assert code == 1
    assert any(line.startswith("FAIL") and "weights of 1.5" in line for line in lines)


def test_levers_show_in_the_plan(capsys: pytest.CaptureFixture[str], r1: Path) -> None:
    base = table(check(capsys, r1)[1])
    small = table(
        check(
            capsys,
            r1,
            "--model.policy.activation_offload=true",
            "--model.policy.head_quantization=nf4",
            "--model.optimizer.class_path=bitsandbytes.optim.PagedAdamW8bit",
        )[1]
    )
    assert small["embedding, head"][2] == 250  # 0.5625 bytes a weight
    assert small["optimizer"][2] < base["optimizer"][2] / 3
    assert small["layer inputs"][2] < base["layer inputs"][2] / 10
    assert small["in all"][2] < base["in all"][2] - 500


def test_without_a_budget_it_only_plans(capsys: pytest.CaptureFixture[str], r1: Path) -> None:
    code, lines = check(capsys, r1)
    assert code == 0
    assert not any("fits" in line for line in lines)


def test_a_budget_needs_no_gpu(capsys: pytest.CaptureFixture[str], r1: Path) -> None:
    given = [argument for argument in FIXED if "accelerator" not in argument]
    assert main(["check", "--config=3060ti", "--vram=8GiB", f"--model.policy.path={r1}", *given]) == 0
    assert "MiB at the peak" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["0", "8", "-1GiB", "1kB", "much", ""])
def test_a_budget_that_is_no_size(value: str, capsys: pytest.CaptureFixture[str], r1: Path) -> None:
    assert main(["check", "--config=3060ti", f"--vram={value}", f"--model.policy.path={r1}", *FIXED]) == 2
    assert "--vram" in capsys.readouterr().err


def test_the_shape_is_the_published_one(r1: Path) -> None:
    config = json.loads((r1 / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]) == (1536, 28, 151936)


def test_the_budget_of_a_gpu_that_is_there_is_what_others_leave_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A desktop takes 0.3 to 0.8 GB of a consumer card."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (6 * 2**30, 8 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", {0: 1.0}.__getitem__)
    assert _take_vram(["--config=3060ti"]) == (6 * 2**30, ["--config=3060ti"])
    assert _take_vram(["--vram", "7GiB"]) == (7 * 2**30, [])
