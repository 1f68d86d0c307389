"""Gradient checkpointing of a chosen number of layers, and MLPs in tiles of tokens.

A checkpointed layer keeps its input and runs again in the backward (Chen et al., 1604.06174). Within that second run
the MLP's intermediates, 3 x (tokens, I) and their gradients, are the largest part; they depend on one token at a time,
so they can be made tile by tile, each tile checkpointed in itself (the tiled MLP of ALST, 2506.13996). Gradients are
those of the untouched model up to the rounding of differently shaped products.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_lit.errors import UserError
from grpo_lit.memory.offload import ActivationOffload


def decoder_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers of a transformers model that can be checkpointed, from the first."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


class LayerCheckpointing:
    """Which layers run twice instead of keeping their activations.

    The first layers are the checkpointed ones: the backward frees the last ones' activations first, before it
    recomputes anything.

    Args:
        model: a transformers model; its layers' switches are set here.
        num_layers: how many; None for all.
        offload: moves the inputs of checkpointed layers to the host; None keeps them on the device.

    Raises:
        UserError: more layers than there are, or a model whose layers can't be checkpointed.
    """

    def __init__(
        self, model: nn.Module, num_layers: int | None = None, offload: ActivationOffload | None = None
    ) -> None:
        self._layers = decoder_layers(model)
        self.offload = offload
        if not self._layers and num_layers != 0:
            raise UserError("model.policy.gradient_checkpointing", True, "false: no layer of this model supports it")
        for index, layer in enumerate(self._layers):
            setattr(layer, "_gradient_checkpointing_func", _CheckpointedCall(self.offload, index == 0))  # noqa: B010
        self._count = 0
        self.count = len(self._layers) if num_layers is None else num_layers

    @property
    def total(self) -> int:
        """Layers of the model."""
        return len(self._layers)

    @property
    def count(self) -> int:
        """Layers checkpointed; may be set between steps."""
        return self._count

    @count.setter
    def count(self, value: int) -> None:
        if not 0 <= value <= self.total:
            raise UserError("model.policy.gradient_checkpointing", value, f"from 0 to the model's {self.total} layers")
        self._count = value
        for index, layer in enumerate(self._layers):
            layer.gradient_checkpointing = index < value


class _CheckpointedCall:
    """What a layer calls instead of its own forward."""

    def __init__(self, offload: ActivationOffload | None, first: bool) -> None:
        self.offload, self.first = offload, first

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.offload is not None and self.first:
            self.offload.start()
        # Only the inputs are saved outside of the layer; what it saves inside is dropped and made again.
        with nullcontext() if self.offload is None else self.offload.hooks():
            return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def tile_mlps(model: nn.Module, tokens: int) -> int:
    """Make every layer's MLP run over at most ``tokens`` tokens at a time, in place; its weights stay where they are.

    Args:
        model: a transformers model whose layers have a child named ``mlp``.
        tokens: rows of the largest MLP intermediate.

    Returns:
        The number of MLPs.

    Raises:
        UserError: no layer has one.
    """
    mlps = [mlp for layer in decoder_layers(model) if isinstance(mlp := getattr(layer, "mlp", None), nn.Module)]
    if not mlps:
        raise UserError("model.policy.mlp_tile_tokens", tokens, "null: the layers of this model have no mlp")
    for mlp in mlps:
        mlp.forward = _TiledForward(mlp, tokens)
    return len(mlps)


class _TiledForward:
    """An MLP's forward over tiles of its tokens."""

    def __init__(self, mlp: nn.Module, tokens: int) -> None:
        self.mlp, self.tokens = mlp, tokens

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (..., H) to (..., H)."""
        flat = x.reshape(-1, x.shape[-1])
        if len(flat) <= self.tokens:
            return self._whole(x)
        out = torch.empty_like(flat) if not torch.is_grad_enabled() else None
        parts = []
        for start in range(0, len(flat), self.tokens):
            tile = flat[start : start + self.tokens]
            if out is not None:
                out[start : start + self.tokens] = self._whole(tile)
            else:
                parts.append(checkpoint(self._whole, tile, use_reentrant=False, preserve_rng_state=False))
        return (torch.cat(parts) if out is None else out).view(x.shape)

    def _whole(self, x: Tensor) -> Tensor:
        y: Tensor = type(self.mlp).forward(self.mlp, x)
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> _TiledForward:
        return _TiledForward(copy.deepcopy(self.mlp, memo), self.tokens)
