"""The graph engine on the CPU, where its code runs without graphs: its rows are those of transformers' generate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

from grpo_lit.errors import UserError
from grpo_lit.lora import LoRAConfig, adapters_off
from grpo_lit.model_source import resolve_model_source
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.prompts import PromptEncoder, load_tokenizer
from grpo_lit.rollout import HFEngine, Rollout, RolloutConfig, SamplingConfig, build_engine, row_keys
from grpo_lit.rollout.flight import Flight
from grpo_lit.rollout.graph import GraphEngine
from grpo_lit.rollout.model_reader import UnsupportedModel
from grpo_lit.rollout.pages import PAGE
from grpo_lit.rollout.plan import RolloutPlan, plan_rollout
from grpo_lit.rollout.prefill import prefill

LONG = [4 + (7 * i) % 30 for i in range(PAGE + 20)]
PROMPTS = [[3, 4, 5, 6], [7], LONG, [8, 9, 10], [5] * PAGE, [6] * (PAGE + 1)]
COUNTS = [2, 3, 3, 0, 2, 1]
KEYS = row_keys(0, 0, [p for p, n in enumerate(COUNTS) for _ in range(n)], [i for n in COUNTS for i in range(n)])
_SMALL: dict[str, Any] = {
    "vocab_size": 46,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_SMALL, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(
        **_SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2": Qwen2Config(**_SMALL),
    "qwen3": Qwen3Config(**_SMALL, head_dim=32),
}


def folder_of(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model of a family, with the tiny tokenizer."""
    if name == "gpt2":
        torch.manual_seed(0)
        source = request.getfixturevalue("tiny_gpt2")
        config = AutoModelForCausalLM.from_pretrained(source).config
        config.n_positions = 256
        config.bos_token_id = config.eos_token_id = 2
    else:
        source, config = request.getfixturevalue("tiny_llama"), MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):  # transformers starts them at zero, where a lost one goes unnoticed
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(tmp_path / name)
    load_tokenizer(resolve_model_source(str(source))).save_pretrained(tmp_path / name)
    return tmp_path / name


def load(folder: Path, **options: Any) -> tuple[Policy, PreTrainedTokenizerBase]:
    targets = ["c_attn", "c_proj"] if "gpt2" in folder.name else ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    policy = load_policy(PolicyConfig(str(folder), dtype="fp32", **options), LoRAConfig(4, targets=targets))
    torch.manual_seed(3)
    for name, parameter in policy.trainable_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.05)
    return policy, load_tokenizer(resolve_model_source(str(folder)))


def assert_same_rows(one: Rollout, other: Rollout, atol: float = 1e-4) -> None:
    for field in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "group_ids", "truncated"):
        assert torch.equal(getattr(one, field), getattr(other, field)), field
    assert torch.allclose(one.logprobs, other.logprobs, atol=atol)
    assert one.logprobs[one.completion_mask].abs().max() > 0.1


