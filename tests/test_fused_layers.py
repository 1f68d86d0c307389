"""Decoder layers as one autograd node against transformers' own modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from grpo_lit.base_model import quantize_nf4
from grpo_lit.errors import UserError
from grpo_lit.fused_decoder import FusedDecoder, choose_fused, unsupported
from grpo_lit.lora import LoRAConfig, adapters_off, inject_lora
from grpo_lit.memory.checkpointing import LayerCheckpointing
from grpo_lit.memory.offload import ActivationOffload
from grpo_lit.model_source import ModelSource
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.rollout.base import left_pad

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYTHING = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}


def model_of(
    family: str, targets: tuple[str, ...] = EVERYTHING, *, nf4: bool = False, **other: object
) -> PreTrainedModel:
    """Three layers with random weights, biases, norms and adapters, in float64, or NF4 over float32."""
    config, kind, own = FAMILIES[family]
    shape = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    torch.manual_seed(0)
    model = kind(config(**shape, **heads, **own, initializer_range=0.2, **other))
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    if nf4:
        quantize_nf4(model, torch.float32, torch.device("cpu"))
    else:
        model.double()
    inject_lora(model, 3, 5.0, targets, dtype=torch.float32 if nf4 else torch.float64)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.2)
    return model


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four rows of different lengths, one with a completion that doesn't count at all."""
    prompt_ids, prompt_mask = left_pad([[3, 4, 5, 6, 7, 8, 9], [10], [4, 11, 5], [12, 13]], 0)
    completion_ids = torch.tensor([[5, 6, 7, 1], [8, 9, 4, 2], [3, 3, 12, 3], [1, 2, 3, 4]])
    completion_mask = torch.arange(4) < torch.tensor([4, 2, 1, 0]).unsqueeze(-1)
    return prompt_ids, prompt_mask, completion_ids, completion_mask


