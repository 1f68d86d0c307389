"""A training step of this package for ``bench step``: the real module under the real trainer."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from grpo_lit.bench.shapes import write_model_folder
from grpo_lit.bench.step import note, report
from grpo_lit.datamodules.loader import PromptBatch
from grpo_lit.phases import Phase, PhaseListener

# (kind, parts of kernel names), the first that fits
_KINDS = (
    ("attention", ("flash", "fmha", "attention")),
    ("NF4 to 16 bits", ("dequantize", "kDequantize")),
    ("output layer's softmax", ("logit_rows",)),
    ("matrix products", ("gemm", "nvjet", "cutlass", "xmma", "splitK", "cublas")),
    ("norm, rotary, activation", ("rms_norm", "rotary", "gated_silu")),
)


def run_ours(options: argparse.Namespace, extra: list[str], scratch: Path) -> dict[str, Any]:
    """Median seconds by phase, peaks in MiB, and kernels by kind where asked for."""
    from grpo_lit.cli.train import build, check_data

    on_cuda = torch.cuda.is_available() and not options.cpu
    own = (
        [] if options.task else _shape_arguments(options, write_model_folder(options.shape, scratch / "model"), on_cuda)
    )
    cli = build("fit", [*_arguments(options, scratch / "run", on_cuda), *own, *extra])
    note("configuration resolved")
    profiled = options.steps if options.profile and on_cuda else None
    watch = _Watch(profiled, lambda: _result(options, scratch, on_cuda), endless=not options.task)
    cli.trainer.callbacks += [watch]  # type: ignore[attr-defined]
    if options.task:
        check_data(cli)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    else:
        cli.trainer.fit(cli.model, train_dataloaders=_Prompts(options.prompts, options.prompt_tokens))
    result = _result(options, scratch, on_cuda)
    assert result is not None
    return result | {"kernels": watch.kernels}


def _result(options: argparse.Namespace, scratch: Path, on_cuda: bool) -> dict[str, Any] | None:
    """Medians over the steps after the first that are through; None before the second."""
    metrics = [json.loads(line) for line in (scratch / "run" / "metrics.jsonl").read_text().splitlines()]
    metrics = [line for line in metrics if "train/loss" in line][1 : options.steps]
    if not metrics:
        return None
    result: dict[str, Any] = {
        f"{phase}_s": statistics.median(line.get(f"perf/{phase}_s", 0.0) for line in metrics)
        for phase in ("rollout", "reward", "score", "train", "optimizer", "step")
    }
    result["steps"] = len(metrics)
    result["completion_length"] = statistics.fmean(line["rollout/completion_length"] for line in metrics)
    if on_cuda:
        result["train_peak_mib"] = max(line.get("vram/peak_train_mib", 0.0) for line in metrics)
        peaks = [value for line in metrics for key, value in line.items() if key.startswith("vram/peak")]
        result["peak_mib"] = max(peaks)
        result["reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
    result["kernels"] = None
    return result


def _arguments(options: argparse.Namespace, root: Path, on_cuda: bool) -> list[str]:
    """What every run is given."""
    return [
        f"--config={options.task or '3060ti'}",
        f"--trainer.accelerator={'gpu' if on_cuda else 'cpu'}",
        "--trainer.devices=1",
        f"--trainer.default_root_dir={root}",
        f"--trainer.max_steps={options.steps + (1 if options.profile and on_cuda else 0)}",
        "--trainer.limit_val_batches=0",
        "--trainer.enable_progress_bar=false",
        "--trainer.logger=false",
        f"--model.rollout.engine={options.child}",
        "--model.ppo_passes=1",
    ]


def _shape_arguments(options: argparse.Namespace, folder: Path, on_cuda: bool) -> list[str]:
    """What a run on a model without data is given."""
    length = options.completion_tokens
    return [
        f"--model.policy.path={folder}",
        "--model.policy.random_weights=true",
        f"--model.policy.dtype={'bf16' if on_cuda else 'fp32'}",
        f"--model.rollout.group_size={options.rows}",
        f"--model.rollout.batch_size={options.prompts * options.rows}",
        f"--model.rollout.sampling.max_completion_length={length}",
        f"--model.validation.sampling.max_completion_length={length}",
        "--adaptive_micro_batch=false",  # --micro-batch rows in each, as for the other candidates
        "--model.loss.mask_truncated=false",
        f"--model.micro_batch_size={options.micro_batch}",
        "--model.rewards=[grpo_lit.bench.shapes.noise]",
        f"--data.prompts_per_step={options.prompts}",
        f"--data.max_prompt_length={max(512, options.prompt_tokens)}",
    ]


class _Prompts:
    """Batches of random prompts of one length, without end."""

    def __init__(self, count: int, tokens: int) -> None:
        self.count, self.tokens = count, tokens

    def __iter__(self) -> Iterator[PromptBatch]:
        generator = torch.Generator().manual_seed(0)
        for step in range(1_000_000):
            ids = torch.randint(3, 30, (self.count, self.tokens), generator=generator).tolist()
            indices = [step * self.count + i for i in range(self.count)]
            yield PromptBatch(["prompt"] * self.count, ids, indices, {"answer": ["0"] * self.count})


class _Watch(Callback, PhaseListener):
    """Tells of every phase, and profiles the training phase of one step.

    Args:
        profiled: number of the step to profile; None for none.
        result: the figures so far.
        endless: let no token end a completion.
    """

    def __init__(
        self, profiled: int | None, result: Callable[[], dict[str, Any] | None], *, endless: bool = True
    ) -> None:
        self.profiled, self.result, self.endless = profiled, result, endless
        self.kernels: dict[str, tuple[float, int]] = {}
        self._profile: Any = None

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        engine: Any = pl_module.engine
        if self.endless:
            engine.eos_token_ids = [-1]
        note("model loaded")

    @override
    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        if phase == "train" and self.profiled == pl_module.rollout_step:
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.__enter__()

    @override
    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, seconds: float) -> None:
        if phase == "train" and self._profile is not None:
            self._profile.__exit__(None, None, None)
            self.kernels = _by_kind(self._profile)
            self._profile = None
        note(f"step {pl_module.rollout_step}: {phase} {seconds:.3f} s")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (result := self.result()) is not None:
            report(result)


def _by_kind(profile: Any) -> dict[str, tuple[float, int]]:
    """(milliseconds, launches) of the device by kind of kernel, most first."""
    found: dict[str, tuple[float, int]] = {}
    for event in profile.key_averages():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        kind = next((k for k, parts in _KINDS if any(p.lower() in event.key.lower() for p in parts)), "everything else")
        before = found.get(kind, (0.0, 0))
        found[kind] = (before[0] + event.self_device_time_total / 1e3, before[1] + event.count)
    return dict(sorted(found.items(), key=lambda item: -item[1][0]))
