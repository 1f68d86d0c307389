from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_lit.callbacks import MetricsFile
from grpo_lit.callbacks.metrics_file import read_metrics, without_timings


class Logger:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.records.append((step, metrics))

    def save(self) -> None:
        pass


def trainer(root: Path, val_check: float = float("inf")) -> Any:
    return SimpleNamespace(
        default_root_dir=str(root),
        is_global_zero=True,
        fast_dev_run=False,
        enable_validation=val_check != float("inf"),
        num_val_batches=[1],
        check_val_every_n_epoch=None,
        val_check_batch=val_check,
        should_stop=False,
        num_training_batches=100,
        fit_loop=SimpleNamespace(total_batch_idx=0),
        loggers=[Logger()],
        state=SimpleNamespace(fn="fit"),
    )


def run(root: Path, steps: list[tuple[int, float]], val_check: float = float("inf"), clock: float = 1.0) -> Any:
    fake, callback = trainer(root, val_check), MetricsFile()
    module = SimpleNamespace(rollout_step=0, step_metrics={}, validation_metrics={})
    callback.setup(fake, module, "fit")  # type: ignore[arg-type]
    for step, value in steps:
        module.rollout_step, module.step_metrics = step, {"train/loss": value, "perf/step_s": clock}
        fake.fit_loop.total_batch_idx = step - 1
        callback.on_train_batch_end(fake, module, None, None, step - 1)  # type: ignore[arg-type]
        if step % val_check == 0:
            assert step not in [line["step"] for line in read_metrics(root / "metrics.jsonl")]
            module.validation_metrics = {"val/accuracy": step / 10}
            callback.on_validation_end(fake, module)  # type: ignore[arg-type]
    return fake


def test_a_step_and_its_validation_are_one_record_in_file_and_logger(tmp_path: Path) -> None:
    fake = run(tmp_path, [(1, 0.5), (2, 0.25), (3, 0.125)], val_check=2)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [without_timings(line) for line in lines] == [
        {"step": 1, "train/loss": 0.5},
        {"step": 2, "train/loss": 0.25, "val/accuracy": 0.2},
        {"step": 3, "train/loss": 0.125},
    ]
    assert fake.loggers[0].records[1] == (2, {"train/loss": 0.25, "perf/step_s": 1.0, "val/accuracy": 0.2})


def test_repeated_step_is_not_written_twice_and_a_different_one_is_kept_beside(tmp_path: Path) -> None:
    run(tmp_path, [(1, 0.5), (2, 0.25)])
    run(tmp_path, [(2, 0.25), (3, 0.125)], clock=9.0)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert not (tmp_path / "metrics.repeated.jsonl").exists()
    run(tmp_path, [(3, 0.75), (4, 0.1)])
    assert [line["train/loss"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0.5, 0.25, 0.125, 0.1]
    assert [line["train/loss"] for line in read_metrics(tmp_path / "metrics.repeated.jsonl")] == [0.75]


@pytest.mark.faults
def test_torn_last_line_is_cut_off_and_written_again(tmp_path: Path) -> None:
    run(tmp_path, [(1, 0.5), (2, 0.25)])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert [line["step"] for line in read_metrics(path)] == [1]
    run(tmp_path, [(2, 0.25)])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_non_finite_values_are_null_in_the_file(tmp_path: Path) -> None:
    run(tmp_path, [(1, float("nan"))])
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert json.loads(text)["train/loss"] is None


@pytest.mark.parametrize("prefix", ["perf/step_s", "vram/peak_train_mib"])
def test_timings_are_told_by_their_prefix(prefix: str) -> None:
    assert without_timings({"step": 1, prefix: 2.0, "val/accuracy": 1.0}) == {"step": 1, "val/accuracy": 1.0}
