"""What is said while a validation runs, where there is no terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lit.callbacks import StepProgress


@pytest.mark.parametrize(("seconds", "lines"), [(-1.0, ["1/7", "2/7"]), (60.0, [])])
def test_a_long_validation_says_how_far_it_is(
    seconds: float, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = StepProgress(seconds_between_lines=seconds)
    trainer: Any = SimpleNamespace(num_val_batches=[7])
    module: Any = SimpleNamespace(rollout_step=50)
    progress.on_validation_start(trainer, module)
    for batch in range(2):
        progress.on_validation_batch_end(trainer, module, None, None, batch)
    expected = [f"validation after rollout step 50: {done} batches" for done in lines]
    assert capsys.readouterr().out.splitlines() == expected
