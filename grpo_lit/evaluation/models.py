"""The models of an evaluation: from an entry to loaded weights."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo_lit.adapter_config import ADAPTER_WEIGHTS, read_adapter_config
from grpo_lit.checkpoint import KEY, check_compatible, read_checkpoint
from grpo_lit.errors import SystemFault, UserError, typed_names
from grpo_lit.evaluation.config import ModelEntry
from grpo_lit.lora import LoRAConfig, load_adapter
from grpo_lit.model_source import load_model_config, resolve_model_source
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.prompts import PromptEncoder, load_tokenizer
from grpo_lit.skeleton import build_skeleton


@dataclass
class ResolvedModel:
    """Where base, adapter or checkpoint of a model lie, and in which number format it is loaded."""

    policy: PolicyConfig
    adapter: Path | None = None
    ckpt_path: Path | None = None
    selection_source: str | None = None
    """How the weights were chosen among others, in words."""
    lora: LoRAConfig | None = None
    """Adapters of the run, for its base: load_policy gives 4-bit weights only with adapters over them."""
    chat_template_kwargs: dict[str, Any] | None = None

    def fingerprint(self) -> dict[str, Any]:
        """What the answers depend on: the location of the base and a digest of what lies over it."""
        weights = self.ckpt_path
        if self.adapter is not None:
            weights = self.adapter / ADAPTER_WEIGHTS
        return {
            "base": self.policy.path,
            "dtype": self.policy.dtype,
            "quantization": self.policy.quantization,
            "weights": None if weights is None else str(weights),
            "weights_sha256": None if weights is None else hashlib.sha256(weights.read_bytes()).hexdigest()[:16],
            "selection_source": self.selection_source,
        }


def read_run_config(run: str, *, argument: str) -> dict[str, Any]:
    """The resolved configuration that a run wrote.

    Raises:
        UserError: not the folder of a run.
    """
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise UserError(argument, run, "the folder of a run of grpo-lit fit, with its config.yaml")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(argument, run, f"a run whose config.yaml is whole ({' '.join(str(error).split())})") from error
    if not isinstance(config, dict) or "model" not in config or "data" not in config:
        raise UserError(argument, run, "a run whose config.yaml has the sections model and data")
    return config


def best_checkpoint(run: Path, *, argument: str) -> Path:
    """The best checkpoint by the run's own validation, as its last checkpoint remembers it.

    Raises:
        UserError: the run has none.
    """
    last = run / "checkpoints" / "last.ckpt"
    if last.is_file():
        for state in read_checkpoint(last).get("callbacks", {}).values():
            name = (
                Path(state["best_model_path"]).name if isinstance(state, dict) and state.get("best_model_path") else ""
            )
            if name and (run / "checkpoints" / name).is_file():
                return run / "checkpoints" / name
    raise UserError(argument, str(run), "a run that kept its best checkpoint (data.val_prompts above 0)")


def resolve_model(label: str, entry: ModelEntry, device: str) -> ResolvedModel:
    """Find everything an entry names, without loading a weight.

    Raises:
        UserError: it names too little or too much, or something that is not there.
    """
    where = f"models.{label}"
    given = [name for name in ("path", "adapter", "ckpt_path", "run") if getattr(entry, name) is not None]
    if not given or ("run" in given and len(given) > 1) or {"adapter", "ckpt_path"} <= set(given):
        raise UserError(where, given, "path, adapter (with or without path), ckpt_path with path, or run")
    if entry.run is not None:
        return _of_run(where, entry, Path(entry.run))
    resolved = ResolvedModel(_policy_config(entry, entry.path, device))
    if entry.adapter is not None:
        config = read_adapter_config(entry.adapter, argument=f"{where}.adapter")
        resolved.adapter = Path(entry.adapter)
        resolved.policy.path = entry.path or config["base_model_name_or_path"]
    if entry.ckpt_path is not None:
        if entry.path is None:
            raise UserError(f"{where}.path", None, "the base model of the checkpoint")
        resolved.ckpt_path = Path(entry.ckpt_path)
    return checked(where, resolved)


def _policy_config(entry: ModelEntry, path: str | None, device: str) -> PolicyConfig:
    dtype = entry.dtype or ("fp32" if device == "cpu" else "bf16")
    return PolicyConfig(path or "", dtype=dtype, quantization="nf4" if entry.quantization == "nf4" else None)


def _of_run(where: str, entry: ModelEntry, run: Path) -> ResolvedModel:
    config = read_run_config(str(run), argument=f"{where}.run")
    backward = {"gradient_checkpointing": False, "activation_offload": False}  # there is none
    policy = PolicyConfig(**{**config["model"]["policy"], **backward})
    policy.dtype = entry.dtype or policy.dtype
    if entry.quantization is not None:
        policy.quantization = "nf4" if entry.quantization == "nf4" else None
    data = config["data"].get("init_args", config["data"])
    resolved = ResolvedModel(policy, chat_template_kwargs=data.get("chat_template_kwargs"))
    if config["model"].get("lora"):
        resolved.lora = LoRAConfig(**config["model"]["lora"])
    if entry.which == "final" and (run / "adapter").is_dir():
        resolved.adapter = run / "adapter"
    elif entry.which == "final" and (run / "model").is_dir():
        resolved.policy.path, resolved.policy.tokenizer = str(run / "model"), None
    elif entry.which in ("final", "last"):
        resolved.ckpt_path = run / "checkpoints" / "last.ckpt"
    elif entry.which == "best":
        resolved.ckpt_path = best_checkpoint(run, argument=f"{where}.run")
        resolved.selection_source = "in-training validation"
    return checked(where, resolved)


def checked(where: str, resolved: ResolvedModel) -> ResolvedModel:
    """See that base, adapter and checkpoint are there and belong together; loads no weight of the base."""
    if not resolved.policy.path:
        raise UserError(f"{where}.path", None, "the base model: the adapter names none")
    skeleton = build_skeleton(resolved.policy, argument=f"{where}.path")
    if resolved.adapter is not None and not (resolved.adapter / ADAPTER_WEIGHTS).is_file():
        raise UserError(f"{where}.adapter", str(resolved.adapter), f"a PEFT folder with {ADAPTER_WEIGHTS}")
    if resolved.adapter is not None:
        load_adapter(skeleton, resolved.adapter, argument=f"{where}.adapter")
    if resolved.ckpt_path is not None:
        with typed_names({"ckpt_path": f"{where}.ckpt_path"}):
            entry = read_checkpoint(resolved.ckpt_path).get(KEY)
            lora = LoRAConfig(**entry["lora"]) if entry and entry.get("lora") else None
            check_compatible(entry, skeleton.config, lora, str(resolved.ckpt_path))
    return resolved


def encoder_of(resolved: ResolvedModel) -> PromptEncoder:
    """How prompts become tokens; loads no weight."""
    source = resolve_model_source(resolved.policy.tokenizer or resolved.policy.path)
    return PromptEncoder(load_tokenizer(source), resolved.chat_template_kwargs)


def positions_of(resolved: ResolvedModel) -> int | None:
    """Tokens that the model takes, prompt and answer together; None where it says nothing of it."""
    config = load_model_config(resolve_model_source(resolved.policy.path))
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def load_model(resolved: ResolvedModel, device: str) -> tuple[Policy, PromptEncoder]:
    """The policy, adapter or checkpoint in it, and its encoder.

    Raises:
        UserError: an adapter or a checkpoint that does not fit the base.
    """
    encoder = encoder_of(resolved)
    lora: LoRAConfig | None = None
    state: dict[str, torch.Tensor] | None = None
    if resolved.adapter is not None:
        config = read_adapter_config(resolved.adapter, argument="adapter")
        lora = LoRAConfig(config["r"], config["lora_alpha"], list(config["target_modules"]))
    elif resolved.ckpt_path is not None:
        checkpoint = read_checkpoint(resolved.ckpt_path)
        entry = checkpoint.get(KEY) or {}
        lora = LoRAConfig(**entry["lora"]) if entry.get("lora") else None
        state = {name.removeprefix("policy."): value for name, value in checkpoint["state_dict"].items()}
    elif resolved.policy.quantization:
        lora = resolved.lora or LoRAConfig(rank=1)  # B is zero, so this is the base
    policy = load_policy(resolved.policy, lora, device=device)
    if resolved.adapter is not None:
        load_adapter(policy.model, resolved.adapter)
    if state is not None:
        policy.load_state_dict(state, strict=False)
    policy.requires_grad_(False)
    return policy, encoder


def pick_device(device: str | None) -> str:
    """The device asked for, or cuda where there is one.

    Raises:
        UserError: not the name of a device.
        SystemFault: CUDA, on a machine without it.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise UserError("device", device, "cpu or cuda")
    if device != "cpu" and not torch.cuda.is_available():
        raise SystemFault(f"device={device!r}: no CUDA GPU on this machine; use cpu")
    return device
