r"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685, equation 3) over frozen linear layers::

                 x (..., in)
        ┌─────────────┴─────────────┐
        │ frozen                    │ trained
   W (out, in)                 A (r, in)      random, kaiming-uniform as in nn.Linear
   fp32 | bf16 | NF4                │
        │                      B (out, r)     zeros, so that the first forward is the base's
        │                           │
        │                      x alpha / r
        └─────────────┬─────────────┘
                 y = W x + (alpha / r) B A x

On CUDA, from 65 rows on, base product and update are one autograd node (`grpo_lit.kernels.lora_linear`), which
computes the update in the dtype of x with float32 accumulation: over a 16-bit base, float32 adapters round there as
everything around them does. On the CPU and for a few rows the layer's own forward runs, and the update in the
adapters' dtype.

The base layer may be ``nn.Linear``, bitsandbytes' ``Linear4bit`` or GPT-2's ``Conv1D`` (whose weight
is stored (in, out)). `save_adapter` and `load_adapter` use PEFT's folder layout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grpo_lit.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_adapter_config
from grpo_lit.errors import UserError
from grpo_lit.files import write_whole, writing
from grpo_lit.kernels.lora_linear import lora_linear
from grpo_lit.kernels.nf4 import Nf4Weight

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
_PEFT_PREFIX = "base_model.model."
_FEW_ROWS = 64  # up to here, decoding: bitsandbytes' own products are as fast


@dataclass
class LoRAConfig:
    """Which projections get adapters, and how large they are."""

    rank: int = 16
    """Rank r of the update B A."""
    alpha: float = 32.0
    """Scale: the update is multiplied by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: list(DEFAULT_TARGETS))
    """Names of the projections to adapt, matched against the last part of a module's name. GPT-2's fused
    query-key-value projection is c_attn, its output projections are c_proj."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of A and B. fp32 keeps small updates that bf16 would round away."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise UserError("model.lora.rank", self.rank, "a whole number of at least 1")
        if not 0 < self.alpha < float("inf"):
            raise UserError("model.lora.alpha", self.alpha, "a number above 0")
        if not self.targets:
            raise UserError("model.lora.targets", self.targets, "at least one projection name, such as q_proj")


class LoRALinear(nn.Module):
    """A frozen linear layer plus a trainable low-rank update.

    Args:
        base_layer: ``nn.Linear``, a bitsandbytes 4-bit linear, or ``Conv1D``; its parameters are frozen here.
        rank: r.
        alpha: the update is scaled by alpha / rank.
        dtype: dtype of A (rank, in) and B (out, rank).
    """

    def __init__(self, base_layer: nn.Module, rank: int, alpha: float, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.in_features, self.out_features = linear_shape(base_layer)
        self.rank = rank
        self.alpha = alpha
        self.scaling = alpha / rank
        self.enabled = True
        device = next(base_layer.parameters()).device
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, dtype=dtype, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self._packed: tuple[int, Nf4Weight] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out) in the dtype of the base layer's output."""
        if self.enabled and x.is_cuda and x.numel() > _FEW_ROWS * self.in_features:
            weight = self.fused_weight(x.dtype)
            if weight is not None:
                bias: Any = self.base_layer.bias
                return lora_linear(x, weight, self.lora_A, self.lora_B, self.scaling, bias=bias)
        y: Tensor = self.base_layer(x)
        if not self.enabled:
            return y
        low_rank = nn.functional.linear(x.to(self.lora_A.dtype), self.lora_A)
        update = nn.functional.linear(low_rank, self.lora_B)
        return y + (update * self.scaling).to(y.dtype)

    def fused_weight(self, dtype: torch.dtype) -> Tensor | Nf4Weight | None:
        """The base's weight (out, in) as `lora_linear` takes it for x of ``dtype``; None where it can't."""
        weight: Any = self.base_layer.weight
        state = getattr(weight, "quant_state", None)
        if state is None:
            if weight.dtype != dtype or type(self.base_layer) not in (nn.Linear, Conv1D):
                return None
            return weight.t() if isinstance(self.base_layer, Conv1D) else weight  # type: ignore[no-any-return]
        if state.quant_type != "nf4" or self.in_features % 64 or self.base_layer.compute_dtype != dtype:
            return None
        if self._packed is None or self._packed[0] != weight.data_ptr():
            self._packed = (weight.data_ptr(), Nf4Weight.from_bitsandbytes(weight.data, state))
        return self._packed[1]

    def delta_weight(self) -> Tensor:
        """The update (alpha / r) B A, of shape (out, in), in float32."""
        return (self.lora_B.float() @ self.lora_A.float()) * self.scaling

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha}"


def linear_shape(layer: nn.Module) -> tuple[int, int]:
    """(in_features, out_features) of a linear layer, ``Conv1D`` included."""
    if isinstance(layer, Conv1D):
        return int(layer.weight.shape[0]), int(layer.weight.shape[1])
    return int(layer.in_features), int(layer.out_features)  # type: ignore[arg-type]


def is_linear(module: nn.Module) -> bool:
    """Whether a module can carry an adapter: ``nn.Linear`` (4-bit ones are its subclass) or ``Conv1D``."""
    return isinstance(module, nn.Linear | Conv1D)


