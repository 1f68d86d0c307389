"""The graph engine on its Triton kernels; run by test_graph_triton.py, in a process of its own.

On the CPU under Triton's interpreter (TRITON_INTERPRET=1), on a GPU as compiled code in CUDA graphs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from grpo_lit.bench.rollout_cases import tokenizer
from grpo_lit.kernels.advance_rows import RowState, advance_rows
from grpo_lit.kernels.dispatch import interpreting
from grpo_lit.lora import LoRAConfig
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.rollout import HFEngine, SamplingConfig, row_keys
from grpo_lit.rollout.graph import GraphEngine

DEVICE = "cpu" if interpreting() else "cuda"


def row_state(num_slots: int) -> RowState:
    """Random slots, about a tenth of them idle, over 50 rows of 6 tokens."""
    draw = torch.Generator().manual_seed(num_slots)
    position = torch.randint(-1, 9, (num_slots,), generator=draw).int()
    state = RowState(
        token=torch.randint(0, 9, (num_slots,), generator=draw),
        position=position,
        length=position + 1,
        num_drawn=torch.randint(0, 6, (num_slots,), generator=draw).int(),
        row=torch.randperm(50, generator=draw)[:num_slots].int(),
        uniform=torch.rand(num_slots, generator=draw, dtype=torch.float64),
        table=torch.rand(51, 6, generator=draw, dtype=torch.float64),
        out_ids=torch.zeros(51, 6, dtype=torch.long),
        out_logprobs=torch.zeros(51, 6),
    )
    return RowState(*(tensor.to(DEVICE) for tensor in state))


@pytest.mark.parametrize("num_slots", [1, 5, 40])
@pytest.mark.parametrize("eos", [[], [3], [3, 4]])
def test_advance_rows(num_slots: int, eos: list[int]) -> None:
    active = row_state(num_slots).position >= 0
    results = []
    for impl in ("torch", "triton"):
        state = row_state(num_slots)
        ids = torch.arange(num_slots, device=DEVICE) % 6
        logprobs = -torch.rand(num_slots, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        advance_rows(ids, logprobs, state, torch.tensor(eos, dtype=torch.long, device=DEVICE), impl=impl)
        results.append(state)
    for name, one, other in zip(RowState._fields, *results, strict=True):
        if name.startswith("out"):
            one, other = one[:50], other[:50]  # the last row is spare
        elif name == "uniform":
            one, other = one[active], other[active]
        assert torch.equal(one, other), name
    assert results[0].out_ids.any() or num_slots == 1


def small_policy(folder: Path, quantization: str | None) -> Policy:
    config = Qwen2Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    config.save_pretrained(folder)
    settings = PolicyConfig(str(folder), dtype="bf16", quantization=quantization, random_weights=True)  # type: ignore[arg-type]
    policy = load_policy(settings, LoRAConfig(4), device=DEVICE)
    torch.manual_seed(0)
    for name, parameter in policy.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.1)
    return policy


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_logprobs_are_those_of_generate_up_to_bf16(quantization: str | None, tmp_path: Path) -> None:
    """The first token's log-prob, which no earlier rounding can have led elsewhere, and most of the tokens."""
    policy = small_policy(tmp_path, quantization)
    prompts, counts = [[5, 6, 7] * 25, [9]], [2, 1]
    keys = row_keys(0, 0, [0, 0, 1], [0, 1, 0])
    sampling = SamplingConfig(max_completion_length=3)
    wanted = HFEngine(policy, tokenizer()).generate(prompts, counts, keys, sampling)
    engine = GraphEngine(policy, tokenizer(), impl="triton", batch_size=2)
    rollout = engine.generate(prompts, counts, keys, sampling)
    same = rollout.completion_ids[:, 0] == wanted.completion_ids[:, 0]
    assert int(same.sum()) >= 2
    assert torch.allclose(rollout.logprobs[same, 0], wanted.logprobs[same, 0], atol=0.08)
    again = engine.generate(prompts, counts, keys, sampling)
    assert torch.equal(again.completion_ids, rollout.completion_ids)
    assert torch.equal(again.logprobs, rollout.logprobs)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs CUDA graphs")
def test_graphs_change_nothing_and_memory_comes_back(tmp_path: Path) -> None:
    policy = small_policy(tmp_path, "nf4")
    prompts, counts = [[5, 6, 7] * 25, [9]], [40, 30]
    keys = row_keys(0, 0, [0] * 40 + [1] * 30, [*range(40), *range(30)])
    sampling = SamplingConfig(max_completion_length=70)
    plain = GraphEngine(policy, tokenizer(), use_graphs=False)
    plain.eos_token_ids = list(range(0, 96, 30))
    wanted = plain.generate(prompts, counts, keys, sampling)
    plain.release()
    engine = GraphEngine(policy, tokenizer())
    engine.eos_token_ids = plain.eos_token_ids
    used = []
    for _ in range(4):
        rollout = engine.generate(prompts, counts, keys, sampling)
        assert torch.equal(rollout.completion_ids, wanted.completion_ids)
        del rollout
        engine.release()
        torch.cuda.empty_cache()
        used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert used[1] == used[2] == used[3]
