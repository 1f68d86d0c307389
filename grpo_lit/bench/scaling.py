"""``grpo-lit bench scaling``: one step on several GPUs against one, through `grpo-lit fit` on Lightning DDP.

Weak scaling keeps the rows of a device, strong scaling those of the step; both are measured as completion tokens a
second of the whole step. Beside it stand the seconds a step spends in the all-reduce of the gradients, and the longest
time that a rank waits after its rollout for the slowest one.

With ``--ragged MEAN`` completions end at random, and one run on the largest number of devices takes the layouts of
`grpo_lit.rollout.RolloutConfig` in turn: how long ranks wait with fixed shares and with one queue of prompts, which
knows nothing of them (``queue``) or has seen each before and begins with the longest (``longest``).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from grpo_lit.bench import ragged
from grpo_lit.bench.options import BenchParser
from grpo_lit.bench.shapes import SHAPES, check_lengths, write_model_folder
from grpo_lit.bench.tables import write_csv
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.paths import csv_argument

FIELDS = ("scaling", "devices", "rows", "step_s", "tokens_per_s", "ratio", "allreduce_share", "rank_wait_s")


@dataclass(frozen=True)
class Measured:
    """Medians over the steps after the first."""

    devices: int
    rows: int
    step_s: float
    tokens_per_s: float
    allreduce_s: float
    rank_wait_s: float


def main(argv: Sequence[str]) -> int:
    """Measure, print the table, write the CSV."""
    options = _parse(argv)
    accelerator = "gpu" if torch.cuda.is_available() and not options.cpu else "cpu"
    counts = sorted(set(options.devices))
    if accelerator == "gpu" and counts[-1] > torch.cuda.device_count():
        raise UserError("--devices", counts[-1], f"at most the {torch.cuda.device_count()} GPUs of this machine")
    name = torch.cuda.get_device_name(0) if accelerator == "gpu" else "CPU"
    print(
        f"{name}; torch {torch.__version__}; {date.today()}; shape {options.shape}, NF4 + LoRA"
        if accelerator == "gpu"
        else f"CPU; torch {torch.__version__}; {date.today()}; shape {options.shape}, fp32 + LoRA",
        f"\ngroup of {options.group_size}, {options.tokens} tokens a completion, {options.steps} steps timed, "
        f"layout {options.layout}",
    )
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model_folder(options.shape, Path(scratch) / "model")
        if options.ragged is not None:
            return _ragged(options, accelerator, folder, Path(scratch), counts[-1])
        base = _fit(options, accelerator, folder, Path(scratch), 1, options.prompts)
        for scaling in ("weak", "strong"):
            for devices in counts:
                prompts = options.prompts * devices if scaling == "weak" else options.prompts
                if devices == 1:
                    measured = base
                elif scaling == "strong" and prompts % devices and options.layout == "groups":
                    print(f"strong   {devices} device(s): left out, {prompts} whole groups are no equal shares of them")
                    continue
                else:
                    measured = _fit(options, accelerator, folder, Path(scratch), devices, prompts)
                rows.append(_row(scaling, measured, base))
                print(_line(rows[-1]), flush=True)
    write_csv(options.csv, rows, FIELDS)
    return 0


def _ragged(options: argparse.Namespace, accelerator: str, folder: Path, scratch: Path, devices: int) -> int:
    """The waiting of each layout, in one run whose steps take the layouts in turn."""
    layouts, prompts = list(options.layouts), options.prompts * devices
    extra = [
        "--trainer.callbacks+=grpo_lit.bench.ragged.RaggedLengths",
        f"--trainer.callbacks.mean_length={options.ragged}",
        f"--trainer.callbacks.layouts={json.dumps(layouts)}",
        f"--trainer.callbacks.by_prompt={json.dumps(options.by_prompt)}",
        f"--model.rollout.batch_size={options.rows_in_flight or 'null'}",
    ]
    steps = (options.steps + 1) * len(layouts)
    # an epoch is a step of each layout: after the first, which does not count, every prompt has been seen
    root = _run(options, accelerator, folder, scratch, devices, prompts, steps, extra, epoch=len(layouts))
    found = ragged.read_waits(root / "metrics.jsonl", layouts, options.by_prompt, warm_up=1)
    how = "the same for all of a prompt" if options.by_prompt else "each its own"
    print(
        f"{devices} device(s), lengths geometric with mean {options.ragged}, {how}, "
        f"{options.rows_in_flight or 'all'} rows of a rank in flight"
    )
    in_flight = options.rows_in_flight or options.prompts * options.group_size
    for one in found:
        settings = (prompts, options.group_size, in_flight, options.ragged, options.tokens, options.by_prompt)
        expected, _ = ragged.expected_wait(one.layout, devices, *settings)
        print(
            f"{one.layout:<7} {one.tokens:>8.0f} tokens, {one.step_s:>7.3f} s a step, {one.tokens_per_s:.0f} tokens/s, "
            f"rollout {one.rollout_s:.3f} s; longest wait after it {one.rollout_wait_s:.3f} s, after the passes "
            f"{one.train_wait_s:.3f} s: {one.waited_share:.1%} of the step; after the rollout "
            f"{one.rollout_wait_s / one.rollout_s:.1%} of it, {expected:.1%} by the lengths"
        )
    write_csv(options.csv, [one.row() for one in found], ragged.FIELDS)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = BenchParser(prog="grpo-lit bench scaling", description=(__doc__ or "").split("\n\n")[0])
    option, layouts = parser.option, ragged.LAYOUTS
    option("--devices", type=int, nargs="+", default=[1, 2], least=1)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1.5b")
    option("--prompts", type=int, default=4, least=1, help="prompts of a step on one device")
    option("--group_size", type=int, default=4, least=2, help="completions of each prompt")
    option("--tokens", type=int, default=768, least=1, help="tokens of each completion")
    option("--micro_batch_size", type=int, default=4, least=1)
    option("--layout", default="groups", among=layouts[:2], without="--ragged")
    option("--steps", type=int, default=10, least=1, help="steps timed (of each layout), after one that is not")
    option("--ragged", type=int, least=1, help="mean length of completions that end at random, cut at --tokens")
    option("--layouts", nargs="+", default=list(layouts), among=layouts, needs="--ragged")
    option("--by_prompt", action="store_true", needs="--ragged", help="all completions of a prompt end alike")
    option("--rows_in_flight", type=int, least=1, needs="--ragged", help="of a rank; all by default")
    parser.add_argument(
        "--cpu", action="store_true", help="processes on the CPU, in fp32: the same path, not its speed"
    )
    parser.add_argument("--csv", type=csv_argument, help="also write the table to this file")
    options = parser.parse_args(list(argv))
    check_lengths(options.shape, 8, options.tokens, "--tokens")  # prompts are numbers
    if options.ragged is not None and max(options.devices) < 2:
        raise UserError("--devices", max(options.devices), "2 or more with --ragged: one rank waits for nobody")
    return options


def _run(
    options: argparse.Namespace,
    accelerator: str,
    folder: Path,
    scratch: Path,
    devices: int,
    prompts: int,
    steps: int,
    extra: Sequence[str] = (),
    epoch: int = 1,
) -> Path:
    """One `grpo-lit fit` with epochs of so many steps; returns its folder."""
    root = scratch / f"{devices}x{prompts}"
    on_gpu = accelerator == "gpu"
    arguments = [
        f"--model.policy.path={folder}",
        "--model.policy.random_weights=true",
        f"--model.policy.dtype={'bf16' if on_gpu else 'fp32'}",
        f"--model.policy.quantization={'nf4' if on_gpu else 'null'}",
        f"--model.policy.gradient_checkpointing={str(on_gpu).lower()}",
        "--model.rewards=[grpo_lit.bench.shapes.noise]",
        f"--model.rollout.group_size={options.group_size}",
        f"--model.rollout.layout={options.layout}",
        f"--model.rollout.sampling.max_completion_length={options.tokens}",
        f"--model.micro_batch_size={options.micro_batch_size}",
        "--data=MathDataModule",
        "--data.dataset=arithmetic",
        f"--data.dataset_options={{terms: 1, high: {prompts * epoch - 1}}}",  # every step has as many prompts
        "--data.prompt_template={question}=",
        "--data.chat_template=false",
        f"--data.prompts_per_step={prompts}",
        "--data.val_prompts=0",
        f"--trainer.accelerator={accelerator}",
        f"--trainer.devices={devices}",
        *(["--trainer.strategy=ddp"] if devices > 1 else []),
        f"--trainer.max_steps={steps}",
        f"--trainer.default_root_dir={root}",
        "--trainer.logger=false",
        "--trainer.enable_progress_bar=false",
        f"--checkpoint.every_n_rollout_steps={steps}",
        *extra,
    ]
    done = subprocess.run([sys.executable, "-m", "grpo_lit", "fit", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemFault(f"{devices} device(s), {prompts} prompts: {' '.join(done.stderr.split())[-600:]}")
    return root


def _fit(
    options: argparse.Namespace, accelerator: str, folder: Path, scratch: Path, devices: int, prompts: int
) -> Measured:
    root = _run(options, accelerator, folder, scratch, devices, prompts, options.steps + 1)
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if "perf/step_s" in line][-options.steps :]

    def median(key: str) -> float:
        return float(statistics.median(line.get(key, float("nan")) for line in timed))

    return Measured(
        devices=devices,
        rows=prompts * options.group_size,
        step_s=median("perf/step_s"),
        tokens_per_s=median("perf/tokens_per_sec"),
        allreduce_s=median("perf/allreduce_s") if devices > 1 else 0.0,
        rank_wait_s=median("perf/rank_wait_rollout_s") if devices > 1 else 0.0,
    )


def _row(scaling: str, measured: Measured, base: Measured) -> dict[str, object]:
    return {
        "scaling": scaling,
        "devices": measured.devices,
        "rows": measured.rows,
        "step_s": round(measured.step_s, 3),
        "tokens_per_s": round(measured.tokens_per_s, 1),
        "ratio": round(measured.tokens_per_s / base.tokens_per_s, 3),
        "allreduce_share": round(measured.allreduce_s / measured.step_s, 5),
        "rank_wait_s": round(measured.rank_wait_s, 3),
    }


def _line(row: dict[str, object]) -> str:
    return (
        f"{row['scaling']:<7} {row['devices']:>2} device(s) {row['rows']:>4} rows: {row['step_s']:>8} s a step, "
        f"{row['tokens_per_s']:>9} tokens/s, {row['ratio']:>6} x one device, all-reduce "
        f"{float(str(row['allreduce_share'])):.2%}, waiting for the slowest rank {row['rank_wait_s']} s"
    )
