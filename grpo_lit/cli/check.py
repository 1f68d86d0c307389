"""``grpo-lit check``: would this configuration run here, and in how much memory? Nothing is trained.

One line per finding, then the peak of each phase by kind, and what would fit ``--vram 7GiB`` (by default what is free
on the GPU that is there). Only the model's configuration is read.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from grpo_lit.cli.parser import GRPOCLI
from grpo_lit.cli.run_folder import resolve_ckpt_path
from grpo_lit.cli.train import build, check_checkpoint, check_data
from grpo_lit.datamodules.findings import data_findings
from grpo_lit.errors import OneLineParser, SystemFault, UserError
from grpo_lit.memory.fit import (
    HEADROOM,
    largest_micro_batch,
    longest_completion,
    peak,
    plan_table,
    rows_in_flight,
)
from grpo_lit.memory.plan import plan_step, weight_ledger
from grpo_lit.memory.settings import formats_of, step_sizes_of
from grpo_lit.memory.sizes import ModelSizes
from grpo_lit.memory.units import format_bytes, parse_bytes
from grpo_lit.model_source import load_model_config, resolve_model_source
from grpo_lit.oom import memory_limit

_PACKAGES = ("torch", "lightning", "transformers", "bitsandbytes", "math-verify", "jsonargparse", "datasets")
_OPTIONAL = ("triton", "vllm", "peft")
_GIB = 2**30


class Finding(NamedTuple):
    """One line of the report, and those of a table under it."""

    ok: bool
    text: str
    table: tuple[str, ...] = ()


def main(arguments: Sequence[str]) -> int:
    """Print every finding; exit code 1 if any is bad."""
    findings = []
    for finding in check(arguments):
        print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.text}", flush=True)
        for line in finding.table:
            print(f"      {line}", flush=True)
        findings.append(finding)
    return 0 if all(finding.ok for finding in findings) else 1


def check(arguments: Sequence[str]) -> Iterator[Finding]:
    """Findings about packages, device, configuration, model, data, disk and checkpoint, in that order."""
    if arguments and arguments[0] in ("-h", "--help"):
        print("--vram SIZE   free memory to plan for, such as 7GiB; by default what is free on the GPU that is there\n")
        GRPOCLI(arguments, "check")
    budget, arguments = _take_vram(arguments)
    if budget is not None and not torch.cuda.is_available():
        arguments = [*arguments, "--trainer.accelerator=cpu"]  # a plan for another machine's GPU
    yield from _packages()
    yield _device()
    try:
        cli = build("check", arguments)
    except (UserError, SystemFault) as error:
        yield Finding(False, " ".join(str(error).split()))
        return
    root = Path(cli.trainer.default_root_dir)
    yield Finding(True, f"config resolved; run folder {root}")
    yield _guarded(lambda: _model(cli, budget))
    judged = any(name.startswith("math_accuracy") for name in cli.model.reward_names)
    readable = True
    for ok, text in data_findings(cli.datamodule, cli.model.encoder, cli.model.policy_config, judge_gold=judged):
        readable = readable and ok
        yield Finding(ok, text)
    if readable:
        yield _guarded(lambda: _settings(cli))
    yield from _memory(cli, budget)
    yield _disk(root)
    if cli.config["ckpt_path"]:
        yield _guarded(lambda: _checkpoint(cli, root))


def _settings(cli: GRPOCLI) -> str:
    """What ``fit`` looks at once the prompts are read."""
    check_data(cli)
    return f"rewards {', '.join(cli.model.reward_names)} have their columns; prompts and completions fit the model"


def _guarded(finding: Callable[[], str]) -> Finding:
    try:
        return Finding(True, finding())
    except (UserError, SystemFault) as error:
        return Finding(False, " ".join(str(error).split()))


def _packages() -> Iterator[Finding]:
    yield Finding(True, f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in (*_PACKAGES, *_OPTIONAL):
        try:
            yield Finding(True, f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            required = name in _PACKAGES
            yield Finding(not required, f"{name} is not installed" + ("" if required else " (optional)"))


def _device() -> Finding:
    if not torch.cuda.is_available():
        return Finding(True, "no CUDA GPU: training runs on the CPU")
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return Finding(
        True, f"{torch.cuda.device_count()} CUDA GPU(s), {name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    )


def _take_vram(arguments: Sequence[str]) -> tuple[int | None, list[str]]:
    """The budget in bytes, from ``--vram`` or free on the GPU that is there, and the arguments without it."""
    parser = OneLineParser(prog="grpo-lit check", add_help=False, allow_abbrev=False)
    parser.add_argument("--vram")
    given, rest = parser.parse_known_args(list(arguments))
    budget = None if given.vram is None else parse_bytes(given.vram)
    if budget is None and torch.cuda.is_available():
        budget = memory_limit(torch.device("cuda"))  # a desktop and other processes have some of the whole
    return budget, rest


def _sizes(cli: GRPOCLI) -> ModelSizes:
    return ModelSizes.of(load_model_config(resolve_model_source(cli.model.policy_config.path)))


def _model(cli: GRPOCLI, budget: int | None) -> str:
    spec = cli.model.policy_config.path
    sizes = _sizes(cli)
    size = sum(weight_ledger(sizes, formats_of(cli.model)).values())
    if budget is not None and size > budget:
        raise SystemFault(
            f"model.policy.path={spec!r}: weights of {format_bytes(size)}, room for {format_bytes(budget)}"
        )
    return f"model {spec}: {sizes.total / 1e6:.0f} M parameters, weights about {size / _GIB:.2f} GiB"


def _memory(cli: GRPOCLI, budget: int | None) -> Iterator[Finding]:
    """The peak of each phase on a CUDA device, and what would fit."""
    module, data = cli.model, cli.datamodule
    try:
        config = load_model_config(resolve_model_source(module.policy_config.path))
        sizes = ModelSizes.of(config)
    except (UserError, SystemFault):
        return  # said already
    prompt, known = _prompt_tokens(cli)
    step = step_sizes_of(module, prompt_tokens=prompt, prompts=data.prompts_per_step)
    formats = formats_of(module, on_cuda=True, model_type=str(config.model_type))
    if budget is not None:  # the graph engine lets rows wait that do not fit
        step = replace(step, rollout_rows=max(1, rows_in_flight(sizes, formats, step, budget)))
    plans = list(plan_step(sizes, formats, step).values())
    largest = peak(sizes, formats, step)
    about = (
        f"{step.rollout_rows} rows generated and {step.micro_rows} trained at once, "
        f"{step.prompt_tokens} + {step.completion_tokens} tokens" + ("" if known else " (prompts assumed so long)")
    )
    ok = budget is None or largest.total <= HEADROOM * budget
    text = f"memory on a GPU: peak {format_bytes(largest.total)} in {largest.phase}; {about}"
    if budget is not None:
        text += f"; {'within' if ok else 'over'} {format_bytes(budget)}, of which {HEADROOM:.0%} are planned with"
    yield Finding(ok, text, tuple(plan_table(plans)))
    if budget is None:
        return
    positions = getattr(config, "max_position_embeddings", None)
    positions = positions if isinstance(positions, int) else None
    longest = longest_completion(sizes, formats, step, budget, positions)
    single = replace(step, rollout_rows=1, prompts=1, micro_rows=1, score_rows=1)
    alone = longest_completion(sizes, formats, single, budget, positions)
    rows = data.prompts_per_step * module.rollout_config.group_size
    micro = largest_micro_batch(sizes, formats, step, budget, rows)
    yield Finding(
        longest > 0 and micro > 0,
        f"fits {format_bytes(budget)}: completions of at most {longest:,} tokens at these rows, or micro-batches of at "
        f"most {micro} rows at {step.completion_tokens:,} tokens; with one row at a time (model.rollout.batch_size=1, "
        f"model.micro_batch_size=1) completions of at most {alone:,} tokens",
    )


def _prompt_tokens(cli: GRPOCLI) -> tuple[int, bool]:
    """Tokens of the longest training prompt, and whether they were counted or assumed."""
    data = cli.datamodule
    try:
        data.connect(cli.model.encoder)
        return max(int(data.longest_prompts[0]), 1), True
    except (UserError, SystemFault):
        return int(data.max_prompt_length or 512), False


def _disk(root: Path) -> Finding:
    folder = root
    while not folder.exists():
        folder = folder.absolute().parent
    free = shutil.disk_usage(folder).free
    return Finding(free > _GIB, f"{free / _GIB:.1f} GiB free for the run folder")


def _checkpoint(cli: GRPOCLI, root: Path) -> str:
    path = resolve_ckpt_path(cli.config["ckpt_path"], root)
    assert path is not None
    check_checkpoint(path, cli.model)
    return f"checkpoint {path} fits this model"
