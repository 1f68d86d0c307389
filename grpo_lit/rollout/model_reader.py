"""Reads the weights of a transformers model into the plain description that the decode step runs on.

Nothing is copied: every tensor here is the model's own, adapters included, so that training and rollout share one set
of weights. Families: Llama, Qwen2, Qwen3 (rotary positions, RMS norms, gated MLP) and GPT-2 (learned positions, layer
norms, Conv1D).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grpo_lit.errors import UserError
from grpo_lit.kernels.decode_linear import LoraUpdate, Part
from grpo_lit.kernels.gated_activation import ACTIVATIONS
from grpo_lit.kernels.nf4 import Nf4Weight
from grpo_lit.lora import LoRALinear
from grpo_lit.policy import Policy
from grpo_lit.rollout.pages import CacheShape

ROTARY_FAMILIES = ("llama", "qwen2", "qwen3")
FAMILIES = (*ROTARY_FAMILIES, "gpt2")


class UnsupportedModel(Exception):
    """This engine cannot run the model; the message says why."""


def tensors_of(part: Part) -> list[Tensor]:
    """Every tensor that a product with a linear layer reads."""
    weight = part.weight
    found = [t for t in weight if isinstance(t, Tensor)] if isinstance(weight, Nf4Weight) else [weight]
    if part.bias is not None:
        found.append(part.bias)
    return found if part.lora is None else [*found, part.lora.a, part.lora.b]


class Norm(NamedTuple):
    """RMS norm, or layer norm where there is a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True)
class LayerSpec:
    """One transformer block. `up` holds gate and up projection where the MLP is gated."""

    attention_norm: Norm
    qkv: Sequence[Part]
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention_scale: float
    out: Part
    mlp_norm: Norm
    up: Sequence[Part]
    down: Part


