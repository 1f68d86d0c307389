"""A transformers decoder run through the layers of `grpo_lit.fused_layers`, on packed tokens, where that is possible.

Rows come padded, as prompts and completions; the decoder computes their real tokens alone, laid end to end, and gives
the final hidden states that predict the completion tokens asked for.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_lit.errors import UserError
from grpo_lit.fused_layers import Call, FusedLayer, LayerFunction, layer_forward
from grpo_lit.kernels.dispatch import resolve_impl
from grpo_lit.kernels.packed_attention import Sequences
from grpo_lit.linear_group import Adapters, LinearGroup

if TYPE_CHECKING:
    from grpo_lit.memory.checkpointing import LayerCheckpointing

_log = logging.getLogger("grpo_lit.layers")

# Tokens of a chunk of the feed-forward part: large enough for the products, small enough for an 8 GB card.
CHUNK_TOKENS = 2048


class FusedDecoder:
    """Runs a transformers decoder's weights through the layers of this file.

    Args:
        model: the causal language model, adapters included; see `unsupported`.
        checkpointing: how many of the first layers keep their input alone for the backward, and whether that waits
            on the host; None for no layer.
        chunk_tokens: tokens of a chunk of the feed-forward part.
    """

    def __init__(
        self, model: PreTrainedModel, checkpointing: LayerCheckpointing | None, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        self.checkpointing, self.chunk_tokens = checkpointing, chunk_tokens
        self.decoder: Any = getattr(model, model.base_model_prefix)
        self.layers = [FusedLayer(layer) for layer in self.decoder.layers]

    def __call__(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        counts: Tensor,
    ) -> Tensor:
        """Final hidden states (M, H) before chosen completion tokens; nothing is computed for padding.

        Args:
            prompt_ids: (N, P) long, left-padded.
            prompt_mask: (N, P) bool.
            completion_ids: (N, T) long, right-padded.
            completion_mask: (N, T) bool.
            counts: (M,) long, which of the N T completion tokens, all of them real ones.
        """
        device, width = prompt_ids.device, prompt_mask.shape[1]
        mask = torch.cat([prompt_mask, completion_mask], dim=1)
        seen = mask.cpu()  # the one wait for the device
        where = Sequences.of(seen.sum(dim=1).tolist(), device)
        kept = seen.flatten().nonzero().squeeze(-1).to(device)
        positions = (mask.long().cumsum(dim=1) - 1).flatten()[kept]
        order = (mask.flatten().long().cumsum(0) - 1).view(mask.shape)  # place of each token among the real ones
        x = self.decoder.embed_tokens(torch.cat([prompt_ids, completion_ids], dim=1).flatten()[kept])
        x = self._layers(x, positions, where)
        before = order[:, width:].flatten()[counts] - 1  # the token before predicts
        return self.decoder.norm(x.index_select(0, before))  # type: ignore[no-any-return]

    def _layers(self, x: Tensor, positions: Tensor, where: Sequences) -> Tensor:
        impl = resolve_impl("decoder_layer", None, x.device)
        if x.dtype == torch.float64:
            impl = "torch"
        cos, sin = (t[0].contiguous() for t in self.decoder.rotary_emb(x, positions[None]))
        adapters, parameters = self.adapters(x.dtype)
        trains = torch.is_grad_enabled() and any(p.requires_grad for layer in parameters for p in layer)
        recomputed = 0 if self.checkpointing is None else self.checkpointing.count
        offload = None if self.checkpointing is None or not trains else self.checkpointing.offload
        if offload is not None:
            offload.start()
        for index, (layer, copies, own) in enumerate(zip(self.layers, adapters, parameters, strict=True)):
            call = Call(layer, copies, cos, sin, where, index < recomputed, impl, self.chunk_tokens)
            if trains:
                with nullcontext() if offload is None or not call.recompute else offload.hooks():
                    x = LayerFunction.apply(x, call, *own)
            else:
                with torch.no_grad():
                    x = layer_forward(call, x)
        return x

    def forget(self) -> None:
        """Drop everything that was made of the weights; it is made anew when it is needed."""
        for layer in self.layers:
            for group in layer.groups:
                group.forget()

    def adapters(self, dtype: torch.dtype) -> tuple[list[list[Adapters | None]], list[list[Tensor]]]:
        """Copies in ``dtype`` of every adapter that is switched on, and the parameters themselves, by layer."""
        copies: list[list[Adapters | None]] = []
        parameters: list[list[Tensor]] = []
        targets: list[Tensor] = []
        for layer in self.layers:
            copies.append([])
            parameters.append([])
            for group in layer.groups:
                live = group.live_loras()
                if not live:
                    copies[-1].append(None)
                    continue
                a = live[0][1].lora_A.new_empty(sum(m.rank for _, m in live), group.width, dtype=dtype)
                b = [m.lora_B.new_empty(m.lora_B.shape, dtype=dtype) for _, m in live]
                made = Adapters(a, b, [i for i, _ in live], live[0][1].scaling)
                copies[-1].append(made)
                for (_, module), rank, target in zip(live, made.ranks(), b, strict=True):
                    parameters[-1] += [module.lora_A, module.lora_B]
                    targets += [a[rank], target]
        if targets:
            with torch.no_grad():
                torch._foreach_copy_(targets, [p for layer in parameters for p in layer])
        return copies, parameters


_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")


def unsupported(model: PreTrainedModel) -> str | None:
    """Why `FusedDecoder` can't run this model, or None if it can."""
    decoder: Any = getattr(model, model.base_model_prefix, None)
    layers = getattr(decoder, "layers", None)
    if not layers or any(type(layer).__name__ not in _LAYERS for layer in layers):
        return f"decoder layers of {', '.join(_LAYERS)}"
    if model.config.hidden_act not in ("silu", "swish"):
        return "a gated SiLU feed-forward part"
    if any(kind != "full_attention" for kind in getattr(model.config, "layer_types", None) or []) or (
        type(layers[0]).__name__ == "MistralDecoderLayer" and model.config.sliding_window is not None
    ):
        return "attention over all tokens, without a sliding window"
    size = int(layers[0].self_attn.head_dim)
    if size & (size - 1):
        return "heads of a power of two"
    groups = [group for layer in map(FusedLayer, layers) for group in layer.groups]
    for group in groups:
        if reason := _group_unsupported(group):
            return reason
    known = {id(p) for group in groups for lora in group.loras if lora is not None for p in (lora.lora_A, lora.lora_B)}
    known |= {id(parameter) for parameter in decoder.norm.parameters()}
    if any(parameter.requires_grad and id(parameter) not in known for parameter in decoder.parameters()):
        return "a frozen base (LoRA)"
    return None


