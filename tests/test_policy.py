from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from grpo_lit.errors import UserError
from grpo_lit.lora import LoRAConfig
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.rollout.base import left_pad

PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10], [4, 11, 5]]
COMPLETIONS = [[5, 6, 7], [8, 9, 4], [3, 3, 12]]
LENGTHS = [3, 2, 1]


def batch(rows: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    prompt_ids, prompt_mask = left_pad([PROMPTS[row] for row in rows], 0)
    completion_ids = torch.tensor([COMPLETIONS[row] for row in rows])
    completion_mask = torch.arange(3) < torch.tensor([LENGTHS[row] for row in rows]).unsqueeze(-1)
    return prompt_ids, prompt_mask, completion_ids, completion_mask


def policy_of(folder: Path, **kwargs: object) -> Policy:
    return load_policy(PolicyConfig(str(folder), dtype="fp32", **kwargs))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["tiny_gpt2", "tiny_llama"])
def test_left_padded_rows_score_as_they_do_alone(name: str, request: pytest.FixtureRequest) -> None:
    """GPT-2 knows where a row starts only through its position ids."""
    policy = policy_of(request.getfixturevalue(name))
    with torch.no_grad():
        together = policy.score(*batch([0, 1, 2]))
        for row in range(3):
            alone = policy.score(*batch([row]))
            assert torch.allclose(together.logprobs[row], alone.logprobs[0], atol=1e-5)
            assert torch.allclose(together.entropy[row], alone.entropy[0], atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_equal_the_full_logits_and_are_zero_off_the_mask(tiny_gpt2: Path, temperature: float) -> None:
    policy = policy_of(tiny_gpt2)
    reference = AutoModelForCausalLM.from_pretrained(tiny_gpt2, dtype=torch.float32).eval()
    with torch.no_grad():
        scores = policy.score(*batch([0, 1, 2]), temperature=temperature)
        for row in range(3):
            ids = torch.tensor([PROMPTS[row] + COMPLETIONS[row]])
            logprobs = (reference(ids).logits[0, len(PROMPTS[row]) - 1 : -1] / temperature).log_softmax(-1)
            chosen = logprobs[torch.arange(3), torch.tensor(COMPLETIONS[row])]
            entropy = -(logprobs.exp() * logprobs).sum(-1)
            length = LENGTHS[row]
            assert torch.allclose(scores.logprobs[row, :length], chosen[:length], atol=1e-5)
            assert torch.allclose(scores.entropy[row, :length], entropy[:length], atol=1e-5)
            assert not scores.logprobs[row, length:].any()
            assert not scores.entropy[row, length:].any()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_equals_that_of_full_logits(tiny_llama: Path, checkpointing: bool) -> None:
    policy = load_policy(
        PolicyConfig(str(tiny_llama), dtype="fp32", gradient_checkpointing=checkpointing), LoRAConfig(4)
    )
    torch.manual_seed(1)
    for name, parameter in policy.trainable_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.1)
    prompt_ids, prompt_mask, completion_ids, completion_mask = batch([0, 1, 2])
    coefficient = torch.randn(3, 3) * completion_mask
    (policy.score(prompt_ids, prompt_mask, completion_ids, completion_mask).logprobs * coefficient).sum().backward()
    fused = {name: parameter.grad.clone() for name, parameter in policy.trainable_parameters()}
    policy.zero_grad()
    total = torch.zeros(())
    for row in range(3):
        ids = torch.tensor([PROMPTS[row] + COMPLETIONS[row]])
        logprobs = policy.model(ids).logits[0, len(PROMPTS[row]) - 1 : -1].log_softmax(-1)
        total = total + (logprobs[torch.arange(3), torch.tensor(COMPLETIONS[row])] * coefficient[row]).sum()
    total.backward()
    for name, parameter in policy.trainable_parameters():
        assert (fused[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name
        assert parameter.grad.norm() > 1e-2, name


def test_dropout_is_off_in_every_mode(tiny_gpt2: Path) -> None:
    assert json.loads((tiny_gpt2 / "config.json").read_text())["attn_pdrop"] > 0
    policy = policy_of(tiny_gpt2)
    policy.train()
    arguments = batch([0, 1])
    assert torch.equal(policy.score(*arguments).logprobs, policy.score(*arguments).logprobs)


def test_generating_restores_the_mode_and_keeps_the_cache(tiny_llama: Path) -> None:
    policy = policy_of(tiny_llama, gradient_checkpointing=True)
    policy.model.train()
    with pytest.raises(RuntimeError, match="stop"), policy.generating() as model:  # noqa: PT012
        assert not model.training
        _, cache = model(torch.tensor([[3, 4]]), use_cache=True).to_tuple()  # its name depends on transformers
        assert cache.get_seq_length() == 2
        raise RuntimeError("stop")
    assert policy.model.training


def test_nf4_base_is_four_bits_and_never_changes(tiny_llama: Path) -> None:
    policy = load_policy(PolicyConfig(str(tiny_llama), dtype="fp32", quantization="nf4"), LoRAConfig(4))
    layer = policy.model.model.layers[0].mlp.up_proj
    assert layer.weight.dtype == torch.uint8
    assert layer.weight.numel() == 64 * 128 // 2
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable_parameters()], lr=0.1)
    with policy.generating() as model:
        model(torch.tensor([[3, 4, 5]]))
    policy.score(*batch([0, 1, 2])).logprobs.sum().backward()
    optimizer.step()
    for name, value in policy.model.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(value, before[name]), name
    changed = [name for name, value in policy.model.state_dict().items() if not torch.equal(value, before[name])]
    assert len(changed) >= 8  # every B


def test_random_weights_are_the_seed_s_and_leave_the_global_generator_alone(tiny_llama: Path) -> None:
    config = PolicyConfig(str(tiny_llama), dtype="fp32", random_weights=True)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = load_policy(config, LoRAConfig(2), seed=1), load_policy(config, LoRAConfig(2), seed=1)
    other = load_policy(config, LoRAConfig(2), seed=2)
    assert torch.equal(torch.rand(1), expected)
    for (name, a), (_, b), (_, c) in zip(
        first.named_parameters(), second.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        if a.dim() == 2 and "lora_B" not in name:
            assert not torch.equal(a, c), name


def test_four_bits_need_adapters(tiny_llama: Path) -> None:
    with pytest.raises(UserError, match="model.lora"):
        load_policy(PolicyConfig(str(tiny_llama), quantization="nf4"), None)


def test_model_without_linear_layers_refuses_nf4(tiny_gpt2: Path) -> None:
    with pytest.raises(UserError, match="no nn.Linear"):
        load_policy(PolicyConfig(str(tiny_gpt2), quantization="nf4"), LoRAConfig(2, targets=["c_attn"]))
