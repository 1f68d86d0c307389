"""``bench rollout`` runs anywhere; its share of the limit is what its formula says."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

from grpo_lit.bench.rollout import main
from grpo_lit.bench.rollout_cases import build_policy
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.lora import LoRALinear
from grpo_lit.rollout.model_reader import weight_bytes
from grpo_lit.rollout.stats import RolloutStats


def test_engines_side_by_side_with_csv_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    table, plot = tmp_path / "out" / "rollout.csv", tmp_path / "rollout.png"
    options = ["--formats", "bf16", "bf16+lora", "--rows", "1", "5", "--tokens", "3", "--samples", "1"]
    assert main([*options, "--csv", str(table), "--plot", str(plot), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["engine"], row["format"], row["rows"]) for row in rows} == {
        (engine, weights, count) for engine in ("graph", "hf") for weights in ("bf16", "bf16+lora") for count in (1, 5)
    }
    assert all(row["ms_per_step"] > 0 and row["measurement"] is False for row in rows)
    assert len(list(csv.DictReader(table.read_text().splitlines()))) == 8
    assert plot.read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rows", "3", "0"], "--rows=.*at least 1"),
        (["--engines", "tgi"], "graph . hf"),
        (["--samples", "0"], "--samples=0"),
        (["--hf-tokens", "0"], "--hf-tokens=0.*at least 1"),
        (["--engines", "graph", "--hf-tokens", "8"], "--hf-tokens=8.*only with --engines hf"),
    ],
)
def test_mistakes_are_told(options: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(options)


def test_an_image_s_ending_is_checked_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--plot", str(tmp_path / "new" / "x.zzz")])
    assert ended.value.code == 2
    assert "--plot" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without CUDA")
def test_breakdown_needs_a_gpu() -> None:
    with pytest.raises(SystemFault, match="--breakdown"):
        main(["--breakdown"])


def test_share_is_time_to_read_the_weights_over_time_taken() -> None:
    stats = RolloutStats(num_steps=10, num_tokens=40, seconds=2.0, weight_bytes=3 * 10**9, bandwidth=6e10)
    assert stats.bandwidth_share == pytest.approx(10 * 0.05 / 2.0)
    assert stats.take_metrics() == {"perf/rollout_bandwidth_share": pytest.approx(0.25)}
    assert (stats.num_steps, stats.seconds, stats.bandwidth_share) == (0, 0.0, 0.0)
    assert RolloutStats(num_steps=10, seconds=1.0, weight_bytes=5).take_metrics() == {}


def test_weights_that_a_step_reads_are_all_but_the_embedding(tmp_path: Path) -> None:
    policy = build_policy("tiny", "bf16+lora", tmp_path, torch.device("cpu"))
    everything = sum(parameter.numel() * 4 for parameter in policy.parameters())
    assert weight_bytes(policy) == everything, "tied: the embedding is the output layer"
    adapters = [layer for layer in policy.modules() if isinstance(layer, LoRALinear)]
    for layer in adapters:
        layer.enabled = False
    off = sum(4 * (layer.lora_A.numel() + layer.lora_B.numel()) for layer in adapters)
    assert weight_bytes(policy) == everything - off
