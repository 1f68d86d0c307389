"""Checkpoints: trainable weights and run state only, written atomically, loaded without pickle.

A checkpoint is a Lightning checkpoint whose ``state_dict`` lacks the frozen base, plus a ``grpo_lit`` entry::

    grpo_lit:
      version, model (what the base looks like), lora, seed
      rollout_step, guard, prompt_lengths (of several ranks), rng
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from transformers import PretrainedConfig

from grpo_lit import __version__
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.lora import LoRAConfig

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule

KEY = "grpo_lit"
_SHAPE_FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")


def model_fingerprint(config: PretrainedConfig) -> dict[str, Any]:
    """What identifies a base model well enough to refuse a checkpoint of another one."""
    return {name: getattr(config, name, None) for name in _SHAPE_FIELDS}


def lora_fingerprint(lora: LoRAConfig | None) -> dict[str, Any] | None:
    """Shape of the adapters, or None for full fine-tuning."""
    return None if lora is None else {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}


def optimizer_name(module: GRPOModule) -> str:
    """Class of the configured optimizer: one class can't go on from another's moments."""
    return type(module.optimizer_callable([torch.nn.Parameter(torch.zeros(1))])).__name__


def pack(module: GRPOModule, checkpoint: dict[str, Any]) -> None:
    """Add the ``grpo_lit`` entry to a checkpoint that Lightning is about to write."""
    checkpoint[KEY] = {
        "version": __version__,
        "model": model_fingerprint(module.live_policy.model.config),
        "lora": lora_fingerprint(module.lora_config),
        "optimizer": optimizer_name(module),
        "seed": module.seed,
        "rollout_step": module.rollout_step,
        "guard": module.guard.state_dict(),
        "prompt_lengths": module.prompt_lengths.state_dict(),
        "rng": rng_state(),
    }


def unpack(module: GRPOModule, checkpoint: dict[str, Any]) -> None:
    """Restore what `pack` stored.

    Raises:
        UserError: the checkpoint is of another model or of other adapters.
    """
    entry = checkpoint.get(KEY)
    check_compatible(entry, module.live_policy.model.config, module.lora_config, "the checkpoint")
    assert entry is not None
    module.rollout_step = entry["rollout_step"]
    module.guard.load_state_dict(entry["guard"])
    module.prompt_lengths.load_state_dict(entry.get("prompt_lengths", {}))  # not in checkpoints of earlier versions
    set_rng_state(entry["rng"])


def check_compatible(
    entry: dict[str, Any] | None, config: PretrainedConfig, lora: LoRAConfig | None, path: str
) -> None:
    """Compare a checkpoint's ``grpo_lit`` entry with the configured model.

    Raises:
        UserError: no such entry, or another model or adapter.
    """
    if not isinstance(entry, dict) or "rollout_step" not in entry:
        raise UserError("ckpt_path", path, "a checkpoint that grpo-lit fit wrote")
    for name, own, stored in (
        ("base model", model_fingerprint(config), entry["model"]),
        ("LoRA section", lora_fingerprint(lora), entry["lora"]),
    ):
        if own != stored:
            raise UserError("ckpt_path", path, f"a checkpoint with this {name}: {own}, not {stored}")


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load a checkpoint's tensors and plain values; nothing in the file is executed.

    Raises:
        UserError: missing, truncated, or not a checkpoint.
    """
    file = Path(path)
    if not file.is_file():
        raise UserError("ckpt_path", str(path), "an existing checkpoint, 'last' or 'best'")
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file, none of them the user's to read
        raise UserError("ckpt_path", str(path), "a complete checkpoint that grpo-lit fit wrote") from error
    if not isinstance(checkpoint, dict):
        raise UserError("ckpt_path", str(path), "a checkpoint that grpo-lit fit wrote")
    return checkpoint


def rng_state() -> dict[str, Any]:
    """State of every global random number generator, as tensors and plain values."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": (version, tuple(internal), gauss),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore what `rng_state` returned."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its final name and renames it: a reader sees the old one or the new one, whole."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write, flush to disk, rename.

        Raises:
            SystemFault: the disk is full or the folder can't be written; the file under `path` stays as it was.
        """
        del storage_options
        target = Path(path)
        tmp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with tmp.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            tmp.replace(target)
        except (OSError, RuntimeError) as error:
            good = [path for path in (target, target.with_name("last.ckpt")) if path.is_file()]
            kept = f"; {good[0]} keeps the last good checkpoint" if good else ""
            raise SystemFault(f"the checkpoint {target} can't be written ({_cause(error)}){kept}") from error
        finally:
            tmp.unlink(missing_ok=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load tensors and plain values only, whatever the caller asks."""
        del map_location, weights_only
        return read_checkpoint(path)


def _cause(error: BaseException) -> str:
    """The operating system's words: torch hides a failed write behind its own exception."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return " ".join(str(error).split())[:160]
