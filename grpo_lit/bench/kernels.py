"""``grpo-lit bench kernels``: the fused ops beside what they replace, checked against float64, then timed.

All implementations of a size are timed in one run, in alternating order. On a machine without CUDA the same
code runs at tiny sizes under Triton's interpreter; that shows that it works and measures nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from grpo_lit.bench.options import BenchParser
from grpo_lit.bench.tables import write_csv
from grpo_lit.bench.timing import Timer
from grpo_lit.paths import csv_argument, image_argument

if TYPE_CHECKING:
    from grpo_lit.bench.kernel_cases import Case

SECTIONS = ("logits", "tokens", "head", "lora", "layer", "entropy", "nf4", "decode")
# rows of tokens, tokens a row, vocabulary, dtype
LOGITS_SIZES = [
    (4, 256, 32768, torch.float32),
    (4, 256, 131072, torch.float32),
    (4, 768, 50257, torch.bfloat16),
    (4, 768, 151936, torch.bfloat16),
]
# rows, in, out: q, gate and down of the 1.5B shape in a micro-batch of 4 x (128 + 768)
LORA_SIZES = [(3584, 1536, 1536), (3584, 1536, 8960), (3584, 8960, 1536)]
CURVE = (16384, 32768, 50257, 131072, 151936, 262144)
_SLACK = {
    "fused_logits_grpo": 2e-5,
    "grpo_token_loss": 2e-6,
    "fused_linear_grpo": 2e-3,
    "lora_linear": 1e-3,
    "decoder_layer": 1e-4,
    "entropy_mask": 0.0,
    "nf4_matmul": 1e-3,
    "decode_linear": 1e-3,
    "paged_attention": 1e-3,
    "sample_token": 1e-6,
}


def _parser() -> BenchParser:
    parser = BenchParser(prog="grpo-lit bench kernels", description=__doc__.splitlines()[0])
    parser.option("--sections", nargs="+", default=list(SECTIONS), among=SECTIONS)
    parser.option("--samples", type=int, default=15, least=1, help="timed samples of each candidate (default 15)")
    parser.option("--modes", nargs="+", default=["full"], among=_MODES)
    parser.add_argument("--csv", type=csv_argument, help="write every row with GPU, versions and date to this file")
    parser.add_argument("--plot", type=image_argument, help="write bandwidth against vocabulary to this image")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile (and what uses it) out")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; returns 1 if an implementation of ours fails its check against float64.

    Args:
        argv: arguments after ``grpo-lit bench kernels``.
    """
    options = _parser().parse_args(argv)
    on_cuda = torch.cuda.is_available()
    if not on_cuda:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is first imported
    device = torch.device("cuda" if on_cuda else "cpu")
    timer = Timer(device, options.samples if on_cuda else 1)
    context = _context(device, timer)
    rows, failures = [], []
    show = (lambda line: None) if options.json else (lambda line: print(line, flush=True))
    show(_headline(context))
    for case in _cases(options, device):
        failures += [f"{case.op}, {case.label}: {name}" for name in case.failures(_SLACK[case.op])]
        timer.run(case.candidates)
        new = _rows(case, context)
        rows += new
        if options.csv is not None:  # after every case, so that a run cut short leaves what it measured
            write_csv(options.csv, rows)
        for line in _table(case, new):
            show(line)
        del case
        if on_cuda:
            torch.cuda.empty_cache()
    for failure in failures:
        print(f"further from float64 than the rule allows: {failure}", file=sys.stderr)
    if options.plot is not None:
        _plot(options.plot, device, timer, context)
    if options.json:
        print(json.dumps({"context": context, "rows": rows, "failures": failures}))
    return 1 if failures else 0


_MODES = ("full", "forward", "backward")


def _cases(options: argparse.Namespace, device: torch.device) -> Iterator[Case]:
    """The cases asked for, built one at a time so that only one holds memory."""
    from grpo_lit.bench.kernel_cases import head_case, logits_case, token_case
    from grpo_lit.bench.layer_cases import decoder_case, entropy_case, lora_case

    compiled = not options.no_compile and device.type == "cuda"
    on_cuda = device.type == "cuda"
    if "logits" in options.sections:
        for n, t, vocab, dtype in LOGITS_SIZES if on_cuda else [(2, 2, 300, torch.float32)]:
            yield logits_case(n, t, vocab, dtype, device, compiled=compiled, modes=tuple(options.modes))
    if "tokens" in options.sections:
        for ragged in (False, True):
            size = (4096, 1024) if on_cuda else (2, 40)
            yield token_case(*size, device, compiled=compiled, ragged=ragged, sets=8 if on_cuda else 1)
    if "head" in options.sections:
        if on_cuda:
            head = (1536, 151936, torch.bfloat16, device)
            yield head_case(4, 768, *head, rivals=True, compiled=compiled)
            yield head_case(4, 8 * 768, *head, rivals=False, compiled=compiled)
        else:
            yield head_case(2, 2, 8, 60, torch.float32, device, rivals=True, compiled=False)
    if "lora" in options.sections:
        dtype = torch.bfloat16 if on_cuda else torch.float32
        for rows, width, out in LORA_SIZES if on_cuda else [(6, 64, 32)]:
            for nf4 in (False, True):
                yield lora_case(rows, width, out, dtype, device, nf4=nf4)
    if "layer" in options.sections:
        if on_cuda:
            yield decoder_case(4, 896, 1536, device, heads=12, wide=8960)
        else:
            yield decoder_case(2, 6, 64, device, heads=4, wide=128)
    if "entropy" in options.sections:
        yield entropy_case(*((16, 768) if on_cuda else (3, 20)), device)
    if "nf4" in options.sections or "decode" in options.sections:
        from grpo_lit.bench.decode_cases import decode_cases, nf4_cases

        if "nf4" in options.sections:
            yield from nf4_cases(device)
        if "decode" in options.sections:
            yield from decode_cases(device)


