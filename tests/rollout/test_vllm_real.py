"""A real vLLM: colocated, on the CPU or the GPU at hand. One engine serves all tests but those that end it."""

from __future__ import annotations

import importlib.util
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.lora import LoRAConfig, lora_layers
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.prompts import PromptEncoder, load_tokenizer
from grpo_lit.rollout import Rollout, RolloutConfig, SamplingConfig, VLLMConfig, build_engine, row_keys
from grpo_lit.rollout.vllm import VLLMEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(280),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed; scripts/vllm_cpu_fit.py makes an environment with it and runs these tests",
    ),
]
PROMPTS = [[1, 3, 4, 5, 6], [1, 7], [1, 8, 9, 10]]
COUNTS = [3, 1, 4]
KEYS = row_keys(0, 0, [0] * 3 + [1] + [2] * 4, [0, 1, 2, 0, 0, 1, 2, 3])
SAMPLING = SamplingConfig(temperature=0.7, max_completion_length=10)


@pytest.fixture(scope="module")
def model(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with heads of 64: vLLM's attention on the CPU knows no smaller ones."""
    folder = tmp_path_factory.mktemp("llama64")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_llama)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def new_pair(model: Path, cache: Path) -> tuple[Policy, VLLMEngine]:
    policy = load_policy(
        PolicyConfig(str(model), dtype="fp32", quantization="nf4"), LoRAConfig(4, targets=["q_proj", "o_proj"])
    )
    torch.manual_seed(1)
    move(policy, 0.05)
    config = RolloutConfig(engine="vllm", vllm=VLLMConfig(base_cache=str(cache), kv_cache_gib=0.1))
    engine = build_engine(config, policy, PromptEncoder(load_tokenizer(policy.source)))
    assert isinstance(engine, VLLMEngine)
    return policy, engine


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Policy, VLLMEngine]]:
    """A policy with a 4-bit base, and a vLLM over the same base, written for it."""
    policy, engine = new_pair(model, tmp_path_factory.mktemp("cache"))
    yield policy, engine
    engine.close()


def move(policy: Policy, size: float) -> None:
    """Change the adapters as an optimizer step would."""
    with torch.no_grad():
        for _, layer in lora_layers(policy.model):
            layer.lora_B += size * torch.randn_like(layer.lora_B)


def scores(policy: Policy, rollout: Rollout, temperature: float) -> torch.Tensor:
    with torch.no_grad():
        return policy.score(
            rollout.prompt_ids,
            rollout.prompt_mask,
            rollout.completion_ids,
            rollout.completion_mask,
            temperature=temperature,
        ).logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_logprobs_equal_scoring(pair: tuple[Policy, VLLMEngine], temperature: float) -> None:
    policy, engine = pair
    rollout = engine.generate(PROMPTS, COUNTS, KEYS, SamplingConfig(temperature, max_completion_length=10))
    assert rollout.group_ids.tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    expected = scores(policy, rollout, temperature or 1.0)
    assert (expected - rollout.logprobs).abs().max() < 1e-3
    assert rollout.logprobs.abs().max() > 0.1
    eos = engine.eos_token_ids[0]
    for ids, length, truncated in zip(rollout.completion_ids, rollout.lengths, rollout.truncated, strict=True):
        assert bool(truncated) == (int(ids[length - 1]) != eos)
        assert eos not in ids[: int(length) - 1].tolist()
    assert len({tuple(row) for row in rollout.completion_ids.tolist()}) > (1 if temperature == 0 else 4)


def test_batch_size_changes_no_draw(pair: tuple[Policy, VLLMEngine]) -> None:
    _, engine = pair
    whole = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    try:
        for batch_size in (1, 3):
            engine.batch_size = batch_size
            part = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
            assert torch.equal(part.completion_ids, whole.completion_ids)
            assert torch.equal(part.truncated, whole.truncated)
    finally:
        engine.batch_size = None
    other = engine.generate(PROMPTS, COUNTS, row_keys(1, 0, [0] * 8, list(range(8))), SAMPLING)
    assert not torch.equal(other.completion_ids[:, 0], whole.completion_ids[:, 0])


