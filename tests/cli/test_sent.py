"""`grpo-lit sent`: what it refuses, and that a full memory only makes its batches smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_lit.cli.sent as command
from grpo_lit.cli import main

Fit = Callable[..., Sequence[str]]


def arguments(fit_arguments: Fit, model: Path, tmp_path: Path, *extra: str) -> list[str]:
    own = ["--sent.samples=3", f"--sent.output={tmp_path / 'sent.jsonl'}", '--data.dataset_options={"high": 3}', *extra]
    return ["sent", *list(fit_arguments(model, tmp_path / "run", *own))[1:]]


def test_out_of_memory_halves_the_rows_and_changes_no_answer(
    tiny_llama: Path,
    tmp_path: Path,
    fit_arguments: Fit,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments(fit_arguments, tiny_llama, tmp_path)) == 0
    expected = (tmp_path / "sent.jsonl").read_bytes()
    (tmp_path / "sent.jsonl").unlink()
    build = command.build_engine

    def small(*given: Any) -> Any:
        """The engine as on a machine where five rows fit."""
        engine = build(*given)
        generate = engine.generate

        def limited(prompts: Any, counts: Any, keys: Any, sampling: Any) -> Any:
            if (engine.batch_size or len(keys)) > 5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return generate(prompts, counts, keys, sampling)

        engine.generate = limited
        return engine

    monkeypatch.setattr(command, "build_engine", small)
    capsys.readouterr()
    assert main(arguments(fit_arguments, tiny_llama, tmp_path)) == 0
    assert "out of memory at 24 rows" in capsys.readouterr().err
    assert (tmp_path / "sent.jsonl").read_bytes() == expected


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--sent.samples=1"], "sent.samples=1"),
        (["--sent.prompts_per_batch=0"], "sent.prompts_per_batch=0"),
        (["--sent.output=/tmp"], "sent.output='/tmp'"),  # found before hours of sampling, not after
        (["--sent.output=order.md"], "sent.output='order.md'"),  # the table's own name
        (["--ckpt_path=last"], "ckpt_path='last'"),
        (["--data.max_prompt_length=1"], "data.max_prompt_length=1"),
    ],
)
def test_mistakes_are_named_before_loading(
    extra: list[str], words: str, tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, refused: Callable[..., None]
) -> None:
    refused(arguments(fit_arguments, tiny_llama, tmp_path, *extra), words)


def test_a_cache_of_other_sampling_is_not_overwritten(
    tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(fit_arguments, tiny_llama, tmp_path)) == 0
    assert main(arguments(fit_arguments, tiny_llama, tmp_path, "--sent.samples=4")) == 2
    assert "sampling.samples=3 instead of 4" in capsys.readouterr().err


def test_a_reward_that_hangs_ends_the_command(
    tiny_llama: Path,
    tmp_path: Path,
    fit_arguments: Fit,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "sent_hangs.py").write_text("import time\ndef hangs(prompts, completions):\n    time.sleep(60)\n")
    monkeypatch.syspath_prepend(tmp_path)
    extra = ["--model.rewards=[sent_hangs.hangs]", "--model.reward_timeout_s=0.3"]
    assert main(arguments(fit_arguments, tiny_llama, tmp_path, *extra)) == 2
    assert "'hangs'" in (error := capsys.readouterr().err)
    assert "took more than 0.3 s" in error
