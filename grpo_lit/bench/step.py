"""``grpo-lit bench step``: one whole training step by phase, with each rollout engine and beside TRL where installed.

Every candidate runs in a process of its own, on a model of a known shape with random weights (nothing is downloaded):
NF4 base, LoRA of rank 16 on q, k, v and o, gradient checkpointing, bf16, AdamW. With ``--task`` it is a configuration
as it stands instead: its model, data, lengths and rewards. Times are wall clock with the device waited for, medians
over the steps after the first, which warms up; peaks are torch's allocator's. TRL comes last. What a candidate has
measured when its time is up counts, and every line is written as soon as it is known.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

from grpo_lit.bench.options import BenchParser
from grpo_lit.bench.shapes import SHAPES, check_lengths, write_model_folder
from grpo_lit.bench.tables import write_csv
from grpo_lit.errors import UserError
from grpo_lit.paths import csv_argument

OURS = ("graph", "hf", "vllm")
"""Our candidates, by rollout engine."""
PHASES = ("rollout", "reward", "score", "train", "optimizer")
PACKAGES = ("torch", "transformers", "bitsandbytes", "trl", "peft", "vllm")
_RESULT = "bench step result: "
_NOTE = "bench step note: "


def parser() -> BenchParser:
    """The command's arguments."""
    made = BenchParser(
        prog="grpo-lit bench step",
        description=__doc__.splitlines()[0] if __doc__ else None,
        epilog="Further arguments are those of grpo-lit fit, for our candidates.",
    )
    option = partial(made.option, without="--task")
    option("--shape", default="1.5b", choices=sorted(SHAPES), help="model of this shape, random weights")
    made.add_argument("--task", metavar="CONFIG", help="train this configuration as it stands, in place of a shape")
    made.option(
        "--candidates",
        nargs="+",
        default=["graph", "trl"] if importlib.util.find_spec("trl") is not None else ["graph"],
        among=(*OURS, "trl"),
    )
    option("--prompts", type=int, default=4, least=1)
    option("--rows", type=int, default=4, least=2, help="completions of each prompt")
    option("--micro-batch", type=int, default=4, least=1, help="rows of a micro-batch")
    option("--prompt-tokens", type=int, default=128, least=1)
    option("--completion-tokens", type=int, default=768, least=1, help="every completion has this length")
    made.option("--steps", type=int, default=3, least=2, help="optimizer steps; the first warms up, uncounted")
    text = "also: device time of one more step by kind of kernel"
    made.option("--profile", action="store_true", without="--cpu", help=text)
    made.option("--timeout", type=float, default=600, above=0, help="seconds a candidate may take")
    made.add_argument("--csv", type=csv_argument, help="write every row with device, versions and date to this file")
    made.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else")
    made.add_argument("--cpu", action="store_true", help="on the CPU: shows that it works, measures nothing")
    made.add_argument("--child", choices=(*OURS, "trl"), help=argparse.SUPPRESS)
    return made


def main(argv: Sequence[str]) -> int:
    """Runs each candidate, prints the table; returns 1 if one failed.

    Args:
        argv: arguments after ``grpo-lit bench step``.
    """
    options, extra = parser().parse_known_args(list(argv))
    if options.task and "trl" in options.candidates:
        raise UserError("--candidates", "trl", "our candidates: TRL has no --task")
    if options.child:
        return _child(options, extra)
    _check_configuration(options, extra)
    rows, failed = [], False
    show = (lambda line: None) if options.json else (lambda line: print(line, flush=True))
    context = _context(options)
    show(_headline(options, context))
    show(_titles())
    for name in sorted(options.candidates, key="trl".__eq__):  # the slowest last
        result = _run(name, list(argv), options.timeout, lambda text: print(text, file=sys.stderr, flush=True))
        if "error" in result:
            failed = True
            print(f"{name}: {result['error']}", file=sys.stderr, flush=True)
            continue
        rows.append({"candidate": name, **result, **context})
        show(_line(rows[-1]))
        if options.csv is not None:
            write_csv(options.csv, rows, [key for key in rows[0] if key != "kernels"])
    for line in _notes(rows):
        show(line)
    if options.json:
        print(json.dumps({"context": context, "rows": rows}))
    return int(failed or not rows)


def _check_configuration(options: argparse.Namespace, extra: Sequence[str]) -> None:
    """See here that the lengths, ``--task`` and further arguments are accepted: a child's error would be a failure.

    Raises:
        UserError: they are not.
    """
    from grpo_lit.cli.train import build

    if not options.task:
        check_lengths(options.shape, options.prompt_tokens, options.completion_tokens, "--completion-tokens")
    if not options.task and not extra:
        return
    with tempfile.TemporaryDirectory() as scratch:
        own = [f"--config={options.task or '3060ti'}", "--trainer.accelerator=cpu"]
        if not options.task:
            own.append(f"--model.policy.path={write_model_folder(options.shape, Path(scratch))}")
        build("bench step", [*own, f"--trainer.default_root_dir={scratch}", *extra])


