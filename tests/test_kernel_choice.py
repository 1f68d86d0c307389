"""model.kernels: the implementation that runs is configured and in the metrics; results differ by rounding only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from grpo_lit.errors import UserError
from grpo_lit.kernels import dispatch, linear_logprobs


@pytest.fixture(autouse=True)
def _defaults() -> object:
    yield
    dispatch.set_impl({})


def test_unknown_ops_and_implementations_are_named() -> None:
    with pytest.raises(UserError, match=r"model.kernels.*linear_logprob'"):
        dispatch.set_impl({"linear_logprob": "torch"}, "model.kernels")
    with pytest.raises(UserError, match=r"model.kernels.linear_logprobs.*cuda"):
        dispatch.set_impl({"linear_logprobs": "cuda"}, "model.kernels")


@pytest.mark.skipif(dispatch.interpreting(), reason="the interpreter runs Triton on the CPU")
def test_a_choice_is_what_runs_and_is_remembered() -> None:
    dispatch.set_impl({"linear_logprobs": "torch", "sample_token": "triton"})
    arguments = (torch.randn(3, 8), torch.randn(20, 8), torch.tensor([1, 2, 3]))
    linear_logprobs(*arguments)
    assert dispatch.used_impls() == {"linear_logprobs": "torch"}
    with pytest.raises(UserError, match="sample_token"):
        dispatch.resolve_impl("sample_token", None, torch.device("cpu"))
    dispatch.set_impl({"linear_logprobs": "triton"})
    with pytest.raises(UserError, match="linear_logprobs"):
        linear_logprobs(*arguments)


def test_mistakes_end_before_the_model_loads(fit_arguments, refused) -> None:
    arguments = fit_arguments("no_such_model", "run", "--model.kernels={linear_logprobs: cuda}")
    refused(arguments, "model.kernels.linear_logprobs", "triton or torch")


REWARD = """
def letters(prompts, completions):
    return [sum(map(ord, text)) % 7 / 7 for text in completions]
"""


def _fit(arguments: list[str], folder: Path, device: str) -> list[dict[str, float]]:
    interpret = "1" if device == "cpu" else "0"
    env = {**os.environ, "TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "grpo_lit", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    root = next(a.split("=", 1)[1] for a in arguments if a.startswith("--trainer.default_root_dir"))
    return [json.loads(line) for line in (Path(root) / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_switching_the_implementation_changes_losses_by_rounding_only(
    tiny_llama: Path, tmp_path: Path, fit_arguments, device: str
) -> None:
    (tmp_path / "letter_reward.py").write_text(REWARD)
    runs = {}
    for impl in ("torch", "triton"):
        ops = f"{{linear_logprobs: {impl}, decoder_layer: {impl}}}"
        arguments = fit_arguments(
            tiny_llama,
            tmp_path / impl,
            f"--model.kernels={ops}",
            f"--trainer.accelerator={device}",
            "--model.policy.fused_layers=true",
            "--model.rollout.engine=hf",
            "--model.rewards=[letter_reward.letters]",
            "--data.prompts_per_step=2",
            "--data.val_prompts=0",
            "--trainer.max_steps=2",
            "--model.loss.entropy_coef=0.01",
        )
        runs[impl] = [row for row in _fit(list(arguments), tmp_path, device) if "train/loss" in row]
        assert {row["perf/kernel_linear_logprobs"] for row in runs[impl]} == {float(impl == "triton")}
        assert {row["perf/kernel_decoder_layer"] for row in runs[impl]} == {float(impl == "triton")}
    for ours, plain in zip(runs["triton"], runs["torch"], strict=True):
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert abs(plain[name]) > 1e-6
            assert ours[name] == pytest.approx(plain[name], rel=2e-4)
    assert len(runs["torch"]) == 2
