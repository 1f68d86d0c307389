"""The planner against what real modules on the CPU hold."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen2Config

from grpo_lit.bench.shapes import SHAPES
from grpo_lit.lora import LoRAConfig
from grpo_lit.memory.fit import HEADROOM, _largest, fits, largest_micro_batch, longest_completion, peak
from grpo_lit.memory.measure import tensor_ledger
from grpo_lit.memory.plan import (
    GIB,
    MIB,
    Formats,
    StepSizes,
    kept_by_layer,
    kv_bytes_per_token,
    plan_step,
    trained_weights,
    weight_ledger,
)
from grpo_lit.memory.quantized_table import BYTES_PER_WEIGHT
from grpo_lit.memory.sizes import ModelSizes
from grpo_lit.optim import allocate_moments
from grpo_lit.policy import Policy, PolicyConfig, load_policy

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
R1_SHAPE = Qwen2Config(**SHAPES["1.5b"])
QLORA = Formats(nf4=True, lora_rank=16, lora_targets=TARGETS)


@pytest.fixture(scope="module")
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose activations are large beside its odds and ends."""
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=128,
        intermediate_size=448,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    folder = tmp_path_factory.mktemp("wide")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: Path, **kwargs: Any) -> Policy:
    return load_policy(PolicyConfig(str(folder), dtype="fp32", **kwargs), LoRAConfig(8, targets=list(TARGETS)))


def formats(**kwargs: Any) -> Formats:
    return replace(Formats(width=4, lora_rank=8, lora_targets=TARGETS), **kwargs)


def score(policy: Policy, rows: int, prompt: int, completion: int) -> Tensor:
    ids = torch.randint(3, 300, (rows, prompt + completion), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids, dtype=torch.bool)
    scores = policy.score(ids[:, :prompt], mask[:, :prompt], ids[:, prompt:], mask[:, prompt:])
    return scores.logprobs.sum()


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_what_stays_is_planned_to_the_byte(wide_llama: Path, quantization: str | None) -> None:
    policy = load(wide_llama, quantization=quantization)
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable_parameters()])
    allocate_moments(optimizer)
    score(policy, 2, 8, 8).backward()
    measured = tensor_ledger(policy.model, optimizer)
    sizes = ModelSizes.of(policy.model.config)
    own = formats(nf4=quantization == "nf4")
    planned = weight_ledger(sizes, own)
    # rotary frequencies are 64 bytes of buffers; NF4's parts are rounded up as the GPU's allocator does
    slack = 128 + (512 * 6 * len(sizes.linear) if quantization else 0)
    assert abs(planned["base weights"] - measured["base weights"]) <= slack
    assert planned["embedding, head"] == measured["embedding, head"] == 2 * 320 * 128 * 4
    assert planned["adapters"] == measured["adapters"] == trained_weights(sizes, own) * 4
    assert measured["gradients"] == planned["adapters"]
    moments = int(trained_weights(sizes, own) * own.moment_bytes)
    assert measured["optimizer"] == moments + 4 * len(optimizer.state)  # a step count each


def saved_by_layer(policy: Policy, run: Callable[[], Tensor]) -> float:
    """Bytes that autograd keeps for one layer: what three layers keep less what two do, weights left out."""
    weights = {t.untyped_storage().data_ptr() for t in policy.model.state_dict().values()}
    totals = []
    for count in (2, 3):
        seen: dict[int, int] = {}

        def pack(tensor: Tensor, seen: dict[int, int] = seen) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        layers = policy.model.model.layers
        policy.model.model.layers = layers[:count]
        policy.model.config.num_hidden_layers = count
        if policy.fused is not None:
            all_fused = policy.fused.layers
            policy.fused.layers = all_fused[:count]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            kept = run()  # the graph keeps every storage alive, so that no address is seen twice
        totals.append(sum(seen.values()))
        del kept
        policy.model.model.layers, policy.model.config.num_hidden_layers = layers, len(layers)
        if policy.fused is not None:
            policy.fused.layers = all_fused
    return float(totals[1] - totals[0])


