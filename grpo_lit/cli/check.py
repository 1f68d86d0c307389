"""``grpo-lit check``: would this configuration run here? One line per finding, nothing is trained."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from grpo_lit.cli.parser import GRPOCLI
from grpo_lit.cli.run_folder import resolve_ckpt_path
from grpo_lit.cli.train import build, check_checkpoint
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.model_source import load_model_config, resolve_model_source
from grpo_lit.policy import PolicyConfig

_PACKAGES = ("torch", "lightning", "transformers", "bitsandbytes", "math-verify", "jsonargparse", "datasets")
_OPTIONAL = ("triton", "vllm", "peft")
_NF4_BYTES_PER_WEIGHT = 0.5 + 4 / 64 / 4 + 0.01  # 4 bits, one 8-bit scale per 64 weights, second-level scales
_GIB = 2**30


class Finding(NamedTuple):
    """One line of the report."""

    ok: bool
    text: str


def main(arguments: Sequence[str]) -> int:
    """Print every finding; exit code 1 if any is bad."""
    findings = []
    for finding in check(arguments):
        print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.text}", flush=True)
        findings.append(finding)
    return 0 if all(finding.ok for finding in findings) else 1


def check(arguments: Sequence[str]) -> Iterator[Finding]:
    """Findings about packages, device, configuration, model, data, disk and checkpoint, in that order."""
    if arguments and arguments[0] in ("-h", "--help"):
        GRPOCLI(arguments, "check")
    yield from _packages()
    yield _device()
    try:
        cli = build("check", arguments)
    except (UserError, SystemFault) as error:
        yield Finding(False, " ".join(str(error).split()))
        return
    module, root = cli.model, Path(cli.trainer.default_root_dir)
    yield Finding(True, f"config resolved; run folder {root}")
    yield _guarded(lambda: _model(module.policy_config))
    yield _guarded(lambda: _data(cli))
    yield _disk(root)
    if cli.config["ckpt_path"]:
        yield _guarded(lambda: _checkpoint(cli, root))


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


def _model(config: PolicyConfig) -> str:
    source = resolve_model_source(config.path)
    total, in_linear = parameter_counts(config)
    size = base_weight_bytes(config, total, in_linear)
    if torch.cuda.is_available() and size > (capacity := torch.cuda.mem_get_info()[1]):
        raise SystemFault(
            f"model.policy.path={source.spec!r}: weights of {size / _GIB:.2f} GiB, a GPU of {capacity / _GIB:.2f}"
        )
    return f"model {source.spec}: {total / 1e6:.0f} M parameters, weights about {size / _GIB:.2f} GiB"


def parameter_counts(config: PolicyConfig) -> tuple[int, int]:
    """Parameters in all, and those in linear layers other than the output layer; no memory is allocated."""
    model_config = load_model_config(resolve_model_source(config.path))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config)
    head = model.get_output_embeddings()
    linear = sum(m.weight.numel() for m in model.modules() if type(m) is nn.Linear and m is not head)
    return sum(parameter.numel() for parameter in model.parameters()), linear


def base_weight_bytes(config: PolicyConfig, total: int, in_linear: int) -> float:
    """Bytes of the base weights in the configured formats."""
    width = 4 if config.dtype == "fp32" else 2
    if config.quantization != "nf4":
        return float(total * width)
    return (total - in_linear) * width + in_linear * _NF4_BYTES_PER_WEIGHT


def _data(cli: GRPOCLI) -> str:
    train, val = cli.datamodule.load()
    return f"data {cli.datamodule.dataset}: {len(train)} training prompts, {len(val)} held out"


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
