"""Runs triton_cases.py, head_cases.py and train_cases.py where Triton can run: interpreted, or compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


CASES = ("triton_cases.py", "head_cases.py", "train_cases.py")


@pytest.mark.parametrize("where", ["interpreter", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_triton_kernels(where):
    # A process of its own: the interpreter must be on before Triton is first imported.
    pytest.importorskip("triton", reason="Triton has no build for this machine")
    env = os.environ | {"TRITON_INTERPRET": "1" if where == "interpreter" else "0", "OMP_NUM_THREADS": "1"}
    if where == "interpreter":
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "-o",
        f"pythonpath={FOLDER}",
        *(str(FOLDER / cases) for cases in CASES),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