@pytest.mark.parametrize("fused", [False, True])
def test_activations_of_a_layer_are_within_a_tenth(wide_llama: Path, fused: bool) -> None:
    # bf16, where copies in float32 are copies
    config = PolicyConfig(str(wide_llama), dtype="bf16", fused_layers=fused)
    policy = load_policy(config, LoRAConfig(8, targets=list(TARGETS)))
    rows, prompt, completion = 4, 20, 60
    saved = saved_by_layer(policy, lambda: score(policy, rows, prompt, completion))
    planned = kept_by_layer(
        ModelSizes.of(policy.model.config), formats(width=2, fused=fused), rows * (prompt + completion)
    )
    assert planned == pytest.approx(saved, rel=0.1)


def test_cache_takes_what_transformers_cache_takes(wide_llama: Path) -> None:
    policy = load(wide_llama)
    _, cache = policy.model(torch.zeros(3, 17, dtype=torch.long), use_cache=True).to_tuple()
    assert isinstance(cache, DynamicCache)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 3 * 17 * kv_bytes_per_token(ModelSizes.of(policy.model.config), formats())


def test_sizes_of_a_model_by_hand() -> None:
    """DeepSeek-R1-Distill-Qwen-1.5B's shape; the card says 1.78 B parameters."""
    sizes = ModelSizes.of(R1_SHAPE)
    layer = 1536 * 1536 * 2 + 2 * 1536 * 256 + 3 * 1536 * 8960
    assert sizes.linear_weights == 28 * layer
    assert sizes.embedding == sizes.head == 151936 * 1536
    assert sizes.total == 1_777_088_000
    # 4 bits and 8 bits for 64, 32 bits for 64 x 256
    assert weight_ledger(sizes, QLORA)["base weights"] / (28 * layer) == pytest.approx(
        0.5 + 1 / 64 + 1 / 4096, rel=2e-3
    )
    assert kv_bytes_per_token(sizes, QLORA) == 2 * 28 * 2 * 128 * 2
    assert trained_weights(sizes, QLORA) == 28 * 16 * (3072 + 1792 + 1792 + 3072)


def test_tied_and_ungated_models_are_counted(tiny_gpt2: Path) -> None:
    policy = load_policy(PolicyConfig(str(tiny_gpt2), dtype="fp32"), LoRAConfig(4, targets=["c_attn"]))
    sizes = ModelSizes.of(policy.model.config)
    assert sizes.head == 0
    assert not sizes.gated
    assert sizes.intermediate == 4 * 64
    assert sizes.total == sum(p.numel() for n, p in policy.model.named_parameters() if "lora" not in n)


def test_levers_lower_the_phase_they_are_for() -> None:
    sizes = ModelSizes.of(R1_SHAPE)
    step = StepSizes(128, 768, 4, 1, 4, 4)
    base = plan_step(sizes, QLORA, step)
    lowered = {
        "offload": ("train", "layer inputs", replace(QLORA, offload=True)),
        "tiles": ("train", "activations", replace(QLORA, chunk_tokens=256)),
        "8-bit moments": ("train", "optimizer", replace(QLORA, moment_bytes=2.04)),
        "head in 4 bits": ("rollout", "embedding, head", replace(QLORA, head_bytes=0.52)),
    }
    for name, (phase, kind, own) in lowered.items():
        after = plan_step(sizes, own, step)
        assert after[phase].kinds[kind] < 0.7 * base[phase].kinds[kind] or name == "tiles", name
        assert after[phase].total < base[phase].total, name
    none = plan_step(sizes, replace(QLORA, checkpointed=0), step)["train"].total
    assert none > base["train"].total + 4 * GIB


