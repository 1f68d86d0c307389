"""``grpo-lit bench memory``: the peak of every phase of a step, predicted and measured, under a limit of memory.

It runs the training of a configuration as `grpo-lit fit` does, on prompts of one length and completions forced to
their full length, with the process held to ``--cap`` of the device's memory as on a smaller card.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from typing_extensions import override

from grpo_lit.bench.options import BenchParser
from grpo_lit.bench.shapes import SHAPES, check_lengths, write_model_folder
from grpo_lit.bench.tables import write_csv
from grpo_lit.callbacks.vram_profiler import PhaseMemory, VRAMProfiler
from grpo_lit.datamodules.loader import PromptBatch
from grpo_lit.errors import UserError
from grpo_lit.memory.allocator import expand_segments
from grpo_lit.memory.fit import largest_micro_batch
from grpo_lit.memory.plan import GIB, MIB
from grpo_lit.memory.settings import formats_of, step_sizes_of
from grpo_lit.memory.sizes import ModelSizes
from grpo_lit.memory.units import parse_bytes
from grpo_lit.model_source import load_model_config, resolve_model_source
from grpo_lit.module import GRPOModule
from grpo_lit.paths import csv_argument
from grpo_lit.rollout import Rollout, SamplingConfig
from grpo_lit.rollout.base import left_pad

FIELDS = ("case", "phase", "predicted_mib", "allocated_mib", "reserved_mib", "ratio", "seconds")
_CAP = "7.4GiB"  # a card of 8 GiB without a desktop, less the CUDA context
_PHASES = ("load", "rollout", "score", "train", "optimizer")


def main(argv: Sequence[str]) -> int:
    """Measure each case, print its table, write the CSV."""
    options, overrides = _parse(argv)
    on_cuda = _on_cuda(options)
    if on_cuda:
        limit(options.cap)
    print(_headline(options, on_cuda), flush=True)
    rows: list[dict[str, Any]] = []
    failed = False
    for case in options.case or ["base"]:
        name, _, extra = case.partition(":")
        own = [part for part in extra.split() if part]
        try:
            rows += _measure(name, options, [*overrides, *own], on_cuda)
        except torch.OutOfMemoryError as error:
            failed = True
            print(f"{name}: out of memory ({' '.join(str(error).split())[:200]})", flush=True)
        gc.collect()
        if on_cuda:
            torch.cuda.empty_cache()
    write_csv(options.csv, rows, FIELDS)
    return int(failed)


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = BenchParser(
        prog="grpo-lit bench memory",
        description=__doc__,
        epilog="Further arguments are those of grpo-lit fit, such as --model.policy.activation_offload true.",
    )
    parser.add_argument("--config", default="3060ti", help="configuration to run; 3060ti by default")
    parser.add_argument("--shape", default="1.5b", choices=sorted(SHAPES), help="model of this shape, random weights")
    parser.add_argument("--cap", metavar="SIZE", help=f"memory of this process on a GPU; {_CAP} by default")
    parser.option("--rows", type=int, default=4, least=2, help="completions of the one prompt of a step")
    parser.option("--prompt-tokens", type=int, default=128, least=1)
    parser.option("--completion-tokens", type=int, default=768, least=1, help="every completion has this length")
    parser.option("--optimizer-steps", type=int, default=5, least=1)
    parser.add_argument(
        "--synthetic", action="store_true", help="random tokens instead of sampled ones: measures all but the rollout"
    )
    parser.add_argument(
        "--case",
        action="append",
        help="NAME:ARGUMENTS, may be repeated: one run each, with further arguments of grpo-lit fit",
    )
    parser.add_argument("--csv", type=csv_argument, help="file for the rows of the tables")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, where only the host's memory is measured")
    options, rest = parser.parse_known_args(list(argv))
    check_lengths(options.shape, options.prompt_tokens, options.completion_tokens, "--completion-tokens")
    cap = parse_bytes(options.cap or _CAP, argument="--cap")
    if options.cap is not None and not _on_cuda(options):
        raise UserError("--cap", options.cap, "only where a CUDA GPU is measured")
    options.cap = cap
    return options, rest


def _on_cuda(options: argparse.Namespace) -> bool:
    return torch.cuda.is_available() and not options.cpu


def limit(cap: int) -> None:
    """Hold this process to `cap` bytes of the first GPU.

    Raises:
        UserError: the GPU has less.
    """
    total = torch.cuda.get_device_properties(0).total_memory
    if cap > total:
        raise UserError("--cap", f"{cap / GIB:.2f}GiB", f"at most the GPU's {total / GIB:.2f}GiB")
    torch.cuda.set_per_process_memory_fraction(cap / total, 0)
    expand_segments()


def _headline(options: argparse.Namespace, on_cuda: bool) -> str:
    name = torch.cuda.get_device_name(0) if on_cuda else "CPU"
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch", "transformers", "bitsandbytes"))
    cap = f", limited to {options.cap / GIB:.2f} GiB" if on_cuda else ""
    return (
        f"{name}{cap}; {versions}; {date.today()}\n{options.config}, shape {options.shape}: {options.rows} completions "
        f"of {options.prompt_tokens} + {options.completion_tokens} tokens"
        + (", random tokens in place of a rollout" if options.synthetic else "")
    )


def _measure(name: str, options: argparse.Namespace, extra: list[str], on_cuda: bool) -> list[dict[str, Any]]:
    from grpo_lit.cli.train import build

    profiler = VRAMProfiler()
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_model_folder(options.shape, Path(scratch) / "model")
        # The profiler begins before the model is built, so that loading is part of what it sees.
        cli = build("fit", _arguments(options, folder, Path(scratch) / "run", on_cuda) + extra)
        cli.trainer.callbacks += [profiler, _FullLength(options.synthetic)]  # type: ignore[attr-defined]
        if on_cuda:
            _fit_micro_batch(cli.model, options)
        start = time.perf_counter()
        cli.trainer.fit(cli.model, train_dataloaders=_Prompts(options.prompt_tokens))
        seconds = time.perf_counter() - start
        steps = _lines(Path(scratch) / "run" / "memory.jsonl")
    load = [] if profiler.load is None else [profiler.load.to_json()]
    found = _largest([*load, *(phase for line in steps for phase in line["phases"])])
    if options.synthetic:
        found.pop("rollout", None)
    rows = [_row(name, found[phase]) for phase in _PHASES if phase in found]
    done = cli.trainer.global_step
    print(f"\n{name}: {done} optimizer steps in {seconds:.1f} s, loading included" + (f"; {extra}" if extra else ""))
    print(table(rows), flush=True)
    for phase in ("train", "rollout"):
        if phase in found:
            print(f"{phase}: " + kinds_line(found[phase]["kinds"]), flush=True)
    if cli.model.policy is not None:
        cli.model.engine.close()
        cli.model.policy = None
        del cli.model.engine  # it holds the policy too
    return rows


def _fit_micro_batch(module: GRPOModule, options: argparse.Namespace) -> None:
    """Lower the micro-batch to the rows that the plan fits into the limit, where they are fewer."""
    config = load_model_config(resolve_model_source(module.policy_config.path))
    formats = formats_of(module, model_type=str(config.model_type))
    step = step_sizes_of(module, prompt_tokens=options.prompt_tokens, prompts=1)
    rows = largest_micro_batch(ModelSizes.of(config), formats, step, options.cap, step.micro_rows)
    if 0 < rows < step.micro_rows:
        print(f"micro-batches of {rows} rows: {step.micro_rows} are planned to exceed the limit", flush=True)
        module.micro_batch_size = rows


def _arguments(options: argparse.Namespace, folder: Path, root: Path, on_cuda: bool) -> list[str]:
    return [
        f"--config={options.config}",
        f"--model.policy.path={folder}",
        "--model.policy.random_weights=true",
        f"--trainer.accelerator={'gpu' if on_cuda else 'cpu'}",
        "--trainer.devices=1",
        f"--trainer.default_root_dir={root}",
        f"--trainer.max_steps={options.optimizer_steps}",
        "--trainer.limit_val_batches=0",
        "--trainer.enable_progress_bar=false",
        "--trainer.logger=false",
        "--profiler.memory=false",  # the bench has its own
        "--oom_replay=false",
        "--adaptive_micro_batch=false",
        f"--model.rollout.group_size={options.rows}",
        f"--model.rollout.sampling.max_completion_length={options.completion_tokens}",
        f"--model.validation.sampling.max_completion_length={options.completion_tokens}",
        "--model.loss.mask_truncated=false",
        "--model.rewards=[grpo_lit.bench.memory.alternating]",
        "--data.prompts_per_step=1",
    ]


class _Prompts:
    """Batches of one random prompt of a fixed length, without end."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __iter__(self) -> Iterator[PromptBatch]:
        generator = torch.Generator().manual_seed(0)
        for index in range(1_000_000):
            ids = torch.randint(3, 30, (self.tokens,), generator=generator).tolist()
            yield PromptBatch(["prompt"], [ids], [index], {"answer": ["0"]})


