"""Two ranks are one: `grpo-lit fit` on Lightning DDP against a single process on the same global batch."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from grpo_lit.checkpoint import read_checkpoint
from grpo_lit.testing.ranks import run_on_ranks


def arguments(model: Path, root: Path, *extra: str) -> list[str]:
    return [
        "fit",
        f"--model.policy.path={model}",
        "--model.policy.dtype=fp32",
        "--data=MathDataModule",
        "--data.dataset=arithmetic",
        "--data.prompt_template={question}=",
        "--data.prompts_per_step=5",  # uneven: one rank gets three prompts, the other two
        "--data.val_prompts=7",
        "--model.validation.sampling={temperature: 1.0, max_completion_length: 4}",
        "--model.rollout.sampling.max_completion_length=6",
        "--model.rollout.group_size=6",
        "--model.rewards=[user_rewards.digits]",
        "--model.lora.rank=4",
        "--model.micro_batch_size=4",
        "--model.max_grad_norm=null",
        "--model.optimizer=torch.optim.SGD",
        "--model.optimizer.lr=0.001",
        "--trainer.accelerator=cpu",
        f"--trainer.default_root_dir={root}",
        "--trainer.max_steps=2",
        "--trainer.val_check_interval=2",
        *extra,
    ]


def lines(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def completions(root: Path) -> list[dict[str, Any]]:
    files = sorted((root / "completions").glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


TWO = ("--trainer.devices=2", "--trainer.strategy=ddp")
CASES = {
    "groups": ["--model.loss.reduction=sequence_mean"],
    "split": ["--model.rollout.layout=split", "--model.loss.reduction=token_mean", "--model.loss.beta=0.05"],
    "queue": [
        "--model.rollout.layout=queue",
        "--model.rollout.batch_size=4",
        "--model.rollout.engine=graph",
        "--model.loss.reduction=alpha",
        "--model.loss.alpha=0.5",
        "--data.dataset_options={terms: 1, high: 21}",  # with 7 held out, 5 prompts for each of three steps
    ],
    "vigor": [
        "--model.rollout.allocator=vigor",
        "--model.rollout.layout=queue",
        "--model.rollout.batch_size=3",
        "--model.loss.reduction=fixed_length",
        "--model.loss.token_rule=kl_cov",  # acts in the second pass, on tokens of both ranks
        "--model.loss.token_rule_share=0.05",
        "--model.ppo_passes=2",
    ],
}
RESUMED = ["--trainer.max_steps=3", "--ckpt_path=last"]


@pytest.fixture(scope="module")
def folder(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case on one rank and on two, in one process a rank."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "user_rewards.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]\n"
    )
    calls = [*CASES.items(), ("queue", [*CASES["queue"], *RESUMED])]
    one = [arguments(tiny_llama, folder / f"{case}_one", *extra) for case, extra in calls]
    two = [arguments(tiny_llama, folder / f"{case}_two", *extra, *TWO) for case, extra in calls]
    with ThreadPoolExecutor() as pool:
        for ranks in pool.map(lambda call: run_on_ranks(*call, folder), [(one, 1), (two, 2)]):
            for rank in ranks:
                assert rank.codes == [0] * len(calls), rank.stderr[-2000:]
    return folder


@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_equal_one(case: str, folder: Path) -> None:
    one, two = lines(folder / f"{case}_one"), lines(folder / f"{case}_two")
    assert [line["step"] for line in two] == [line["step"] for line in one]
    for mine, theirs in zip(two, one, strict=True):
        for name, value in theirs.items():
            if not name.startswith(("perf/", "vram/")):
                # the mismatch of engine and scoring is itself rounding, at these batch shapes
                absolute = 1e-4 if "mismatch" in name else 1e-6
                assert mine[name] == pytest.approx(value, rel=1e-4, abs=absolute), name
    weights, expected = (
        load_file(folder / f"{case}_{name}" / "adapter/adapter_model.safetensors") for name in ("two", "one")
    )
    assert max(float(value.abs().max()) for name, value in expected.items() if "lora_B" in name) > 1e-4
    for name, value in expected.items():
        assert torch.allclose(weights[name], value, atol=1e-6, rtol=0), name
    assert completions(folder / f"{case}_one") == completions(folder / f"{case}_two")


def test_lengths_are_remembered_through_a_resume(folder: Path) -> None:
    rows = completions(folder / "queue_two")
    assert max(row["step"] for row in rows) == 3
    expected: dict[int, float] = {}
    for step, prompt in sorted({(row["step"], row["prompt_index"]) for row in rows}):
        found = [row["num_tokens"] for row in rows if (row["step"], row["prompt_index"]) == (step, prompt)]
        expected[prompt] = max(found)
    assert len(expected) == 15, "5 of each step, and only the last came after the resume"
    stored = read_checkpoint(folder / "queue_two/checkpoints/last.ckpt")["grpo_lit"]["prompt_lengths"]
    assert stored == pytest.approx(expected)