def test_largest_sizes_fit_and_one_more_does_not() -> None:
    sizes = ModelSizes.of(R1_SHAPE)
    step = StepSizes(128, 768, 4, 1, 1, 1)
    budget = int(7.4 * GIB)
    longest = longest_completion(sizes, QLORA, step, budget, 131072)
    assert 16384 <= longest < 131072
    assert fits(sizes, QLORA, step.with_completions(longest), budget)
    assert not fits(sizes, QLORA, step.with_completions(longest + 1), budget)
    assert longest_completion(sizes, QLORA, step, 80 * GIB, 131072) == 131072 - 128
    rows = largest_micro_batch(sizes, QLORA, step.with_completions(8192), budget, 64)
    assert 1 <= rows < 64
    assert not fits(sizes, QLORA, replace(step, completion_tokens=8192, micro_rows=rows + 1), budget)
    assert longest_completion(sizes, QLORA, step, 1 * GIB) == 0
    assert peak(sizes, QLORA, step).total < 2.3 * GIB + 32 * MIB


@pytest.mark.parametrize(
    "own",
    [
        QLORA,
        replace(QLORA, offload=True),
        replace(QLORA, checkpointed=14),
        replace(QLORA, fused=False, mlp_tile=512, checkpointed=14),
    ],
)
def test_longer_completions_never_take_less(own: Formats) -> None:
    """Chunks of the feed-forward part are equal, so that one token more can make each of them smaller."""
    sizes, step = ModelSizes.of(R1_SHAPE), StepSizes(1, 1, 1, 1, 1, 1)
    tokens = sorted([1, 2, 510, 511, 512, 513, *range(1900, 2200, 17), 2047, 2048, 3000, 4095, 4096, 4097, 8191, 8192])
    peaks = [plan_step(sizes, own, step.with_completions(t))["train"].total for t in tokens]
    assert all(before <= after for before, after in pairwise(peaks))
    assert peaks[0] < 0.9 * peaks[-1]


def test_the_longest_completion_is_longer_than_none_that_does_not_fit() -> None:
    sizes, step = ModelSizes.of(R1_SHAPE), StepSizes(512, 1, 1, 1, 1, 1)
    full = plan_step(sizes, QLORA, step.with_completions(1536))["train"].total  # 2048 tokens, one full chunk
    for less in (45, 25, 5, -15):
        budget = int((full - less * MIB) / HEADROOM)
        longest = longest_completion(sizes, QLORA, step, budget, 4096)
        assert 1000 < longest < 3000
        assert all(fits(sizes, QLORA, step.with_completions(t), budget) == (t <= longest) for t in range(1, 3584, 53))


def test_the_search_finds_every_limit() -> None:
    assert [_largest(100, lambda n, last=last: n <= last) for last in range(102)] == [*range(101), 100]  # type: ignore[misc]


RECORDED = {
    "base": (QLORA, 768, 4),
    "16384 tokens": (QLORA, 16384, 1),
    "45568 tokens, random": (QLORA, 45568, 1),
    "feed-forward in tiles of 512": (replace(QLORA, chunk_tokens=512, mlp_tile=512), 768, 4),
    "embedding, head nf4": (replace(QLORA, head_bytes=BYTES_PER_WEIGHT["nf4"]), 768, 4),
    "embedding, head int8": (replace(QLORA, head_bytes=BYTES_PER_WEIGHT["int8"], engine="hf"), 768, 4),
    "offload and nf4 head": (replace(QLORA, head_bytes=BYTES_PER_WEIGHT["nf4"], offload=True), 768, 4),
}


def test_predictions_are_within_two_percent_of_what_an_h200_measured() -> None:
    """Loading left out, whose weights a benchmark draws on the device, and the first rollout, which times a copy."""
    with (Path(__file__).parents[2] / "docs/results/memory_h200.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] != "load"]
    rows = [row for row in rows if (row["case"], row["phase"]) != ("base", "rollout")]
    assert {row["case"] for row in rows} == set(RECORDED)
    for row in rows:
        own, tokens, micro_rows = RECORDED[row["case"]]
        step = StepSizes(128, tokens, 4, 1, micro_rows, micro_rows)
        planned = plan_step(ModelSizes.of(R1_SHAPE), own, step)[row["phase"]].total / MIB
        assert planned == pytest.approx(float(row["allocated_mib"]), rel=0.02), row
