from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_lit.lora import LoRAConfig
from grpo_lit.model_source import resolve_model_source
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.prompts import load_tokenizer
from grpo_lit.rollout import HFEngine, Rollout, SamplingConfig, row_keys
from grpo_lit.rollout.base import completion_mask_of

PROMPTS = [[3, 4, 5, 6], [7], [8, 9, 10]]
COUNTS = [2, 3, 2]


def policy_of(folder: Path) -> Policy:
    policy = load_policy(PolicyConfig(str(folder), dtype="fp32"), LoRAConfig(4, targets=_targets(folder)))
    torch.manual_seed(3)
    for name, parameter in policy.trainable_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.05)
    return policy


def _targets(folder: Path) -> list[str]:
    return ["c_attn"] if "gpt2" in folder.name else ["q_proj", "v_proj"]


def generate(folder: Path, sampling: SamplingConfig, batch_size: int | None = None) -> Rollout:
    tokenizer = load_tokenizer(resolve_model_source(str(folder)))
    engine = HFEngine(policy_of(folder), tokenizer, batch_size=batch_size)
    keys = row_keys(0, 0, [0, 0, 1, 1, 1, 2, 2], [0, 1, 0, 1, 2, 0, 1])
    return engine.generate(PROMPTS, COUNTS, keys, sampling)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_engine_logprobs_equal_scoring(name: str, temperature: float, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    rollout = generate(folder, SamplingConfig(temperature=temperature, max_completion_length=9))
    assert rollout.group_ids.tolist() == [0, 0, 1, 1, 1, 2, 2]
    with torch.no_grad():
        scores = policy_of(folder).score(
            rollout.prompt_ids,
            rollout.prompt_mask,
            rollout.completion_ids,
            rollout.completion_mask,
            temperature=temperature,
        )
    assert torch.allclose(scores.logprobs, rollout.logprobs, atol=1e-4)
    assert rollout.logprobs[rollout.completion_mask].abs().max() > 0.1


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
def test_batch_size_changes_no_draw(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    sampling = SamplingConfig(max_completion_length=8)
    whole = generate(folder, sampling)
    for batch_size in (1, 2, 5):
        part = generate(folder, sampling, batch_size)
        assert torch.equal(part.completion_ids, whole.completion_ids)
        assert torch.equal(part.completion_mask, whole.completion_mask)
        assert torch.equal(part.truncated, whole.truncated)
    assert len({tuple(row) for row in whole.completion_ids.tolist()}) > 3


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
def test_greedy_is_the_argmax_of_a_full_forward(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    rollout = generate(folder, SamplingConfig(temperature=0.0, max_completion_length=6))
    policy = policy_of(folder)
    for row, group in enumerate(rollout.group_ids.tolist()):
        ids = list(PROMPTS[group])
        for position in range(int(rollout.lengths[row])):
            token = int(policy.model(torch.tensor([ids])).logits[0, -1].argmax())
            assert token == int(rollout.completion_ids[row, position])
            ids.append(token)


def test_mask_comes_from_the_first_eos_and_not_from_padding() -> None:
    eos, pad_like = 2, 2
    ids = torch.tensor([[5, eos, pad_like, 5], [5, 6, 7, 8], [eos, 5, 5, 5], [5, 3, 5, 5]])
    mask, truncated = completion_mask_of(ids, [eos, 3])
    assert mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]]
    assert truncated.tolist() == [False, True, False, False]


def test_a_model_s_own_generation_defaults_do_not_act(tiny_llama: Path, tmp_path: Path) -> None:
    """A repetition penalty in generation_config.json would make rollouts differ from what is scored."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.eos_token_id = [2, 9]
    model.save_pretrained(tmp_path)
    load_tokenizer(resolve_model_source(str(tiny_llama))).save_pretrained(tmp_path)
    sampling = SamplingConfig(max_completion_length=8)
    plain, penalised = generate(tiny_llama, sampling), generate(tmp_path, sampling)
    first = min(plain.completion_ids.shape[1], penalised.completion_ids.shape[1])
    kept = penalised.completion_mask[:, :first]
    assert torch.equal(plain.completion_ids[:, :first][kept], penalised.completion_ids[:, :first][kept])
    is_nine = (penalised.completion_ids == 9) & penalised.completion_mask
    assert bool((is_nine.sum(1) <= 1).all())


def test_select_cuts_padding_and_concat_restores_it(tiny_llama: Path) -> None:
    rollout = generate(tiny_llama, SamplingConfig(max_completion_length=8))
    row = rollout.select(torch.tensor([2]))
    assert row.prompt_ids.shape[1] == 1
    assert row.completion_ids.shape[1] == int(rollout.lengths[2])
    none = rollout.select(torch.empty(0, dtype=torch.long))  # what a rank without rows holds
    assert (none.num_rows, none.prompt_ids.shape, none.completion_ids.shape) == (0, (0, 1), (0, 1))
    joined = Rollout.concat([none, *(rollout.select(torch.tensor([i])) for i in range(rollout.num_rows))])
    assert torch.equal(joined.prompt_mask, rollout.prompt_mask)
    assert torch.equal(joined.completion_mask, rollout.completion_mask)
    assert torch.equal(joined.logprobs, rollout.logprobs)
    assert torch.equal(joined.completion_ids * joined.completion_mask, rollout.completion_ids * rollout.completion_mask)