def passes(policy: Policy) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(log-probs, entropies, gradients of the adapters) of a loss over both."""
    generator = torch.Generator().manual_seed(2)
    up = torch.randn(2, 4, 4, generator=generator)
    policy.zero_grad()
    scores = policy.score(*batch(), temperature=0.8)
    ((scores.logprobs * up[0]).sum() + (scores.entropy * up[1]).sum()).backward()
    grads = {name: parameter.grad.clone() for name, parameter in policy.trainable_parameters()}
    return scores.logprobs.detach(), scores.entropy.detach(), grads


def policy_of(model: PreTrainedModel, checkpointing: LayerCheckpointing | None = None) -> Policy:
    return Policy(model, ModelSource("test", "test"), checkpointing)


def assert_same(model: PreTrainedModel, fused: Policy, tolerance: float) -> None:
    plain = policy_of(model)
    want_logprobs, want_entropy, want = passes(plain)
    logprobs, entropy, got = passes(fused)
    assert want_logprobs.abs().max() > 1
    torch.testing.assert_close(logprobs, want_logprobs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(entropy, want_entropy, rtol=tolerance, atol=tolerance)
    assert got.keys() == want.keys()
    for name, grad in want.items():
        scale = grad.abs().max()
        assert scale > 1e-4
        assert (got[name] - grad).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("checkpointed", [0, 2, 3])
def test_scores_and_gradients_are_those_of_transformers(family: str, checkpointed: int) -> None:
    model = model_of(family)
    policy = policy_of(model)
    policy.fused = FusedDecoder(model, LayerCheckpointing(model, checkpointed), chunk_tokens=5)
    assert_same(model, policy, 1e-5)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("o_proj",), ("up_proj", "down_proj"), ATTENTION])
def test_adapters_on_some_projections(targets: tuple[str, ...]) -> None:
    model = model_of("qwen2", targets)
    policy = policy_of(model)
    policy.fused = FusedDecoder(model, LayerCheckpointing(model), chunk_tokens=4)
    assert_same(model, policy, 1e-5)


@pytest.mark.parametrize("checkpointed", [0, 3])
def test_over_an_nf4_base(checkpointed: int) -> None:
    model = model_of("qwen2", ATTENTION, nf4=True)
    policy = policy_of(model)
    policy.fused = FusedDecoder(model, LayerCheckpointing(model, checkpointed))
    assert_same(model, policy, 1e-3)


def test_nothing_is_held_where_weights_were() -> None:
    """A trainer moves a model to the host in the end: 4-bit weights read out before would stay on the device."""
    model = model_of("llama", nf4=True)
    policy = policy_of(model)
    policy.fused = FusedDecoder(model, LayerCheckpointing(model))
    before = passes(policy)
    groups = [group for layer in policy.fused.layers for group in layer.groups]
    assert all(group._packed is not None for group in groups)
    nn.ModuleList([policy]).to("cpu")
    assert all(group._packed is None and group._bias is None for group in groups)
    assert torch.equal(passes(policy)[0], before[0])


def test_layer_inputs_may_wait_on_the_host() -> None:
    model = model_of("llama")
    policy = policy_of(model)
    offload = ActivationOffload(min_bytes=1, from_cpu=True)
    policy.fused = FusedDecoder(model, LayerCheckpointing(model, None, offload))
    assert_same(model, policy, 1e-5)
    tokens = 13 + 7
    assert offload.moved_bytes == 3 * tokens * 64 * 8


@pytest.mark.parametrize("checkpointed", [1, 3])
def test_a_checkpointed_layer_keeps_its_input_alone(checkpointed: int) -> None:
    model = model_of("llama")
    fused = FusedDecoder(model, LayerCheckpointing(model, checkpointed), chunk_tokens=4)
    kept: list[Tensor] = []
    *ids, mask = batch()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused(*ids, mask, mask.flatten().nonzero().squeeze(-1))
    shapes = [tuple(t.shape) for t in kept]
    assert shapes.count((20, 2 * 128)) == 3 - checkpointed  # gate and value of the others
    if checkpointed == 3:
        assert shapes.count((20, 64)) == 3


def test_padding_and_neighbours_change_nothing() -> None:
    model = model_of("qwen3")
    policy = policy_of(model)
    policy.fused = FusedDecoder(model, None)
    prompt_ids, prompt_mask, completion_ids, completion_mask = batch()
    with torch.no_grad():
        together = policy.score(prompt_ids, prompt_mask, completion_ids, completion_mask)
        padded = policy.score(
            nn.functional.pad(prompt_ids.masked_fill(~prompt_mask, 17), (3, 0), value=23),
            nn.functional.pad(prompt_mask, (3, 0)),
            nn.functional.pad(completion_ids.masked_fill(~completion_mask, 9), (0, 2), value=5),
            nn.functional.pad(completion_mask, (0, 2)),
        )
        assert torch.equal(padded.logprobs[:, :4], together.logprobs)
        alone = policy.score(*(t[1:2] for t in batch()))
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[1], rtol=1e-6, atol=1e-6)


def test_adapters_off_is_the_base() -> None:
    model = model_of("llama")
    policy = policy_of(model)
    with torch.no_grad(), adapters_off(model):
        want = policy.score(*batch()).logprobs
    policy.fused = FusedDecoder(model, None)
    with torch.no_grad():
        with adapters_off(model):
            torch.testing.assert_close(policy.score(*batch()).logprobs, want)
        assert (policy.score(*batch()).logprobs - want).abs().max() > 0.1


def test_scoring_gives_the_bits_that_training_sees() -> None:
    model = model_of("qwen2")
    policy = policy_of(model)
    policy.fused = FusedDecoder(model, LayerCheckpointing(model, 1))
    trained = policy.score(*batch()).logprobs
    with torch.no_grad():
        assert torch.equal(policy.score(*batch()).logprobs, trained)


def _gelu() -> PreTrainedModel:
    return model_of("llama", hidden_act="gelu")


def _windowed() -> PreTrainedModel:
    return model_of("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)


def _trained_base() -> PreTrainedModel:
    model = model_of("llama")
    model.model.layers[1].mlp.up_proj.base_layer.requires_grad_(True)
    return model


def _trained_norm() -> PreTrainedModel:
    model = model_of("llama")
    model.model.layers[1].input_layernorm.requires_grad_(True)
    return model


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (_gelu, "gated SiLU"),
        (_windowed, "sliding window"),
        (_trained_base, "frozen base"),
        (_trained_norm, "frozen base"),
    ],
)
def test_what_it_cannot_run_is_said(build: Callable[[], PreTrainedModel], words: str) -> None:
    model = build()
    assert words in str(unsupported(model))
    assert choose_fused(model, None, None) is None
    with pytest.raises(UserError, match=words):
        choose_fused(model, None, True)


def test_configured(tiny_llama: Path, tiny_gpt2: Path) -> None:
    assert load_policy(PolicyConfig(str(tiny_llama), dtype="fp32"), LoRAConfig(2)).fused is None  # on the CPU
    config = PolicyConfig(str(tiny_llama), dtype="fp32", fused_layers=True, mlp_tile_tokens=7)
    policy = load_policy(config, LoRAConfig(2))
    assert policy.fused is not None
    assert policy.fused.chunk_tokens == 7
    with pytest.raises(UserError, match="LlamaDecoderLayer"):
        load_policy(PolicyConfig(str(tiny_gpt2), fused_layers=True), LoRAConfig(2, targets=["c_attn"]))