class _FullLength(Callback):
    """No token ends a completion; with ``synthetic`` no token is sampled either."""

    def __init__(self, synthetic: bool) -> None:
        self.synthetic = synthetic

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine: Any = pl_module.engine
        if self.synthetic:
            policy: Any = pl_module.policy
            pl_module.engine = SyntheticEngine(policy.device, int(policy.model.config.vocab_size))  # type: ignore[assignment]
        else:
            engine.eos_token_ids = [-1]


class SyntheticEngine:
    """A rollout engine that makes up completions of full length: the passes do not care where tokens come from."""

    name = "synthetic"

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self.device, self.vocab_size = device, vocab_size
        self.batch_size: int | None = None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        keys: NDArray[np.uint64],
        sampling: SamplingConfig,
        progress: Callable[[int, int], None] | None = None,
    ) -> Rollout:
        """Random tokens; see `RolloutEngine.generate`."""
        del progress
        groups = [group for group, count in enumerate(counts) for _ in range(count)]
        shape = (len(groups), sampling.max_completion_length)
        generator = torch.Generator().manual_seed(int(keys[0, 1] % 2**31))
        ids = torch.randint(0, self.vocab_size, shape, generator=generator)
        prompt_ids, prompt_mask = left_pad([prompts[group] for group in groups], 0)
        parts = [prompt_ids, prompt_mask, ids, torch.ones(shape, dtype=torch.bool), torch.tensor(groups)]
        parts += [torch.full(shape, -12.0), torch.ones(len(groups), dtype=torch.bool)]
        return Rollout(*(part.to(self.device) for part in parts))

    def release(self) -> None:
        """Nothing is held."""

    def weights_changed(self) -> None:
        """Nothing to follow."""

    def close(self) -> None:
        """Nothing to close."""