def inject_lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    targets: Sequence[str] = DEFAULT_TARGETS,
    *,
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Freeze a model and wrap its target projections in `LoRALinear`, in place.

    Args:
        model: any module; every parameter of it is frozen.
        rank: r of the update.
        alpha: scale; the update is multiplied by alpha / rank.
        targets: last parts of the names of the projections to adapt.
        dtype: dtype of the adapters.

    Returns:
        The names of the adapted modules, in the order of ``model.named_modules()``.

    Raises:
        UserError: a target matches no linear layer of the model.
    """
    model.requires_grad_(False)
    linear = {name: module for name, module in model.named_modules() if is_linear(module)}
    known = {name.rpartition(".")[2] for name in linear}
    if missing := [target for target in targets if target not in known]:
        raise UserError("model.lora.targets", missing[0], f"a linear layer of this model: {', '.join(sorted(known))}")
    wanted = {name: module for name, module in linear.items() if name.rpartition(".")[2] in targets}
    for name, module in wanted.items():
        model.set_submodule(name, LoRALinear(module, rank, alpha, dtype))
    return list(wanted)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Name and module of every adapter of a model."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within the context the model computes as the frozen base: the reference policy of the KL term."""
    layers = [layer for _, layer in lora_layers(model)]
    before = [layer.enabled for layer in layers]
    try:
        for layer in layers:
            layer.enabled = False
        yield
    finally:
        for layer, enabled in zip(layers, before, strict=True):
            layer.enabled = enabled


def merge_lora(model: nn.Module) -> int:
    """Add every update to its base weight and unwrap the adapters, in place.

    Only floating-point bases are merged: rounding the sum back to 4 bits would lose most of the update
    (https://github.com/huggingface/peft/issues/2501), so a 4-bit base has to be loaded in bf16 first.

    Returns:
        The number of merged layers.

    Raises:
        UserError: the base is quantized.
    """
    layers = list(lora_layers(model))
    for name, layer in layers:
        weight = layer.base_layer.weight
        if not weight.is_floating_point():  # type: ignore[operator]
            raise UserError("model.policy.quantization", name, "a floating-point base to merge into")
    for name, layer in layers:
        delta = layer.delta_weight()
        weight = layer.base_layer.weight
        with torch.no_grad():
            update = delta.T if isinstance(layer.base_layer, Conv1D) else delta
            weight.copy_((weight.float() + update.to(weight.device)).to(weight.dtype))  # type: ignore[operator, arg-type]
        model.set_submodule(name, layer.base_layer)
    return len(layers)


def _adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters under PEFT's parameter names."""
    return {
        f"{_PEFT_PREFIX}{name}.{side}.weight": getattr(layer, side)
        for name, layer in lora_layers(model)
        for side in ("lora_A", "lora_B")
    }


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """The adapters under PEFT's parameter names, on the CPU."""
    return {name: value.detach().cpu().contiguous() for name, value in _adapter_parameters(model).items()}


def save_adapter(model: nn.Module, folder: str | Path, *, base_model: str) -> None:
    """Write a model's adapters as a folder that ``peft.PeftModel.from_pretrained`` loads.

    Args:
        model: a model with adapters from `inject_lora`.
        folder: where ``adapter_config.json`` and ``adapter_model.safetensors`` go; made if missing.
        base_model: hub id or path of the base, for PEFT's ``base_model_name_or_path``.
    """
    folder = Path(folder)
    layers = dict(lora_layers(model))
    any_layer = next(iter(layers.values()))
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": any_layer.rank,
        "lora_alpha": any_layer.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "fan_in_fan_out": isinstance(any_layer.base_layer, Conv1D),
        "bias": "none",
        "inference_mode": True,
    }
    tmp = folder / (ADAPTER_WEIGHTS + ".tmp")
    with writing(folder / ADAPTER_WEIGHTS):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            tmp.write_bytes(save(adapter_state(model), metadata={"format": "pt"}))
            tmp.replace(folder / ADAPTER_WEIGHTS)
        finally:
            tmp.unlink(missing_ok=True)
    write_whole(folder / ADAPTER_CONFIG, json.dumps(config, indent=2) + "\n")


def load_adapter(model: nn.Module, folder: str | Path, *, argument: str = "adapter") -> None:
    """Load a PEFT LoRA folder into a model's adapters, injecting them first if there are none.

    Raises:
        UserError: the folder is no LoRA adapter, or was made for another model or rank.
    """
    config = read_adapter_config(folder, argument=argument)
    if not any(True for _ in lora_layers(model)):
        inject_lora(model, config["r"], config["lora_alpha"], tuple(config["target_modules"]))
    try:
        state = load_file(Path(folder) / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        accepted = f"an adapter with whole weights in {ADAPTER_WEIGHTS} (.bin files are pickled code: not read)"
        raise UserError(argument, str(folder), accepted) from error
    copy_adapter_state(model, state, argument=argument, source=str(folder))


def copy_adapter_state(model: nn.Module, state: Mapping[str, Tensor], *, argument: str, source: str) -> None:
    """Copy tensors named as `adapter_state` names them into the model, checking names and shapes first.

    Raises:
        UserError: names or shapes differ from this model's adapters.
    """
    own = _adapter_parameters(model)
    if own.keys() != state.keys() or any(own[key].shape != state[key].shape for key in own):
        raise UserError(argument, source, f"an adapter of this model ({len(own)} tensors of its shapes)")
    with torch.no_grad():
        for name, value in own.items():
            value.copy_(state[name])
