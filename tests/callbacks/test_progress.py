"""What is said while a validation runs, where there is no terminal, and what a narrow one shows of the bar."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress

from grpo_lit.callbacks import StepProgress
from grpo_lit.callbacks.progress import columns


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


def test_the_bar_is_closed_after_an_exception() -> None:
    """Lightning ends at Ctrl-C without a teardown."""
    progress = StepProgress()
    progress._bar = bar = Progress(console=Console(file=io.StringIO(), force_terminal=True))
    bar.start()
    trainer: Any = None
    progress.on_exception(trainer, trainer, KeyboardInterrupt())
    assert not bar.live.is_started


@pytest.mark.parametrize("width", [142, 76, 62])
def test_a_narrow_terminal_keeps_the_counts(width: int) -> None:
    written = io.StringIO()
    bar = Progress(*columns(), expand=True, console=Console(file=written, width=width, force_terminal=False))
    said = "reward 0.298  length 56  flat 25%  1234 tok/s"
    bar.add_task(said, total=2000, completed=123, phase="rollout", rows="128/256 rows, 40960 tokens")
    bar.console.print(bar.get_renderable())
    (line,) = written.getvalue().splitlines()
    for shown in ("rollout step", "123/2000", "0:00:00", " rollout "):
        assert shown in line, line
    assert (said in line) is (width == 142)