def alternating(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that is 1 for every other completion, whatever it says."""
    del prompts, columns
    return [float(index % 2) for index in range(len(completions))]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def _largest(phases: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The record with the largest peak of each phase."""
    found: dict[str, dict[str, Any]] = {}
    for record in phases:
        before = found.get(record["phase"])
        if before is None or record["peak_allocated"] > before["peak_allocated"]:
            found[record["phase"]] = record
    return found


def _row(case: str, record: dict[str, Any]) -> dict[str, Any]:
    predicted, measured = record["predicted"], record["peak_allocated"]
    return {
        "case": case,
        "phase": record["phase"],
        "predicted_mib": "" if predicted is None else round(predicted / MIB, 1),
        "allocated_mib": round(measured / MIB, 1),
        "reserved_mib": round(record["peak_reserved"] / MIB, 1),
        "ratio": "" if predicted is None else round(predicted / measured, 3),
        "seconds": round(record["seconds"], 2),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of one case as text."""
    names = ("phase", "predicted", "allocated", "reserved", "predicted/allocated", "seconds")
    lines = ["{:<10} {:>10} {:>10} {:>10} {:>20} {:>8}".format(*names)]
    for row in rows:
        cells = [row[name] for name in FIELDS[1:]]
        lines.append("{:<10} {:>10} {:>10} {:>10} {:>20} {:>8}".format(*cells))
    return "\n".join(lines)


def kinds_line(kinds: dict[str, int]) -> str:
    """A ledger on one line, in MiB."""
    return ", ".join(f"{kind} {size / MIB:.0f}" for kind, size in kinds.items() if size >= MIB / 2)


__all__ = ["PhaseMemory", "SyntheticEngine", "alternating", "limit", "main", "table"]