def _context(device: torch.device, timer: Timer) -> dict[str, object]:
    from grpo_lit.bench.kernel_baselines import installed

    on_cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_cuda else None,
        "measurement": on_cuda,
        "copy_tb_per_s": timer.bandwidth() / 1e12 if on_cuda else None,
        "torch": torch.__version__,
        "triton": installed("triton"),
        "liger": installed("liger-kernel"),
        "trl": installed("trl"),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def _headline(context: dict[str, object]) -> str:
    versions = ", ".join(f"{name} {context[name]}" for name in ("torch", "triton", "liger", "trl") if context[name])
    if not context["measurement"]:
        return f"NO MEASUREMENT: no CUDA device, Triton's interpreter at tiny sizes; {versions}"
    return f"{context['gpu']}, copy {context['copy_tb_per_s']:.2f} TB/s; {versions}; {context['date']}"


def _rows(case: Case, context: dict[str, object]) -> list[dict[str, object]]:
    speed = context["copy_tb_per_s"]
    floor = case.floor_bytes / speed / 1e9 if isinstance(speed, float) and case.floor_bytes else None
    rows = []
    for candidate in case.candidates:
        median = candidate.percentile(0.5)
        rows.append(
            {
                "op": case.op,
                "size": case.label,
                "impl": candidate.name,
                "mode": candidate.mode,
                "p20_ms": candidate.percentile(0.2),
                "p50_ms": median,
                "p80_ms": candidate.percentile(0.8),
                "peak_mib": candidate.peak_mib,
                "floor_ms": floor,
                "over_floor": median / floor if floor else None,
                "error": case.errors.get(candidate.name),
                **context,
            }
        )
    return rows


def _table(case: Case, rows: list[dict[str, object]]) -> list[str]:
    """Lines for the terminal: times, and what they are relative to the floor and to ours."""
    ours = rows[0]["p50_ms"]
    lines = ["", f"{case.op}: {case.label}"]
    titles = " ".join(f"{title:>9s}" for title in ("ms p20", "p50", "p80"))
    lines.append(f"  {'implementation':24s} {'mode':9s} {titles}  / floor  / ours  peak MiB    error")
    for row in rows:
        times = " ".join(f"{row[key]:9.4f}" for key in ("p20_ms", "p50_ms", "p80_ms"))
        floor = f"{row['over_floor']:8.3f}" if row["over_floor"] else " " * 8
        error = f"{row['error']:8.1e}" if row["error"] is not None else " " * 8
        lines.append(
            f"  {row['impl']:24s} {row['mode']:9s} {times} {floor} {row['p50_ms'] / ours:7.2f} "  # type: ignore[operator]
            f"{row['peak_mib']:9.0f} {error}"
        )
    return lines


def _plot(path: Path, device: torch.device, timer: Timer, context: dict[str, object]) -> None:
    """Bandwidth of ``fused_logits_grpo`` (one read, one write of the logits) against the vocabulary."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from grpo_lit.bench.kernel_cases import bandwidth_curve

    sizes = CURVE if device.type == "cuda" else (64, 300)
    budget = 1 << 30 if device.type == "cuda" else 1 << 12
    figure, axes = pyplot.subplots(figsize=(6.4, 4))
    for dtype in (torch.float32, torch.bfloat16):
        speeds = bandwidth_curve(sizes, dtype, device, timer, budget)
        axes.plot(sizes, [speed / 1e12 for speed in speeds], marker="o", label=str(dtype).removeprefix("torch."))
    if context["measurement"]:
        axes.axhline(context["copy_tb_per_s"], color="grey", linestyle="--", label="copy")  # type: ignore[arg-type]
    axes.set(
        xlabel="vocabulary",
        ylabel="TB/s",
        xscale="log",
        title="fused_logits_grpo: 1 read + 1 write of the logits",
    )
    axes.set_ylim(bottom=0)
    axes.legend()
    note = f"{context['gpu']}, {context['date']}" if context["measurement"] else "no measurement"
    figure.text(0.99, 0.01, note, ha="right", fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