def test_adapter_is_followed(pair: tuple[Policy, VLLMEngine]) -> None:
    policy, engine = pair
    before = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    move(policy, 0.05)
    after = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    assert (scores(policy, before, 0.7) - before.logprobs).abs().max() > 1e-2, "the policy moved"
    assert (scores(policy, after, 0.7) - after.logprobs).abs().max() < 1e-3, "and vLLM with it"
    assert engine.last_probe is not None
    assert engine.last_probe.followed == pytest.approx(1.0, abs=0.01)
    assert engine.step_metrics()["rollout/vllm_probe"] < 1e-4
    assert len(list(engine.adapter.folder.parent.iterdir())) == 1  # type: ignore[union-attr]


def test_stale_adapter_is_found_out(pair: tuple[Policy, VLLMEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    policy, engine = pair
    engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    move(policy, 1e-4)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_hand_over", lambda: None)  # the planted fault: vLLM keeps the old version
        with pytest.raises(SystemFault, match="stale weights"):
            engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)  # handed over, all is well


def test_truncation_is_renormalised(pair: tuple[Policy, VLLMEngine]) -> None:
    policy, engine = pair
    rollout = engine.generate(PROMPTS, COUNTS, KEYS, SamplingConfig(1.0, top_k=3, max_completion_length=1))
    for row, group in enumerate(rollout.group_ids.tolist()):
        with torch.no_grad():
            logits = policy.model(torch.tensor([PROMPTS[group]])).logits[0, -1]
        top = logits.topk(3)
        index = top.indices.tolist().index(int(rollout.completion_ids[row, 0]))
        assert float(rollout.logprobs[row, 0]) == pytest.approx(float(top.values.log_softmax(-1)[index]), abs=1e-3)


def test_rows_end_at_their_answer(pair: tuple[Policy, VLLMEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = pair
    whole = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    ends = lambda row, ids, num_checked: 4 if num_checked < 4 <= len(ids) else None  # noqa: E731
    monkeypatch.setattr(engine, "_answer_end", lambda prompts, sampling: ends)
    short = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    assert short.lengths.tolist() == [min(int(length), 4) for length in whole.lengths]
    assert torch.equal(short.completion_ids[:, 0], whole.completion_ids[:, 0])
    answered = whole.lengths >= 4
    assert bool(answered.any())
    assert not bool(short.truncated[answered].any())


def test_interrupted_rollout_leaves_nothing_behind(pair: tuple[Policy, VLLMEngine]) -> None:
    _, engine = pair
    whole = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)

    def interrupt(rows: int, tokens: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING, interrupt)
    again = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    assert torch.equal(again.completion_ids, whole.completion_ids)
    assert torch.allclose(again.logprobs, whole.logprobs, atol=1e-4)


def test_ctrl_c_is_not_for_the_engine(pair: tuple[Policy, VLLMEngine]) -> None:
    """A terminal sends it to every process of the group."""
    import psutil

    _, engine = pair
    whole = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    children = psutil.Process().children(recursive=True)
    assert len(children) > 2
    for child in children:
        if child.name() not in ("sh", "dash"):
            child.send_signal(signal.SIGINT)
    time.sleep(1.0)
    again = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    assert torch.equal(again.completion_ids, whole.completion_ids)


def test_too_long_for_the_cache_is_a_mistake_of_the_user(pair: tuple[Policy, VLLMEngine]) -> None:
    _, engine = pair
    with pytest.raises(UserError, match="max_model_len"):
        engine.generate(PROMPTS, COUNTS, KEYS, SamplingConfig(max_completion_length=124))


def test_dead_engine_ends_the_run_in_one_line(model: Path, tmp_path: Path) -> None:
    import psutil

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    _, engine = new_pair(model, tmp_path)
    folder = engine._folders.root  # type: ignore[union-attr]
    engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    for child in children:
        child.kill()
    with pytest.raises(SystemFault, match="vLLM"):
        engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    engine.close()
    time.sleep(0.5)
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not folder.exists()