def _run(name: str, argv: list[str], timeout: float, tell: Callable[[str], None]) -> dict[str, Any]:
    """A candidate in a process of its own: its peaks and its allocator are its own. It ends with this one.

    Args:
        name: of the candidate.
        argv: the command's arguments.
        timeout: seconds; what was measured by then is the result.
        tell: gets a line for each stage, with the seconds since the start.
    """
    command = [sys.executable, "-m", "grpo_lit", "bench", "step", "--child", name, *argv]
    start = time.perf_counter()
    lines: list[str] = []
    found: list[dict[str, Any]] = []
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")

    def read() -> None:
        assert child.stdout is not None
        with child.stdout as stream:
            for line in map(str.rstrip, stream):
                take(line)

    def take(line: str) -> None:
        if line.startswith(_RESULT):
            found.append(json.loads(line.removeprefix(_RESULT)))
        elif line.startswith(_NOTE):
            tell(f"{name}: {time.perf_counter() - start:6.1f} s {line.removeprefix(_NOTE)}")
        else:
            lines.append(line)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        code: int | str = child.wait(timeout)
    except subprocess.TimeoutExpired:
        code = f"none after {timeout:.0f} s"
    finally:
        child.kill()
        child.wait()
        reader.join(10)
        signal.signal(signal.SIGTERM, before)
    tell(f"{name}: {time.perf_counter() - start:6.1f} s in all, exit code {code}")
    return found[-1] if found else {"error": f"exit code {code}\n" + "\n".join(lines[-12:])}


def note(text: str) -> None:
    """Tell the parent process what a candidate has come to."""
    print(_NOTE + text, flush=True)


def report(result: dict[str, Any]) -> None:
    """Hand a result to the parent process; a later one replaces it."""
    print(_RESULT + json.dumps(result), flush=True)


def _child(options: argparse.Namespace, extra: list[str]) -> int:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    note("imported")
    with tempfile.TemporaryDirectory() as scratch:
        if options.child == "trl":
            from grpo_lit.bench.step_trl import run_trl

            result = run_trl(options, Path(scratch))
        else:
            from grpo_lit.bench.step_ours import run_ours

            result = run_ours(options, extra, Path(scratch))
        report(result)
    return 0


def _context(options: argparse.Namespace) -> dict[str, object]:
    from grpo_lit.bench.kernel_baselines import installed

    on_cuda = torch.cuda.is_available() and not options.cpu
    return {
        "gpu": torch.cuda.get_device_name() if on_cuda else None,
        "measurement": on_cuda,
        "task": options.task,
        "shape": None if options.task else options.shape,
        "completions": None if options.task else options.prompts * options.rows,
        "prompt_tokens": None if options.task else options.prompt_tokens,
        "completion_tokens": None if options.task else options.completion_tokens,
        **{package: installed(package) for package in PACKAGES},
        "date": date.today().isoformat(),
    }


def _headline(options: argparse.Namespace, context: dict[str, object]) -> str:
    versions = ", ".join(f"{name} {context[name]}" for name in PACKAGES if context[name])
    where = context["gpu"] or "NO MEASUREMENT: no CUDA device"
    shape = (
        f"shape {options.shape}: {context['completions']} completions of {options.prompt_tokens} + "
        f"{options.completion_tokens} tokens, micro-batches of {options.micro_batch} rows"
    )
    return f"{where}; {versions}; {context['date']}\n" + (f"task {options.task}" if options.task else shape)


def _titles() -> str:
    line = f"{'':<12}" + "".join(f"{phase:>11}" for phase in (*PHASES, "step"))
    return "\n" + line + f"{'train MiB':>11}{'peak MiB':>10}{'reserved':>10}"


def _line(row: dict[str, Any]) -> str:
    """Seconds by phase and peaks of one candidate."""
    cells = "".join(f"{row.get(f'{phase}_s') or 0.0:>10.3f}s" for phase in (*PHASES, "step"))
    peaks = [row.get(name) or float("nan") for name in ("train_peak_mib", "peak_mib", "reserved_mib")]
    return f"{row['candidate']:<12}{cells}{peaks[0]:>11.0f}{peaks[1]:>10.0f}{peaks[2]:>10.0f}"


def _notes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each candidate relative to TRL if it ran, else to hf, and kernels by kind."""
    lines = []
    found = {row["candidate"]: row for row in rows}
    base = found.get("trl", found.get("hf"))
    for row in rows:
        if base is None or row is base:
            continue
        keys = [phase for phase in ("step", "rollout", "train") if base.get(f"{phase}_s")]
        ratios = [f"{phase} {row[f'{phase}_s'] / base[f'{phase}_s']:.2f}x" for phase in keys]
        if base.get("peak_mib") and row.get("peak_mib"):
            ratios.append(f"peak memory {row['peak_mib'] / base['peak_mib']:.2f}x")
        name = "TRL" if base["candidate"] == "trl" else base["candidate"]
        lines.append(f"{row['candidate']} against {name}: {', '.join(ratios)}")
    for row in rows:
        for kind, (milliseconds, launches) in (row.get("kernels") or {}).items():
            lines.append(f"{row['candidate']} training, {kind:<24} {milliseconds:9.1f} ms {launches:7d} kernels")
    return lines
