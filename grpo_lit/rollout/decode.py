"""One decode step: a token of every row in flight goes in, the next one comes out, everything stays on the device.

A layer is eight launches: norm, query-key-value product, rotary positions + cache write, attention over pages, output
product + residual, norm, gated MLP, down product + residual. With LoRA its first factor is a launch before the product,
and takes the norm in. No value is read by the host, so the whole step can be recorded in a CUDA graph; on the CPU the
same code runs as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from grpo_lit.kernels.advance_rows import RowState, advance_rows
from grpo_lit.kernels.decode_linear import Part, RmsNorm, decode_linear
from grpo_lit.kernels.gated_activation import ACTIVATIONS
from grpo_lit.kernels.paged_attention import paged_attention
from grpo_lit.kernels.rms_norm import add_layer_norm, add_rms_norm
from grpo_lit.kernels.rope_cache import rope_cache
from grpo_lit.kernels.sample_token import sample_token
from grpo_lit.policy import Policy
from grpo_lit.rollout.base import SamplingConfig
from grpo_lit.rollout.model_reader import LayerSpec, ModelSpec, Norm
from grpo_lit.rollout.pages import KVCache
from grpo_lit.rollout.sampling import sample_tokens, warpers


class DecodeStep:
    """Everything a step reads, bound together once.

    Args:
        spec: the model's weights.
        cache: keys and values.
        rotary: cos and sin, (positions, D) each; None where positions are learned.
        sampling: how the next token is drawn.
        eos_token_ids: (E,) long, tokens that end a row.
        impl: of every op; None picks by device.
    """

    def __init__(
        self,
        spec: ModelSpec,
        cache: KVCache,
        rotary: tuple[Tensor, Tensor] | None,
        sampling: SamplingConfig,
        eos_token_ids: Tensor,
        impl: str | None = None,
    ) -> None:
        self.spec, self.cache, self.rotary = spec, cache, rotary
        self.sampling, self.eos_token_ids, self.impl = sampling, eos_token_ids, impl
        self._warpers: list[LogitsProcessor] = warpers(sampling.top_p, sampling.top_k, sampling.min_p)
        adapted = any(part.lora is not None for part in spec.parts)
        self.kernels_key = (adapted, sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p)
        """Steps of equal keys run the same kernels."""

    def __call__(self, state: RowState, page_table: Tensor) -> None:
        """Feed each slot's token, draw the next one and move on; in place.

        Args:
            state: the slots that run.
            page_table: (S, P) int32, pages of each slot.
        """
        hidden: Tensor = self.spec.embedding(state.token)
        if self.spec.position_embedding is not None:
            hidden = hidden + self.spec.position_embedding[state.position.clamp_min(0)]
        for index, layer in enumerate(self.spec.layers):
            hidden = self._layer(index, layer, hidden, state, page_table)
        logits = self._logits(hidden)
        ids, logprobs = self._sample(logits, state.uniform)
        advance_rows(ids, logprobs, state, self.eos_token_ids, impl=self.impl)

    def _layer(self, index: int, layer: LayerSpec, hidden: Tensor, state: RowState, page_table: Tensor) -> Tensor:
        k_pages, v_pages = self.cache.layer(index)
        qkv = self._linear(layer.qkv, hidden, norm=layer.attention_norm)
        cos, sin = (None, None) if self.rotary is None else self.rotary
        q = rope_cache(
            qkv,
            k_pages,
            v_pages,
            page_table,
            state.position,
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.cache.num_kv_heads,
            cos=cos,
            sin=sin,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=self.spec.norm_eps,
            impl=self.impl,
        )
        mixed = paged_attention(
            q, k_pages, v_pages, page_table, state.length, scale=layer.attention_scale, impl=self.impl
        )
        hidden = self._linear([layer.out], mixed.flatten(1), residual=hidden)
        if self.spec.gated:
            inner = self._linear(layer.up, hidden, norm=layer.mlp_norm, activation=self.spec.activation)
        else:
            inner = ACTIVATIONS[self.spec.activation](self._linear(layer.up, hidden, norm=layer.mlp_norm))
        return self._linear([layer.down], inner, residual=hidden)

    def _linear(self, parts: Sequence[Part], x: Tensor, *, norm: Norm | None = None, **fused: Any) -> Tensor:
        """A product, with the norm before it where there is one."""
        fused_norm = None
        if norm is not None and norm.bias is not None:
            x, _ = add_layer_norm(x, None, norm.weight, norm.bias, norm.eps, impl=self.impl)
        elif norm is not None:
            fused_norm = RmsNorm(norm.weight, norm.eps)
        return decode_linear(
            x,
            [part.weight for part in parts],
            bias=[part.bias for part in parts],
            lora=[part.lora for part in parts],
            norm=fused_norm,
            impl=self.impl,
            **fused,
        )

    def _logits(self, hidden: Tensor) -> Tensor:
        """(S, V), scaled and capped as the model's output layer does."""
        norm = self.spec.final_norm
        if norm.bias is None:
            hidden, _ = add_rms_norm(hidden, None, norm.weight, norm.eps, impl=self.impl)
        else:
            hidden, _ = add_layer_norm(hidden, None, norm.weight, norm.bias, norm.eps, impl=self.impl)
        logits = self._linear([self.spec.head], hidden, out_dtype=torch.float32)
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if self.spec.softcap is not None:
            logits = self.spec.softcap * torch.tanh(logits / self.spec.softcap)
        return logits

    def _sample(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        temperature = self.sampling.temperature
        if not self._warpers or temperature == 0:
            return sample_token(logits, uniform, temperature=temperature, impl=self.impl)
        scores: Any = logits.float() / temperature
        for warper in self._warpers:
            scores = warper(None, scores)
        logprobs = scores.log_softmax(dim=-1)
        ids = sample_tokens(logprobs, uniform)
        return ids, logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def rotary_tables(policy: Policy, num_positions: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin of positions 0 to num_positions - 1, (num_positions, D) each, from the model's own module.

    None for a model with learned positions.
    """
    rotary: Any = getattr(getattr(policy.model, "model", None), "rotary_emb", None)
    if rotary is None:
        return None
    positions = torch.arange(num_positions, device=policy.device).unsqueeze(0)
    like: Any = policy.model.get_input_embeddings().weight
    cos, sin = rotary(like.detach(), positions)
    return cos[0].contiguous(), sin[0].contiguous()