@dataclass(frozen=True)
class ModelSpec:
    """A decoder as the decode step sees it.

    Attributes:
        layers: blocks from the input up.
        embedding: the module that makes (..., H) of token ids, called at every step so that its hooks are.
        vocab_size: V.
        position_embedding: (max positions, H) of GPT-2, else None.
        final_norm: before the output layer.
        head: output layer (V, H), tied or not.
        logit_scale: logits are multiplied by it.
        softcap: logits become softcap tanh(logits / softcap), or None.
        activation: by the name that transformers' configs use.
        gated: whether the MLP multiplies by a gate.
        num_heads: Hq.
        cache: layers, key-value heads, head size and dtype.
        norm_eps: of q_norm and k_norm.
    """

    layers: Sequence[LayerSpec]
    embedding: nn.Module
    vocab_size: int
    position_embedding: Tensor | None
    final_norm: Norm
    head: Part
    logit_scale: float
    softcap: float | None
    activation: str
    gated: bool
    num_heads: int
    cache: CacheShape
    norm_eps: float

    @property
    def parts(self) -> list[Part]:
        """Every linear layer, output layer included."""
        return [part for layer in self.layers for part in (*layer.qkv, layer.out, *layer.up, layer.down)] + [self.head]

    @property
    def weight_bytes(self) -> int:
        """Bytes that every decode step must read."""
        norms = [norm for layer in self.layers for norm in (layer.attention_norm, layer.mlp_norm)] + [self.final_norm]
        tensors = [tensor for part in self.parts for tensor in tensors_of(part)]
        tensors += [tensor for norm in norms for tensor in (norm.weight, norm.bias) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def fingerprint(self) -> tuple[int, ...]:
        """Addresses of all weights: a recorded graph is good as long as these stay."""
        return tuple(tensor.data_ptr() for part in self.parts for tensor in tensors_of(part))


def read_model(policy: Policy) -> ModelSpec:
    """Describe a policy's model.

    Raises:
        UnsupportedModel: another family, or a variant that the decode step has no code for.
    """
    config = policy.model.config
    if config.model_type not in FAMILIES:
        raise UnsupportedModel(f"model type {config.model_type} is none of {', '.join(FAMILIES)}")
    try:
        spec = _read_gpt2(policy) if config.model_type == "gpt2" else _read_rotary(policy)
    except UserError as error:  # an NF4 layout that the kernels do not read
        raise UnsupportedModel(str(error)) from error
    if spec.cache.head_dim % 8:
        raise UnsupportedModel(f"head size {spec.cache.head_dim} is no multiple of 8")
    return spec


def weight_bytes(policy: Policy) -> int:
    """Bytes of weights that every decode step must read; of a model without a description, all but its embedding."""
    try:
        return read_model(policy).weight_bytes
    except UnsupportedModel:
        head = policy.model.get_output_embeddings()
        skipped = policy.model.get_input_embeddings().weight
        tied = head is not None and head.weight is skipped
        return sum(p.numel() * p.element_size() for p in policy.model.parameters() if tied or p is not skipped)


def _read_rotary(policy: Policy) -> ModelSpec:
    config: Any = policy.model.config
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise UnsupportedModel(f"rotary positions of type {rope_type} change with the length")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or []):
        raise UnsupportedModel("sliding-window attention")
    if config.hidden_act not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {config.hidden_act}")
    decoder: Any = policy.model.model
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    layers = []
    for block in decoder.layers[: config.num_hidden_layers]:
        attention, mlp = block.self_attn, block.mlp
        q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        layers.append(
            LayerSpec(
                attention_norm=_norm(block.input_layernorm),
                qkv=[_part(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")],
                q_norm=None if q_norm is None else q_norm.weight,
                k_norm=None if k_norm is None else k_norm.weight,
                attention_scale=float(attention.scaling),
                out=_part(attention.o_proj),
                mlp_norm=_norm(block.post_attention_layernorm),
                up=[_part(mlp.gate_proj), _part(mlp.up_proj)],
                down=_part(mlp.down_proj),
            )
        )
    return _spec(
        policy,
        layers=layers,
        embedding=decoder.embed_tokens,
        position_embedding=None,
        final_norm=_norm(decoder.norm),
        activation=config.hidden_act,
        gated=True,
        num_heads=int(config.num_attention_heads),
        cache=CacheShape(len(layers), int(config.num_key_value_heads), head_dim, decoder.embed_tokens.weight.dtype),
        norm_eps=float(config.rms_norm_eps),
    )


def _read_gpt2(policy: Policy) -> ModelSpec:
    config: Any = policy.model.config
    if config.activation_function not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {config.activation_function}")
    if config.add_cross_attention:
        raise UnsupportedModel("cross-attention")
    decoder: Any = policy.model.transformer
    layers = []
    for block in decoder.h:
        layers.append(
            LayerSpec(
                attention_norm=_norm(block.ln_1),
                qkv=[_part(block.attn.c_attn)],
                q_norm=None,
                k_norm=None,
                # transformers before 5.4 keeps no scale, and takes this one in all attention but the eager one
                attention_scale=float(getattr(block.attn, "scaling", block.attn.head_dim**-0.5)),
                out=_part(block.attn.c_proj),
                mlp_norm=_norm(block.ln_2),
                up=[_part(block.mlp.c_fc)],
                down=_part(block.mlp.c_proj),
            )
        )
    heads = int(config.n_head)
    return _spec(
        policy,
        layers=layers,
        embedding=decoder.wte,
        position_embedding=decoder.wpe.weight,
        final_norm=_norm(decoder.ln_f),
        activation=config.activation_function,
        gated=False,
        num_heads=heads,
        cache=CacheShape(len(layers), heads, int(config.n_embd) // heads, decoder.wte.weight.dtype),
        norm_eps=float(config.layer_norm_epsilon),
    )


def _spec(policy: Policy, **fields: Any) -> ModelSpec:
    head = policy._head
    table = getattr(head.layer, "table", None)
    if table is not None and table.kind != "nf4":
        raise UnsupportedModel(f"an output layer in {table.kind}")
    weight = head.weight.detach() if table is None else table.nf4()
    return ModelSpec(
        head=Part(weight, None if head.bias is None else head.bias.detach(), None),
        vocab_size=len(head.weight) if table is None else table.shape[0],
        logit_scale=head.logit_scale,
        softcap=head.softcap,
        **fields,
    )


def _norm(module: nn.Module) -> Norm:
    eps = getattr(module, "variance_epsilon", None)
    bias = getattr(module, "bias", None)
    weight: Any = module.weight
    return Norm(
        weight.detach(),
        bias.detach() if isinstance(bias, Tensor) else None,
        float(getattr(module, "eps", 0.0) if eps is None else eps),
    )


def _part(module: nn.Module) -> Part:
    """A linear layer of any kind that `LoRALinear` may wrap."""
    adapter = None
    if isinstance(module, LoRALinear):
        if module.enabled:
            adapter = LoraUpdate(module.lora_A.detach(), module.lora_B.detach(), float(module.scaling))
        module = module.base_layer
    weight: Any = module.weight
    bias: Any = getattr(module, "bias", None)
    bias = None if bias is None else bias.detach()
    state = getattr(weight, "quant_state", None)
    if state is not None:
        return Part(Nf4Weight.from_bitsandbytes(weight.data, state), bias, adapter)
    if isinstance(module, Conv1D):
        return Part(weight.detach().t(), bias, adapter)
    if type(module) is not nn.Linear or not torch.is_floating_point(weight):
        raise UnsupportedModel(f"a linear layer of type {type(module).__name__}")
    return Part(weight.detach(), bias, adapter)
