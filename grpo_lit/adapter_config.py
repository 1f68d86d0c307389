"""What the configuration of a PEFT LoRA folder says, and which adapters are plain LoRA over an unchanged base."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from grpo_lit.errors import UserError

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"

# What PEFT can put into an adapter besides A and B at one rank and scale.
_BEYOND_LORA = (
    *("use_dora", "bias", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern", "layer_replication"),
    *("trainable_token_indices", "target_parameters", "layers_to_transform", "alora_invocation_tokens", "use_qalora"),
)
_BASE_KEPT = (None, True, False, "gaussian", "orthogonal")
"""``init_lora_weights`` that leave the base as it was; PiSSA, OLoRA and their kin take their start out of it."""


def read_adapter_config(folder: str | Path, *, argument: str) -> dict[str, Any]:
    """Read ``adapter_config.json`` of a PEFT LoRA folder.

    Returns:
        Its keys; ``target_modules`` as the last parts of names, of the layers that have weights where there are any;
        ``lora_alpha`` so that alpha / r is the scale, which
        rank-stabilized adapters (2312.03732) have as alpha / sqrt(r).

    Raises:
        UserError: the folder holds no LoRA adapter, or one with parts that plain LoRA does not have.
    """
    path = Path(folder) / ADAPTER_CONFIG
    if not path.is_file():
        raise UserError(argument, str(folder), f"a PEFT adapter folder with {ADAPTER_CONFIG}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(argument, str(folder), f"an adapter whose {ADAPTER_CONFIG} can be read") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UserError(argument, str(folder), "an adapter whose peft_type is LORA")
    if missing := [key for key in ("r", "lora_alpha", "target_modules") if key not in config]:
        raise UserError(argument, str(folder), f"an adapter whose {ADAPTER_CONFIG} has {', '.join(missing)}")
    for key in ("r", "lora_alpha"):
        if not isinstance(config[key], (int, float)) or not 0 < config[key] < float("inf"):
            raise UserError(argument, str(folder), f"an adapter whose {ADAPTER_CONFIG} has a number above 0 as {key}")
    if beyond := [key for key in _BEYOND_LORA if config.get(key) not in (None, False, "none", [], {})]:
        accepted = (
            f"an adapter of plain LoRA, without {beyond[0]}: merge it into its base with PEFT and give that model"
        )
        raise UserError(argument, str(folder), accepted)
    if config.get("init_lora_weights") not in _BASE_KEPT:
        accepted = f"an adapter over an unchanged base, not one of {config['init_lora_weights']}: merge it with PEFT"
        raise UserError(argument, str(folder), accepted)
    targets = _layers_with_weights(Path(folder) / ADAPTER_WEIGHTS) or config["target_modules"]
    if not isinstance(targets, list):
        raise UserError(argument, str(folder), "an adapter whose target_modules are listed by name")
    config["target_modules"] = sorted({str(name).rpartition(".")[2] for name in targets})
    if config.get("use_rslora"):
        config["lora_alpha"] *= math.sqrt(config["r"])
    return config


def _layers_with_weights(file: Path) -> list[str]:
    """Names of the layers that a file has adapters for, whatever expression chose them; none of a damaged file."""
    try:
        with safe_open(file, "pt") as tensors:
            return [key.removesuffix(".lora_A.weight") for key in tensors.keys() if key.endswith(".lora_A.weight")]  # noqa: SIM118
    except (OSError, SafetensorError):
        return []
