"""A finished run of a few steps, made once for all tests here."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_lit.cli import main


def run_arguments(model: Path, root: Path) -> list[str]:
    """Arguments of a short training whose weights visibly move."""
    return [
        "fit",
        f"--model.policy.path={model}",
        "--model.policy.dtype=fp32",
        "--model.policy.cpu_threads=1",
        "--data=MathDataModule",
        "--data.dataset=arithmetic",
        "--data.prompt_template={question}=",
        "--data.prompts_per_step=8",
        "--data.val_prompts=8",
        "--model.rollout.group_size=4",
        "--model.rollout.sampling.max_completion_length=6",
        "--model.validation.sampling.max_completion_length=6",
        "--model.rewards=[math_accuracy,user_rewards.digits]",
        "--model.lora.rank=4",
        "--model.optimizer=torch.optim.AdamW",
        "--model.optimizer.lr=0.02",
        "--trainer.accelerator=cpu",
        "--trainer.enable_progress_bar=false",
        f"--trainer.default_root_dir={root}",
        "--trainer.max_steps=4",
        "--trainer.val_check_interval=2",
    ]


@pytest.fixture(scope="session")
def finished_run(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        assert main(run_arguments(tiny_llama, folder / "run")) == 0
    return folder / "run"
