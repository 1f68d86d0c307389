"""Runs graph_triton_cases.py where Triton can run: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("graph_triton_cases.py")


@pytest.mark.parametrize("where", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_graph_engine_on_triton(where: str) -> None:
    # A process of its own: the interpreter must be on before Triton is first imported.
    pytest.importorskip("triton", reason="Triton has no build for this machine")
    pytest.importorskip("bitsandbytes")
    env = os.environ | {"TRITON_INTERPRET": "1" if where == "interpreter" else "0", "OMP_NUM_THREADS": "1"}
    if where == "interpreter":
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-o", "addopts=", str(CASES)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
