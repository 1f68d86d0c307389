from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_lit.lora import LoRAConfig
from grpo_lit.model_source import resolve_model_source
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.prompts import load_tokenizer
from grpo_lit.rollout import HFEngine, Rollout, SamplingConfig, row_keys
from grpo_lit.rollout.graph import GraphEngine

PROMPTS = [[3, 4, 5, 6], [7], list(range(4, 40)) * 2, [8, 9, 10]]
COUNTS = [2, 3, 0, 4]


def policy_of(folder: Path) -> Policy:
    targets = ["c_attn", "c_proj"] if "gpt2" in folder.name else ["q_proj", "v_proj", "up_proj"]
    policy = load_policy(PolicyConfig(str(folder), dtype="fp32"), LoRAConfig(4, targets=targets))
    torch.manual_seed(3)
    for name, parameter in policy.trainable_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.05)
    return policy


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
def test_first(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    tokenizer = load_tokenizer(resolve_model_source(str(folder)))
    policy = policy_of(folder)
    keys = row_keys(0, 0, [0, 0, 1, 1, 1, 3, 3, 3, 3], [0, 1, 0, 1, 2, 0, 1, 2, 3])
    sampling = SamplingConfig(max_completion_length=9)
    a = HFEngine(policy, tokenizer).generate(PROMPTS, COUNTS, keys, sampling)
    for size in (None, 1, 2, 5):
        b = GraphEngine(policy, tokenizer, batch_size=size).generate(PROMPTS, COUNTS, keys, sampling)
        assert torch.equal(a.completion_ids, b.completion_ids)
        assert torch.equal(a.completion_mask, b.completion_mask)
        assert torch.allclose(a.logprobs, b.logprobs, atol=1e-4)