def _group_unsupported(group: LinearGroup) -> str | None:
    quantized = [hasattr(base.weight, "quant_state") for base in group.bases]
    if any(quantized) != all(quantized):
        return "projections of one input in one number format"
    if any(quantized) and (group.width % 64 or any(base.weight.quant_type != "nf4" for base in group.bases)):
        return "NF4 in whole blocks of 64"
    if not any(quantized) and any(type(base) is not nn.Linear for base in group.bases):
        return "plain linear layers"
    if len({lora.scaling for lora in group.loras if lora is not None}) > 1:
        return "one scale for adapters of one input"
    return None


def choose_fused(
    model: PreTrainedModel,
    checkpointing: LayerCheckpointing | None,
    wanted: bool | None,
    chunk_tokens: int | None = None,
) -> FusedDecoder | None:
    """The fused decoder where it is wanted and possible.

    Args:
        model: on its device, with its adapters.
        checkpointing: which layers keep their input alone for the backward.
        wanted: None for on CUDA where the model allows it.
        chunk_tokens: tokens of a chunk of the feed-forward part; None for the default.

    Raises:
        UserError: it is wanted, and this model can't be run so.
    """
    if wanted is False or (wanted is None and model.device.type != "cuda"):
        return None
    reason = unsupported(model)
    if reason is not None:
        if wanted:
            raise UserError("model.policy.fused_layers", True, f"null or false for this model: it needs {reason}")
        _log.info("layers run through transformers: fused_layers needs %s", reason)
        return None
    _log.info("layers run through grpo_lit.fused_layers")
    return FusedDecoder(model, checkpointing, chunk_tokens or CHUNK_TOKENS)
