"""Every Triton kernel of the package once, on small inputs, under compute-sanitizer: memcheck and racecheck.

    python scripts/sanitize_kernels.py                  all groups under both tools, side by side; needs a CUDA GPU
    python scripts/sanitize_kernels.py --run logits     one group alone, without the sanitizer

Inputs and references are made on the CPU, so that little but the kernels themselves runs on the device. Sizes are the
smallest that reach each path: rows cut into several programs that wait for each other, rows off a 16-byte boundary,
sums over several programs, ends of tiles. Exit code 1 if a tool reports anything in a kernel of the package, a result
is wrong, or a kernel of the package was never launched.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_lit.kernels import (
    PAGE,
    LoraUpdate,
    Nf4Weight,
    RmsNorm,
    add_layer_norm,
    add_rms_norm,
    decode_linear,
    fused_linear_grpo,
    fused_logits_grpo,
    gated_activation,
    grpo_token_loss,
    linear_logprobs,
    nf4_matmul,
    paged_attention,
    rope_cache,
    sample_token,
)
from grpo_lit.kernels.advance_rows import RowState, advance_rows
from grpo_lit.kernels.dispatch import interpreting
from grpo_lit.kernels.gated_silu import gated_silu, gated_silu_backward_
from grpo_lit.kernels.rms_norm_train import rms_norm_train, rms_norm_train_backward
from grpo_lit.kernels.rotary import Heads, rotary, rotary_backward
from grpo_lit.loss import LossConfig

DEVICE = torch.device("cpu" if interpreting() else "cuda")
TOOLS = ("memcheck", "racecheck")
GEN = torch.Generator().manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GEN).to(dtype)


def moved(value: Any, device: torch.device) -> Any:
    """``value`` with every tensor in it on ``device``, copies that may be written to."""
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True).requires_grad_(value.requires_grad)
    if isinstance(value, tuple):
        items = [moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [moved(item, device) for item in value]
    return {key: moved(item, device) for key, item in value.items()} if isinstance(value, dict) else value


def check(label: str, function: Callable[..., Sequence[Tensor]], *args: Any, tolerance: float = 1e-4) -> None:
    """``function(impl, *args)`` on the device and in torch on the CPU; both give the same tensors."""
    want = function("torch", *moved(args, torch.device("cpu")))
    got = function("triton", *moved(args, DEVICE))
    for one, other in zip(got, want, strict=True):
        one, other = one.detach().double().cpu(), other.detach().double()
        error = (one - other).abs().max() / other.abs().max().clamp(min=1e-30)
        if not error <= tolerance:
            raise SystemExit(f"{label}: {error:.1e} from the reference, {tolerance:.0e} allowed")
    print(f"ran {label}", flush=True)


def logits() -> None:
    """Loss and gradient of logits, the token loss, and the scaling of a ready gradient."""
    config = LossConfig(epsilon_high=0.28, delta=1.5, beta=0.1, entropy_coef=0.03)
    sizes = ((37, torch.float32), (9001, torch.float32), (16384, torch.bfloat16), (9001, torch.float16))
    for vocab, dtype in sizes:
        for inplace, masked in ((False, "zeros"), (True, "untouched")):
            z = randn(2, 3, vocab + 5, dtype=dtype)
            ids = torch.randint(vocab, (2, 3), generator=GEN)
            old, ref = (z.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0] + 0.1 * randn(2, 3) for _ in "ab")
            weights = torch.tensor([[0.2, 0.0, 0.3], [0.1, 0.4, 0.0]])

            def run(impl: str, z: Tensor, *rest: Tensor, options: dict[str, Any]) -> list[Tensor]:
                ids, old, ref, advantages, weights = rest
                leaf = z.requires_grad_()
                loss, stats = fused_logits_grpo(
                    leaf, ids, old, advantages, weights, ref_logprobs=ref, impl=impl, return_stats=True, **options
                )
                (grad,) = torch.autograd.grad(-2.5 * loss, leaf)
                return [loss, *stats, grad[weights != 0]]

            options = {"config": config, "inplace": inplace, "masked_rows": masked, "vocab_size": vocab}
            check(
                f"fused_logits_grpo, {vocab} {dtype}, {masked}",
                lambda impl, *args, options=options: run(impl, *args, options=options),  # type: ignore[misc]
                *(z, ids, old, ref, torch.tensor([0.7, -1.2]), weights),
                tolerance=1e-4 if dtype == torch.float32 else 1e-2,
            )

    def tokens(impl: str, logp: Tensor, old: Tensor, ref: Tensor, adv: Tensor, weights: Tensor) -> list[Tensor]:
        leaf = logp.requires_grad_()
        only = LossConfig(epsilon_high=0.28, beta=0.1)
        loss = grpo_token_loss(leaf, old, adv, weights, ref_logprobs=ref, config=only, impl=impl)
        return [loss, torch.autograd.grad(3 * loss, leaf)[0]]

    for steps in (7, 1025):
        logp, weights = -randn(3, steps).abs(), torch.rand(3, steps, generator=GEN)
        check(f"grpo_token_loss, 3 x {steps}", tokens, logp, logp + 0.1, logp - 0.1, randn(3), weights)


def head() -> None:
    """The output layer: log-probs, entropy, loss, and their gradients."""

    def run(impl: str, h: Tensor, w: Tensor, b: Tensor, ids: Tensor, adv: Tensor, weights: Tensor) -> list[Tensor]:
        leaves = [t.requires_grad_() for t in (h, w, b)]
        options: dict[str, Any] = {"bias": b, "temperature": 0.9, "softcap": 5.0, "impl": impl, "chunk_rows": 4}
        logp, entropy = linear_logprobs(h, w, ids, **options)
        mixed = torch.autograd.grad((logp * weights).sum() + entropy.sum(), leaves)
        loss = fused_linear_grpo(h, w, ids, None, adv, weights, **options)
        return [logp, entropy, loss, *mixed, *torch.autograd.grad(loss, leaves)]

    for vocab, dtype in ((301, torch.float32), (9001, torch.float32), (9008, torch.bfloat16)):
        ids = torch.randint(vocab, (2, 3), generator=GEN)
        weights = torch.tensor([[0.2, 0.0, 0.3], [0.1, 0.4, 0.0]])
        made = (randn(2, 3, 16, dtype=dtype), randn(vocab, 16, dtype=dtype) / 4, randn(vocab, dtype=dtype))
        tolerance = 1e-3 if dtype == torch.float32 else 5e-2
        check(f"head, {vocab} {dtype}", run, *made, ids, randn(2), weights, tolerance=tolerance)


def nf4(matrix: Tensor, nested: bool) -> Nf4Weight:
    from bitsandbytes.functional import quantize_4bit

    made = quantize_4bit(matrix, quant_type="nf4", compress_statistics=nested, blocksize=64)
    return Nf4Weight.from_bitsandbytes(*made)


def products() -> None:
    """Products of few rows with 16-bit and NF4 weights, with all that can stand around them."""
    for nested in (True, False):
        weight = nf4(randn(70, 1344), nested)
        for dtype in (torch.bfloat16, torch.float16):
            check(f"dequantize {dtype}", lambda _, w, dtype=dtype: [w.dequantize(dtype)], weight)  # type: ignore[misc]
            for rows in (1, 20):
                x = randn(rows, 1344, dtype=dtype)
                label = f"nf4_matmul, {rows} rows {dtype}"
                check(label, lambda impl, x, w: [nf4_matmul(x, w, impl=impl)], x, weight, tolerance=2e-2)

    def linear(impl: str, x: Tensor, weights: list[Any], options: dict[str, Any]) -> list[Tensor]:
        return [decode_linear(x, weights, impl=impl, **options)]

    def update(columns: int, width: int) -> LoraUpdate:
        return LoraUpdate(randn(5, width) * width**-0.5, randn(columns, 5), 0.5)

    dtype = torch.bfloat16
    for packed in (False, True):
        for rows, width in ((1, 64), (5, 1088), (20, 640)):
            norm = RmsNorm(randn(width, dtype=dtype), 1e-3)
            for name, columns, activation in (("qkv", [96, 40, 32], None), ("gate and up", [72, 72], "silu")):
                dense = [randn(n, width, dtype=dtype) * width**-0.5 for n in columns]
                weights = [nf4(w, True) for w in dense] if packed else dense
                out = columns[0] if activation else sum(columns)
                options = {
                    "bias": [randn(n, dtype=dtype) for n in columns],
                    "lora": [update(n, width) for n in columns] if rows > 1 else None,
                    "norm": norm if rows > 1 else None,
                    "residual": randn(rows, out, dtype=dtype),
                    "activation": activation,
                }
                x = randn(rows, width, dtype=dtype)
                check(
                    f"decode_linear, {name}, {rows} x {width}, nf4 {packed}",
                    linear,
                    x,
                    weights,
                    options,
                    tolerance=3e-2,
                )


def layers() -> None:
    """The small operations of a training layer, forward and backward."""

    def norms(impl: str, x: Tensor, weight: Tensor, dy: Tensor, residual: Tensor) -> list[Tensor]:
        out = torch.empty_like(x)
        rms_norm_train_backward(dy, x, weight, 1e-5, residual=residual, out=out, impl=impl)
        return [rms_norm_train(x, weight, 1e-5, impl=impl), out]

    def gates(impl: str, gate_up: Tensor, dout: Tensor) -> list[Tensor]:
        y = gated_silu(gate_up, impl=impl)
        gated_silu_backward_(gate_up, dout, activation=True, impl=impl)
        return [y, gate_up, dout]

    def turns(impl: str, qkv: Tensor, cos: Tensor, sin: Tensor, grads: list[Tensor], norm: list[Any]) -> list[Tensor]:
        heads = Heads(3, 1, 32, *norm, 1e-6)
        return [
            rotary(qkv, cos, sin, heads, impl=impl),
            rotary_backward(*grads, qkv, cos, sin, heads, impl=impl),
        ]

    for dtype in (torch.float32, torch.bfloat16):
        close = 1e-4 if dtype == torch.float32 else 2e-2

        def made(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return randn(*shape, dtype=dtype)

        for width in (96, 1536):
            check(
                f"rms_norm_train, {width}",
                norms,
                made(3, width),
                made(width),
                made(3, width),
                made(3, width),
                tolerance=close,
            )
        check("gated_silu", gates, made(3, 2200), made(3, 1100), tolerance=close)
        angle = randn(4, 16).repeat(1, 2)
        grads = [made(4, n, 32) for n in (3, 1, 1)]
        for norm in ([None, None], [made(32), made(32)]):
            angles = (angle.cos().to(dtype), angle.sin().to(dtype))
            check("rotary", turns, made(4, 5 * 32), *angles, grads, norm, tolerance=close)


def decode() -> None:
    """A decode step beside its products: cache, attention, norms, sampling, and the rows' bookkeeping."""
    table = torch.randperm(8, generator=GEN).view(2, 4).int()

    def step(
        impl: str, qkv: Tensor, pages: list[Tensor], table: Tensor, place: Tensor, norm: list[Any]
    ) -> list[Tensor]:
        cos, sin = (
            f(torch.arange(300.0, device=qkv.device)[:, None] * 0.01 + pages[2]) for f in (torch.cos, torch.sin)
        )
        heads: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2, "q_norm": norm[0], "k_norm": norm[1], "impl": impl}
        q = rope_cache(qkv, pages[0], pages[1], table, place, cos=cos, sin=sin, **heads)
        return [q, pages[0], pages[1], paged_attention(q, pages[0], pages[1], table, place + 1, impl=impl)]

    for dtype in (torch.float32, torch.bfloat16):
        close = 1e-4 if dtype == torch.float32 else 3e-2
        for width, norm in ((64, False), (80, True)):
            pages = [
                randn(8, 2, PAGE, width, dtype=dtype),
                randn(8, 2, PAGE, width, dtype=dtype),
                randn(width // 2).repeat(2),
            ]
            weights = [randn(width, dtype=dtype), randn(width, dtype=dtype)] if norm else [None, None]
            place = torch.tensor([0, 200], dtype=torch.int32)
            check(
                f"rope_cache, paged_attention {dtype}",
                step,
                randn(2, 10 * width, dtype=dtype),
                pages,
                table,
                place,
                weights,
                tolerance=close,
            )
        x, other, weight, bias = (
            randn(3, 100, dtype=dtype),
            randn(3, 100, dtype=dtype),
            randn(100, dtype=dtype),
            randn(100, dtype=dtype),
        )
        check("add_rms_norm", lambda impl, *a: add_rms_norm(*a, 1e-3, impl=impl), x, other, weight, tolerance=close)
        check(
            "add_layer_norm",
            lambda impl, *a: add_layer_norm(*a, 1e-3, impl=impl),
            x,
            other,
            weight,
            bias,
            tolerance=close,
        )
        check(
            "gated_activation",
            lambda impl, t: [gated_activation(t, "silu", impl=impl)],
            randn(3, 2200, dtype=dtype),
            tolerance=close,
        )
        uniform = torch.rand(5, generator=GEN, dtype=torch.float64)
        check(
            "sample_token",
            lambda impl, z, u: sample_token(z, u, temperature=0.6, impl=impl),
            randn(5, 5000, dtype=dtype) * 3,
            uniform,
        )

    def advanced(impl: str, ids: Tensor, logprobs: Tensor, state: RowState, eos: Tensor) -> list[Tensor]:
        advance_rows(ids, logprobs, state, eos, impl=impl)
        return [t.double() for t in (*state[:6], state.out_ids[:-1], state.out_logprobs[:-1])]

    slots = 40
    state = RowState(
        torch.ones(slots, dtype=torch.long),
        torch.arange(slots, dtype=torch.int32) - 2,
        torch.arange(slots, dtype=torch.int32) - 1,
        torch.arange(slots, dtype=torch.int32) % 3,
        torch.arange(slots, dtype=torch.int32),
        torch.zeros(slots, dtype=torch.float64),
        torch.rand(slots + 1, 3, generator=GEN, dtype=torch.float64),
        torch.zeros(slots + 1, 3, dtype=torch.long),
        torch.zeros(slots + 1, 3),
    )
    check("advance_rows", advanced, torch.arange(slots), randn(slots), state, torch.tensor([5, 9]))


GROUPS = {"logits": logits, "head": head, "products": products, "layers": layers, "decode": decode}


def kernels() -> set[str]:
    """Names of all Triton kernels of the package."""
    import grpo_lit.kernels._triton as folder

    names = set()
    for module in pkgutil.iter_modules(folder.__path__):
        found = vars(importlib.import_module(f"{folder.__name__}.{module.name}"))
        names |= {name for name, value in found.items() if name.endswith("_kernel") and hasattr(value, "run")}
    return names


def run_group(name: str) -> None:
    """One group's kernels; prints the names of those launched."""
    launched = set()
    if not interpreting():
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            launched.add(self.fn.__name__)
            return run(self, *args, **kwargs)

        JITFunction.run = noted
    GROUPS[name]()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    print("launched:", *sorted(launched), flush=True)


def _start(sanitizer: str, tool: str, group: str, logs: Path) -> tuple[subprocess.Popen[bytes], Path]:
    log = logs / f"{tool}_{group}.txt"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, "--run", group]
    # every tensor an allocation of its own, or a write beyond its end would land in the allocator's pool unseen
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env), log


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=GROUPS, help="run this group here, without the sanitizer")
    parser.add_argument("--logs", type=Path, default=Path("sanitizer"), help="folder for the tools' reports")
    options = parser.parse_args(argv)
    if options.run:
        run_group(options.run)
        return 0
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(sanitizer, os.X_OK):
        parser.error("compute-sanitizer isn't on the PATH (it comes with the CUDA toolkit)")
    options.logs.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    runs = {(tool, group): _start(sanitizer, tool, group, options.logs) for group in GROUPS for tool in TOOLS}
    failed, launched, ours = False, set(), kernels()
    for (tool, group), (process, log) in runs.items():
        code = process.wait()
        text = log.read_text(errors="replace")
        summary = "; ".join(re.findall(r"========= ((?:ERROR|RACECHECK) SUMMARY: .*)", text))
        names = re.findall(r"^launched: (.*)$", text, re.MULTILINE)
        launched |= set(" ".join(names).split())
        # cuBLAS passes data on in ways that racecheck does not follow: reports on kernels of others are shown only
        reported = set(re.findall(r" at ([\w.:<>]+)\+0x", text))
        ok = bool(names) and bool(summary) and (code == 0 or (bool(reported) and not reported & ours))
        failed |= not ok
        others = f", reported: {', '.join(sorted(reported))}" if reported else ""
        verdict = "clean" if ok else f"FAILED, exit {code}"
        print(f"{tool:9s} {group:9s} {verdict}  {summary}{others}  ({time.monotonic() - start:.0f} s)", flush=True)
    missing = ours - launched
    print(f"{len(launched)} kernels launched" + (f"; never launched: {', '.join(sorted(missing))}" if missing else ""))
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
