r"""Trained weights for other tools: a PEFT folder, or one merged model in safetensors.

Merging happens on the CPU in float32, :math:`W + \frac{\alpha}{r} B A`, and is rounded once to the dtype of the file.
It is never done into 4-bit weights: rounding the sum back to NF4 would lose most of the update
(https://github.com/huggingface/peft/issues/2501). For adapters trained over an NF4 base there are two choices:
the original weights, or the dequantized ones that the adapters saw in training. `measure` says what each costs.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from grpo_lit.errors import UserError
from grpo_lit.evaluation.models import ResolvedModel, load_model
from grpo_lit.files import write_whole, writing
from grpo_lit.lora import lora_layers, merge_lora, save_adapter
from grpo_lit.model_source import load_model_config
from grpo_lit.policy import Policy

Base = Literal["original", "dequantized"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DROPOUT_SUFFIXES = ("dropout", "_pdrop")
PROBE_TEXTS = (
    "What is 3+5? Answer with just the number.",
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "The answer is \\boxed{72}, because 48 + 24 = 72.",
    "def add(a, b):\n    return a + b\n",
)


@dataclass(frozen=True)
class Difference:
    """Log-probs of two models on the same tokens."""

    mean: float
    """Mean of the absolute difference, nats."""
    largest: float
    """Largest absolute difference, nats."""
    num_tokens: int

    def __str__(self) -> str:
        return f"mean {self.mean:.2e}, largest {self.largest:.2e} nats over {self.num_tokens} tokens"


def export_adapter(resolved: ResolvedModel, folder: Path) -> None:
    """Write adapter and tokenizer as a folder for ``peft.PeftModel.from_pretrained``.

    Raises:
        UserError: the model has no adapter.
    """
    policy, encoder = load_model(_unquantized(resolved), "cpu")
    if not any(True for _ in lora_layers(policy.model)):
        raise UserError("to", "adapter", "merged: this model was trained in all its weights")
    save_adapter(policy.model, folder, base_model=policy.source.spec)
    encoder.tokenizer.save_pretrained(folder)


def export_merged(resolved: ResolvedModel, folder: Path, *, base: Base, dtype: str) -> dict[str, Difference]:
    """Write one model with the adapter in its weights, and measure what merging and rounding changed.

    Args:
        resolved: base and adapter or checkpoint.
        folder: where the model goes.
        base: which weights the update is added to.
        dtype: of the file.

    Returns:
        Differences of log-probs, by what the file is compared with.

    Raises:
        UserError: the base is not quantized, and its dequantized weights were asked for.
    """
    quantized = resolved.policy.quantization is not None
    if base == "dequantized" and not quantized:
        raise UserError("base", base, "original: this base was not quantized")
    plain = _unquantized(resolved)
    loaded, trained = None, None
    if quantized or resolved.policy.head_quantization is not None:
        # First and alone: two copies of a model in float32 are more than many computers hold.
        in_4_bits = replace(resolved, policy=replace(resolved.policy, dtype="fp32"))
        trained_policy, encoder = load_model(in_4_bits, "cpu")
        if base == "dequantized":
            loaded = load_model(plain, "cpu")
            copy_dequantized(trained_policy.model, loaded[0].model)
        trained = probe(trained_policy.model, encoder.tokenizer)
        del trained_policy
    policy, encoder = loaded or load_model(plain, "cpu")
    over_same = probe(policy.model, encoder.tokenizer)
    merge_lora(policy.model)
    policy.model.to(DTYPES[dtype])  # type: ignore[arg-type]
    save_model(policy, encoder.tokenizer, folder)
    del loaded, policy
    written = probe(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), encoder.tokenizer)
    found = {f"adapter over the {base} base": measure(over_same, written)}
    if trained is not None:
        found["model as trained, over the quantized base"] = measure(trained, written)
    return found


def _unquantized(resolved: ResolvedModel) -> ResolvedModel:
    floats: dict[str, Any] = {"quantization": None, "head_quantization": None, "dtype": "fp32"}
    return replace(resolved, policy=replace(resolved.policy, **floats, fused_layers=False))


def copy_dequantized(quantized: nn.Module, plain: nn.Module) -> int:
    """Give the linear layers of a floating-point model the values that a 4-bit copy of it computes with.

    Returns:
        The number of layers copied.
    """
    import bitsandbytes as bnb

    count = 0
    with torch.no_grad():
        for name, layer in quantized.named_modules():
            if isinstance(layer, bnb.nn.Linear4bit):
                packed: Any = layer.weight
                weight = bnb.functional.dequantize_4bit(packed.data, packed.quant_state)
                target: Any = plain.get_submodule(name)
                target.weight.copy_(weight.reshape(target.weight.shape).to(target.weight.dtype))
                count += 1
    return count


def save_model(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer as transformers loads them, end tokens and dropout rates as they came.

    A policy blanks the generation config and switches dropout off; neither belongs into what others load.
    """
    model: PreTrainedModel = policy.model
    original = load_model_config(policy.source)
    config, generation = copy.deepcopy(model.config), model.generation_config
    for name in vars(original):
        if name.endswith(_DROPOUT_SUFFIXES):
            setattr(config, name, getattr(original, name))
    kept = model.config
    try:
        model.config = config
        model.generation_config = GenerationConfig(
            eos_token_id=policy.eos_token_ids or tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
        with writing(folder):
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    finally:
        model.config, model.generation_config = kept, generation


def probe(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = PROBE_TEXTS) -> Tensor:
    """Log-probs (tokens,) float32 of fixed texts, each token given those before it."""
    values = []
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for text in texts:
            ids = torch.tensor([tokenizer(text).input_ids])
            if ids.shape[1] < 2:
                continue
            logprobs = model(ids[:, :-1]).logits.float().log_softmax(dim=-1)
            values.append(logprobs.gather(-1, ids[:, 1:, None]).flatten())
    model.train(was_training)
    return torch.cat(values)


def measure(first: Tensor, second: Tensor) -> Difference:
    """How far two vectors of log-probs lie apart."""
    apart = (first - second).abs()
    return Difference(float(apart.mean()), float(apart.max()), len(apart))


def write_differences(folder: Path, found: dict[str, Difference]) -> None:
    """``export.json``: what was measured."""
    record = {name: {"mean": d.mean, "largest": d.largest, "tokens": d.num_tokens} for name, d in found.items()}
    write_whole(folder / "export.json", json.dumps({"logprob_difference": record}, indent=1) + "\n")