@pytest.mark.parametrize("name", [*MODELS, "gpt2"])
def test_rows_equal_those_of_generate(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Ragged prompts around a page's border, non-zero adapters, sampled and greedy, any number of slots."""
    policy, tokenizer = load(folder_of(name, request, tmp_path))
    for temperature in (1.0, 0.6, 0.0):
        sampling = SamplingConfig(temperature=temperature, max_completion_length=9)
        wanted = HFEngine(policy, tokenizer).generate(PROMPTS, COUNTS, KEYS, sampling)
        for slots in (None, 1, 4):
            engine = GraphEngine(policy, tokenizer, batch_size=slots)
            assert_same_rows(wanted, engine.generate(PROMPTS, COUNTS, KEYS, sampling))
    with adapters_off(policy):
        off = HFEngine(policy, tokenizer).generate(PROMPTS, COUNTS, KEYS, sampling)
        assert_same_rows(off, GraphEngine(policy, tokenizer).generate(PROMPTS, COUNTS, KEYS, sampling))
    assert not torch.equal(off.logprobs[:, :1], wanted.logprobs[:, :1])


@pytest.mark.parametrize("truncation", [{"top_p": 0.7}, {"top_k": 3}, {"min_p": 0.2}, {"top_k": 9, "top_p": 0.9}])
def test_truncated_sampling_equals_generate(truncation: dict[str, Any], tiny_llama: Path) -> None:
    policy, tokenizer = load(tiny_llama)
    sampling = SamplingConfig(temperature=0.8, max_completion_length=8, **truncation)
    keys = row_keys(5, 1, [0] * 6, list(range(6)))
    wanted = HFEngine(policy, tokenizer).generate([[3, 4, 5]], [6], keys, sampling)
    assert_same_rows(wanted, GraphEngine(policy, tokenizer).generate([[3, 4, 5]], [6], keys, sampling))


def test_20000_draws_follow_the_model_s_distribution(tiny_llama: Path) -> None:
    """Chi-square of the first token, at a temperature that is not 1, through the whole engine."""
    policy, tokenizer = load(tiny_llama)
    draws, temperature = 20_000, 0.7
    with torch.no_grad():
        logits = policy.model(torch.tensor([[3, 4, 5]])).logits[0, -1]
    expected = (logits.double() / temperature).softmax(-1) * draws
    keys = row_keys(11, 0, [0] * draws, list(range(draws)))
    sampling = SamplingConfig(temperature=temperature, max_completion_length=1)
    rollout = GraphEngine(policy, tokenizer).generate([[3, 4, 5]], [draws], keys, sampling)
    counts = torch.bincount(rollout.completion_ids[:, 0], minlength=len(expected)).double()
    often = expected >= 5
    pooled = torch.stack([torch.cat([t[often], t[~often].sum().view(1)]) for t in (counts, expected)])
    statistic = float(((pooled[0] - pooled[1]).square() / pooled[1].clamp_min(1e-9)).sum())
    freedom = pooled.shape[1] - 1
    assert freedom > 8
    # 99.9 % quantile of chi-square, Wilson and Hilferty's approximation
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize(("check_every", "depth"), [(1, 0), (3, 1), (5, 0), (40, 1)])
def test_looking_late_changes_nothing(check_every: int, depth: int, tiny_llama: Path) -> None:
    """Rows end, wait, take freed slots and are compacted whenever the host looks; they stay the same rows."""
    policy, tokenizer = load(tiny_llama)
    policy.eos_token_ids = [5, 12, 19, 26]
    sampling = SamplingConfig(max_completion_length=33)
    counts, keys = [5, 6], row_keys(2, 0, [0] * 5 + [1] * 6, [*range(5), *range(6)])
    prompts = [[3, 4], LONG]
    wanted = HFEngine(policy, tokenizer).generate(prompts, counts, keys, sampling)
    assert len(set(wanted.lengths.tolist())) > 5
    for slots in (None, 3):
        engine = GraphEngine(policy, tokenizer, batch_size=slots, check_every=check_every)
        engine.depth = depth
        assert_same_rows(wanted, engine.generate(prompts, counts, keys, sampling))


def test_steps_are_few_and_shrink_with_the_rows(tiny_llama: Path) -> None:
    """Finished rows are compacted away, and the host never runs past the last row's end by more than it must."""
    policy, tokenizer = load(tiny_llama)
    policy.eos_token_ids = [5, 12, 19, 26]
    keys = row_keys(2, 0, [0] * 8, list(range(8)))
    engine = GraphEngine(policy, tokenizer)
    sizes: list[int] = []
    sampling = SamplingConfig(max_completion_length=40)
    wanted = engine.generate([[3, 4]], [8], keys, sampling)
    assert engine._held is not None
    runner = engine._held[2]
    inner = runner.run
    runner.run = lambda size: (sizes.append(size), inner(size))[1]  # type: ignore[method-assign]
    assert_same_rows(wanted, engine.generate([[3, 4]], [8], keys, sampling))
    lengths = sorted(wanted.lengths.tolist(), reverse=True)
    assert len(sizes) == lengths[0]
    assert sizes == [sum(length > step for length in lengths) for step in range(len(sizes))]


@pytest.mark.filterwarnings("error::FutureWarning")  # of transformers, on what it calls its cache
@pytest.mark.parametrize("at_once", [True, False])
def test_prompts_are_prefilled_once_together_or_as_slots_free(
    at_once: bool, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, tokenizer = load(tiny_llama)
    sampling = SamplingConfig(max_completion_length=9)
    wanted = GraphEngine(policy, tokenizer).generate(PROMPTS, COUNTS, KEYS, sampling)
    calls: list[list[int]] = []

    def counted(policy: Any, cache: Any, pool: Any, groups: Any, **options: Any) -> None:
        calls.append([len(prompt) for prompt, _ in groups])
        prefill(policy, cache, pool, groups, **options)

    def planned(*args: Any, **options: Any) -> RolloutPlan:
        return replace(plan_rollout(*args, **options), prefill_all=at_once, num_pages=40)

    monkeypatch.setattr("grpo_lit.rollout.flight.prefill", counted)
    monkeypatch.setattr("grpo_lit.rollout.graph.plan_rollout", planned)
    assert_same_rows(wanted, GraphEngine(policy, tokenizer, batch_size=2).generate(PROMPTS, COUNTS, KEYS, sampling))
    prefilled = [length for lengths in calls for length in lengths]
    assert sorted(prefilled) == sorted(len(p) for p, count in zip(PROMPTS, COUNTS, strict=True) if count)
    assert len(calls[0]) == (5 if at_once else 1)


def test_fixed_slots_change_no_row(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What float32 does on CUDA: every step on the same number of slots, every prompt prefilled alone."""
    policy, tokenizer = load(tiny_llama)
    sampling = SamplingConfig(max_completion_length=9)
    wanted = GraphEngine(policy, tokenizer).generate(PROMPTS, COUNTS, KEYS, sampling)
    rows = []
    for slots in (None, 3):
        engine = GraphEngine(policy, tokenizer, batch_size=slots)
        monkeypatch.setattr(engine, "_fixed_slots", lambda spec: 16)
        rows.append(engine.generate(PROMPTS, COUNTS, KEYS, sampling))
        assert_same_rows(wanted, rows[-1])
        assert engine._held is not None
        assert engine._held[1].fixed_slots == 16
    assert torch.equal(rows[0].logprobs, rows[1].logprobs), "to the last bit"


def test_nf4_base_with_live_adapters(tiny_llama: Path) -> None:
    pytest.importorskip("bitsandbytes")
    policy, tokenizer = load(tiny_llama, quantization="nf4")
    sampling = SamplingConfig(max_completion_length=6)
    wanted = HFEngine(policy, tokenizer).generate(PROMPTS, COUNTS, KEYS, sampling)
    assert_same_rows(wanted, GraphEngine(policy, tokenizer).generate(PROMPTS, COUNTS, KEYS, sampling))


def test_an_optimizer_step_is_seen_at_once(tiny_llama: Path) -> None:
    policy, tokenizer = load(tiny_llama)
    engine = GraphEngine(policy, tokenizer)
    sampling = SamplingConfig(max_completion_length=6)
    before = engine.generate(PROMPTS, COUNTS, KEYS, sampling)
    with torch.no_grad():
        for _, parameter in policy.trainable_parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    engine.weights_changed()
    after = engine.generate(PROMPTS, COUNTS, KEYS, sampling)
    assert not torch.equal(before.logprobs[:, :1], after.logprobs[:, :1])
    assert_same_rows(HFEngine(policy, tokenizer).generate(PROMPTS, COUNTS, KEYS, sampling), after)
    for other in (SamplingConfig(temperature=0.0, max_completion_length=6), SamplingConfig(0.5, 0.8, 5, 0.01, 6)):
        wanted = HFEngine(policy, tokenizer).generate(PROMPTS, COUNTS, KEYS, other)
        assert_same_rows(wanted, engine.generate(PROMPTS, COUNTS, KEYS, other))


class _Injected(Exception):
    """A fault of the test's making."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError, _Injected])
@pytest.mark.parametrize("where", ["progress", "prefill", "cache"])
def test_a_fault_leaves_nothing_behind_and_a_repetition_gives_the_same_rows(
    error: type[BaseException], where: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, tokenizer = load(tiny_llama)
    sampling = SamplingConfig(max_completion_length=12)
    wanted = GraphEngine(policy, tokenizer).generate(PROMPTS, COUNTS, KEYS, sampling)
    engine = GraphEngine(policy, tokenizer, batch_size=3)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("injected")

    def late(rows_done: int, num_tokens: int) -> None:
        if rows_done > 3:
            fail()

    with monkeypatch.context() as patch:
        if where == "prefill":
            patch.setattr("grpo_lit.rollout.flight.prefill", fail)
        elif where == "cache":
            patch.setattr("grpo_lit.rollout.graph_runner.KVCache", fail)
        with pytest.raises(error):
            engine.generate(PROMPTS, COUNTS, KEYS, sampling, late if where == "progress" else None)
    assert engine._held is None
    engine.batch_size = 2
    assert_same_rows(wanted, engine.generate(PROMPTS, COUNTS, KEYS, sampling))


def test_release_frees_and_progress_counts(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, tokenizer = load(tiny_llama)
    engine = GraphEngine(policy, tokenizer, batch_size=4)
    flights: list[Flight] = []

    def keep(*args: Any, **kwargs: Any) -> Flight:
        flights.append(Flight(*args, **kwargs))
        return flights[-1]

    monkeypatch.setattr("grpo_lit.rollout.graph.Flight", keep)
    told: list[tuple[int, int]] = []
    rollout = engine.generate(
        PROMPTS, COUNTS, KEYS, SamplingConfig(max_completion_length=8), lambda rows, tokens: told.append((rows, tokens))
    )
    assert told == sorted(told)
    assert told[-1] == (rollout.num_rows, int(rollout.lengths.sum()))
    assert engine.stats.num_tokens == told[-1][1]
    assert flights[0]._pool.num_free == flights[0]._buffers.plan.num_pages - 1, "every page came back"
    assert engine._held is not None
    engine.release()
    assert engine._held is None
    empty = engine.generate(PROMPTS, [0] * len(PROMPTS), KEYS[:0], SamplingConfig(max_completion_length=8))
    assert empty.num_rows == 0


def test_what_it_cannot_run_falls_back_to_hf_with_a_reason(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sliding = Qwen2Config(**_SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    AutoModelForCausalLM.from_config(sliding).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(resolve_model_source(str(tiny_llama)))
    tokenizer.save_pretrained(tmp_path)
    policy = load_policy(PolicyConfig(str(tmp_path), dtype="fp32"), LoRAConfig(4))
    with pytest.raises(UnsupportedModel, match="sliding-window"):
        GraphEngine(policy, tokenizer)
    engine = build_engine(RolloutConfig(engine="graph"), policy, PromptEncoder(tokenizer))
    assert engine.name == "hf"
    assert "engine=hf instead of graph: sliding-window attention" in caplog.text
    policy, tokenizer = load(tiny_llama)
    assert build_engine(RolloutConfig(engine="graph"), policy, PromptEncoder(tokenizer)).name == "graph"
    assert build_engine(RolloutConfig(engine="auto"), policy, PromptEncoder(tokenizer)).name == "hf"


@pytest.mark.parametrize("kind", [HFEngine, GraphEngine])
def test_what_cannot_be_sampled_is_refused(kind: Any, tiny_gpt2: Path, tiny_llama: Path) -> None:
    engine = kind(*load(tiny_gpt2))
    for prompts, length, message in (
        ([[3] * 4], 62, "max_completion_length=62: accepted is at most 61: .* 4 tokens and the model 64 positions"),
        ([[3] * 65], 1, "prompts='one of 65 tokens': accepted is at most 64"),
        ([[3], []], 4, r"prompts\[1\]=\[\]: accepted is at least one token"),
    ):
        with pytest.raises(UserError, match=message):
            engine.generate(
                prompts, [1] * len(prompts), KEYS[: len(prompts)], SamplingConfig(0.0, max_completion_length=length)
            )
    longest = engine.generate([[3] * 4, []], [1, 0], KEYS[:1], SamplingConfig(max_completion_length=61))
    assert longest.num_rows == 1
    rotary = kind(*load(tiny_llama))
    positions = rotary.policy.model.config.max_position_embeddings
    assert rotary.generate([[3] * positions], [1], KEYS[:1], SamplingConfig(max_completion_length=2)).num_rows == 1
