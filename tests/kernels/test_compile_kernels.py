"""The most demanding kernels of the reference job, compiled for its card by scripts/compile_kernels.py."""

from __future__ import annotations

import os
import platform
import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "compile_kernels.py"


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("triton", reason="Triton has no build for this machine")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("Triton's compilers for NVIDIA GPUs are not part of its build for this machine")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton interprets here, nothing is compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield runpy.run_path(str(SCRIPT))


def test_what_takes_most_fits_the_reference_card(script, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # so that the compiler really runs
    with script["absent_gpu"](script["CARDS"]["3060ti"]) as compiled:
        script["decode_step"](script["MODELS"]["qwen"], "nf4", 32)  # with the output layer in 4 bits too
    kernels = compiled.kernels.values()
    assert [k for k in kernels if k.verdict != "fits"] == []
    assert 65536 < max(k.shared for k in kernels) <= 101376
    assert {"nf4_kernel", "_attend_kernel", "_add_norm_kernel", "_choose_kernel"} <= {k.name for k in kernels}


def test_what_does_not_fit_is_seen(script):
    import triton
    import triton.language as tl

    @triton.jit
    def broken(x):
        tl.static_assert(False)

    with script["absent_gpu"](script["CARDS"]["3060ti"]._replace(shared_memory=1024)) as compiled:
        script["dequantize"](script["nf4"](64, 64), torch.bfloat16)
        broken[(1,)](script["new"](8))
    large, wrong = compiled.kernels.values()
    assert large.shared > 1024
    assert large.verdict == "takes too much shared memory"
    assert wrong.verdict.startswith("does not compile")


@pytest.mark.parametrize("card", ["3060ti", "4060", "5060ti"])
def test_small_cards_read_the_reference_jobs_logits_once(script, card):
    """The gradient goes over float32 logits, as the memory plan says."""
    from grpo_lit.kernels._triton.logit_rows import reads_rows_first

    with script["absent_gpu"](script["CARDS"][card]):
        assert reads_rows_first(script["new"](256, script["MODELS"]["qwen"].vocab, dtype=torch.float32))
