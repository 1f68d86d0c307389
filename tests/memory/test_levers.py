from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_lit.errors import UserError
from grpo_lit.lora import LoRAConfig
from grpo_lit.memory.checkpointing import LayerCheckpointing, decoder_layers
from grpo_lit.memory.offload import ActivationOffload
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.rollout.base import left_pad

PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [10], [4, 11, 5]]
COMPLETIONS = torch.tensor([[5, 6, 7], [8, 9, 4], [3, 3, 12]])
MASK = torch.arange(3) < torch.tensor([[3], [2], [1]])


def load(folder: Path, **kwargs: Any) -> Policy:
    policy = load_policy(
        PolicyConfig(str(folder), dtype="fp32", **kwargs), LoRAConfig(4, targets=["q_proj", "up_proj"])
    )
    torch.manual_seed(1)
    for name, parameter in policy.trainable_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.1)
    return policy


def gradient(policy: Policy) -> Tensor:
    policy.zero_grad()
    scores = policy.score(*left_pad(PROMPTS, 0), COMPLETIONS, MASK)
    (scores.logprobs * torch.tensor([[0.3], [-1.0], [0.7]])).sum().backward()
    return torch.cat([p.grad.flatten() for _, p in policy.trainable_parameters()])


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Tensor:
    found = gradient(load(tiny_llama))
    assert found.norm() > 1
    return found


def count_runs(policy: Policy) -> list[int]:
    """How often each layer's MLP runs in one forward and backward."""
    runs = [0] * len(decoder_layers(policy.model))
    for index, layer in enumerate(decoder_layers(policy.model)):
        layer.post_attention_layernorm.register_forward_hook(
            lambda *_, index=index: runs.__setitem__(index, runs[index] + 1)
        )
    gradient(policy)
    return runs


@pytest.mark.parametrize(
    ("layers", "runs"), [(False, [1, 1]), (1, [2, 1]), (True, [2, 2]), ("auto", [2, 2]), (0, [1, 1])]
)
def test_checkpointed_layers_run_twice_and_gradients_stay(
    tiny_llama: Path, plain: Tensor, layers: Any, runs: list[int]
) -> None:
    policy = load(tiny_llama, gradient_checkpointing=layers)
    assert count_runs(policy) == runs
    assert (gradient(policy) - plain).norm() <= 1e-6 * plain.norm()


def test_the_number_can_change_between_steps(tiny_llama: Path, plain: Tensor) -> None:
    policy = load(tiny_llama, gradient_checkpointing=True)
    assert policy.checkpointing is not None
    policy.checkpointing.count = 1
    assert count_runs(policy) == [2, 1]
    with pytest.raises(UserError, match="from 0 to the model's 2 layers"):
        policy.checkpointing.count = 3
    with pytest.raises(UserError, match="gradient_checkpointing"):
        load(tiny_llama, gradient_checkpointing=5)
    with pytest.raises(UserError, match="gradient_checkpointing"):
        LayerCheckpointing(nn.Linear(2, 2))


@pytest.mark.parametrize("fused", [False, True])
def test_offloaded_inputs_come_back_as_they_were(tiny_llama: Path, plain: Tensor, fused: bool) -> None:
    policy = load(tiny_llama, gradient_checkpointing=True, activation_offload=True, fused_layers=fused)
    checkpointing = policy.checkpointing
    assert checkpointing is not None
    offload = checkpointing.offload
    assert offload is not None
    assert not gradient(policy).isnan().any()
    assert offload.moved_bytes == 0  # nothing to gain on the CPU
    offload.min_bytes, offload.from_cpu = 0, True
    tokens = sum(map(len, PROMPTS)) + int(MASK.sum()) if fused else 3 * 10
    for passes in (1, 2):
        assert (gradient(policy) - plain).norm() <= 1e-5 * plain.norm()
        assert offload.moved_bytes == passes * 2 * tokens * 64 * 4  # the inputs of both layers, and nothing else
        assert not offload._leaving
    # a forward that no backward follows leaves nothing for the next one
    policy.score(*left_pad(PROMPTS, 0), COMPLETIONS, MASK)
    assert (gradient(policy) - plain).norm() <= 1e-5 * plain.norm()


def test_offload_without_checkpointing_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(UserError, match="activation_offload"):
        PolicyConfig(str(tiny_llama), activation_offload=True)
    with pytest.raises(UserError, match="mlp_tile_tokens"):
        PolicyConfig(str(tiny_llama), mlp_tile_tokens=0)
    with pytest.raises(UserError, match="gradient_checkpointing"):
        PolicyConfig(str(tiny_llama), gradient_checkpointing=-1)


def widest_mlp_call(policy: Policy) -> list[int]:
    widths: list[int] = []
    for layer in decoder_layers(policy.model):
        layer.mlp.act_fn.register_forward_hook(lambda module, inputs, output: widths.append(inputs[0].shape[-2]))
    return widths


@pytest.mark.parametrize("checkpointing", [False, True])
def test_mlps_run_in_tiles_and_gradients_stay(tiny_llama: Path, plain: Tensor, checkpointing: bool) -> None:
    policy = load(tiny_llama, mlp_tile_tokens=7, gradient_checkpointing=checkpointing)
    widths = widest_mlp_call(policy)
    assert (gradient(policy) - plain).norm() <= 1e-5 * plain.norm()
    assert set(widths) == {7, 2}  # 30 tokens
    widths.clear()
    with torch.no_grad():
        policy.score(*left_pad(PROMPTS, 0), COMPLETIONS, MASK)
    assert widths == [7, 7, 7, 7, 2] * 2


def test_a_copied_policy_has_its_own_tiles(tiny_llama: Path) -> None:
    policy = load(tiny_llama, mlp_tile_tokens=7)
    copied = copy.deepcopy(policy.model)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.zero_()
        assert copied.model.layers[0].mlp(torch.ones(1, 9, 64)).norm() > 0


def test_hooks_leave_small_tensors_and_nested_use_alone() -> None:
    offload = ActivationOffload(min_bytes=1000, from_cpu=True)
    x = torch.ones(4, 4, requires_grad=True)
    large = torch.ones(64, 64, requires_grad=True)
    with offload.hooks():
        y = (x * x).sum() + (large * large).sum()
    assert offload.moved_bytes == 2 * 64 * 64 * 4  # the product keeps both factors
    y.backward()
    assert torch.equal(x.grad, 2 * x)
    assert torch.equal(large.grad, 2 * large)


@pytest.mark.gpu
def test_offload_on_the_gpu_holds_two_inputs_and_keeps_gradients() -> None:
    torch.manual_seed(0)
    weights = [torch.randn(512, 512, device="cuda") / 20 for _ in range(12)]
    x = torch.randn(8192, 512, device="cuda", requires_grad=True)

    def run(offload: ActivationOffload | None) -> tuple[Tensor, int]:
        x.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        h = x
        if offload is not None:
            offload.start()
        for weight in weights:
            call = lambda h, weight=weight: torch.tanh(h @ weight)  # noqa: E731
            if offload is None:
                h = torch.utils.checkpoint.checkpoint(call, h, use_reentrant=False)
            else:
                with offload.hooks():
                    h = torch.utils.checkpoint.checkpoint(call, h, use_reentrant=False)
        h.square().sum().backward()
        torch.cuda.synchronize()
        return x.grad.clone(), torch.cuda.max_memory_allocated() - before

    expected, peak = run(None)
    found, offloaded = run(ActivationOffload())
    assert torch.equal(found, expected)
    one = 8192 * 512 * 4
    assert offloaded <= peak - 6 * one
