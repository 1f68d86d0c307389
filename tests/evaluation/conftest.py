"""A finished run of a few steps, made once for all tests here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from grpo_lit.cli import main

# A short training whose weights visibly move.
MOVING = (
    "--model.policy.cpu_threads=1",
    "--data.prompts_per_step=8",
    "--model.rollout.sampling.max_completion_length=6",
    "--model.validation.sampling.max_completion_length=6",
    "--model.rewards=[math_accuracy,user_rewards.digits]",
    "--model.optimizer=torch.optim.AdamW",
    "--model.optimizer.lr=0.02",
    "--trainer.enable_progress_bar=false",
    "--trainer.max_steps=4",
)


@pytest.fixture(scope="session")
def finished_run(
    fit_arguments: Callable[..., Sequence[str]], tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The run's folder: config, metrics, checkpoints, adapter."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "user_rewards.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setenv("HF_HUB_OFFLINE", "1")
        assert main(fit_arguments(tiny_llama, folder / "run", *MOVING)) == 0
    return folder / "run"
