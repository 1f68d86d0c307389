"""The sizes of a model that memory depends on, read from its configuration: no weights, no GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from grpo_lit.errors import UserError
from grpo_lit.lora import is_linear, linear_shape
from grpo_lit.memory.checkpointing import decoder_layers


@dataclass(frozen=True)
class ModelSizes:
    """A causal language model in numbers."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool
    """Whether the MLP has a gate beside its up projection."""
    linear: dict[str, tuple[int, int]]
    """Shape (out, in) of each linear layer but the output layer, by full name."""
    embedding: int
    """Weights of the token embedding."""
    head: int
    """Weights of the output layer; 0 where it is the embedding."""
    other: int
    """All other weights: norms, biases, positions."""

    @property
    def linear_weights(self) -> int:
        """Weights of all linear layers but the output layer."""
        return sum(rows * columns for rows, columns in self.linear.values())

    @property
    def total(self) -> int:
        """All weights."""
        return self.linear_weights + self.embedding + self.head + self.other

    @property
    def attention_width(self) -> int:
        """Columns of the queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of the keys, and of the values."""
        return self.kv_heads * self.head_dim

    @staticmethod
    def of(config: PretrainedConfig) -> ModelSizes:
        """Build the model on the meta device, where tensors have shapes and no memory, and count.

        Raises:
            UserError: no causal language model of known shape.
        """
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if head is None or not isinstance(embedding, nn.Embedding):
            raise UserError("model.policy.path", type(model).__name__, "a causal language model with an output layer")
        linear = {name: linear_shape(m) for name, m in model.named_modules() if is_linear(m) and m is not head}
        tied = head.weight is embedding.weight
        total = sum(parameter.numel() for parameter in model.parameters())
        sizes = (embedding.weight.numel(), 0 if tied else head.weight.numel())
        hidden = int(config.hidden_size)
        heads = int(config.num_attention_heads)
        layers = decoder_layers(model)
        return ModelSizes(
            layers=len(layers) or int(config.num_hidden_layers),
            hidden=hidden,
            intermediate=_intermediate(model, config, hidden),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
            vocab=int(head.weight.shape[0]),
            gated=any(name.endswith("gate_proj") for name in linear),
            linear=linear,
            embedding=sizes[0],
            head=sizes[1],
            other=total - sum(sizes) - sum(a * b for a, b in linear.values()),
        )


def _intermediate(model: nn.Module, config: PretrainedConfig, hidden: int) -> int:
    configured = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    if configured:
        return int(configured)
    wide = [linear_shape(m)[0] for m in model.modules() if isinstance(m, nn.Linear | Conv1D)]
    return 4 * hidden if 4 * hidden in wide else max(wide, default=hidden)
