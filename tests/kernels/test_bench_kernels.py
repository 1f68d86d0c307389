"""grpo-lit bench kernels runs without a GPU, says that it measures nothing, and fails when a check fails."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import pytest

from grpo_lit.bench import kernels
from grpo_lit.errors import UserError


def _run(*arguments):
    # a process of its own: the interpreter must be on before Triton is first imported
    pytest.importorskip("triton", reason="Triton has no build for this machine")
    code = f"import sys; from grpo_lit.bench.kernels import main; sys.exit(main({list(arguments)!r}))"
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200, check=False
    )


def test_tables_csv_and_plot(tmp_path):
    done = _run("--csv", str(tmp_path / "k.csv"), "--plot", str(tmp_path / "k.png"), "--modes", "full", "backward")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("NO MEASUREMENT")
    for op in (
        "fused_logits_grpo",
        "grpo_token_loss",
        "fused_linear_grpo",
        "lora_linear",
        "entropy_mask",
        "nf4_matmul",
        "decode_linear",
    ):
        assert op in done.stdout
    with (tmp_path / "k.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["measurement"] for row in rows} == {"False"}
    assert {"ours", "eager", "three kernels", "atomics"} <= {row["impl"] for row in rows}
    assert all(float(row["p50_ms"]) > 0 and row["torch"] and row["date"] for row in rows)
    assert (tmp_path / "k.png").stat().st_size > 5000


def test_json_is_all_of_the_output():
    done = _run("--json", "--sections", "tokens")
    report = json.loads(done.stdout)
    assert report["context"]["measurement"] is False
    assert report["failures"] == []
    assert {row["op"] for row in report["rows"]} == {"grpo_token_loss"}


def test_a_wrong_kernel_fails_the_command(tmp_path):
    # the derivative negated where the Triton version is launched
    (tmp_path / "broken.py").write_text(
        "import os, sys\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "from grpo_lit.kernels._triton import token_loss as module\n"
        "right = module.token_loss\n"
        "def wrong(*args, **kwargs):\n"
        "    loss, slope = right(*args, **kwargs)\n"
        "    return loss, -slope\n"
        "module.token_loss = wrong\n"
        "from grpo_lit.bench.kernels import main\n"
        "sys.exit(main(['--sections', 'tokens']))\n"
    )
    pytest.importorskip("triton", reason="Triton has no build for this machine")
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "broken.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "further from float64 than the rule allows" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--sections", "logit"], "--sections"),
        (["--modes", "half"], "--modes"),
        (["--samples", "0"], "--samples"),
    ],
)
def test_mistakes_are_named(arguments, named):
    with pytest.raises(UserError, match=named):
        kernels.main(arguments)
