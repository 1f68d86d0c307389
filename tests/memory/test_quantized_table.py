from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_lit.errors import UserError
from grpo_lit.lora import LoRAConfig
from grpo_lit.memory.measure import tensor_ledger
from grpo_lit.memory.quantized_table import BYTES_PER_WEIGHT, TILE_ROWS, QuantizedHead, QuantizedTable
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.rollout.base import left_pad

KINDS = ("nf4", "int8")
VOCAB = 46  # of tiny_llama
CPU = torch.device("cpu")


def table(kind: Any, rows: int = 300, dtype: torch.dtype = torch.float32) -> tuple[Tensor, QuantizedTable]:
    weight = torch.randn(rows, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 0, rows)[:, None]
    return weight, QuantizedTable(weight, kind, dtype, CPU)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_tiles_and_matrix_are_the_same_numbers_near_the_weight(kind: str) -> None:
    weight, quantized = table(kind, rows=TILE_ROWS + 37)
    matrix = quantized.matrix()
    assert matrix.shape == weight.shape
    ids = torch.tensor([[0, 5, TILE_ROWS - 1], [TILE_ROWS, TILE_ROWS + 36, 5]])
    assert torch.equal(quantized.rows(ids), matrix[ids])
    assert torch.equal(quantized.tile(7, 90), matrix[7:90])
    error = (matrix - weight).norm(dim=1) / weight.norm(dim=1)
    # rounding to 127 levels of the largest of 128 normal numbers; NF4 of normal numbers is off by about 9 %
    assert error.max() < (0.012 if kind == "int8" else 0.13)
    assert error.min() > 1e-4
    bytes_per_weight = sum(buffer.nbytes for buffer in quantized.buffers()) / weight.numel()
    assert bytes_per_weight == pytest.approx(BYTES_PER_WEIGHT[kind], abs=0.04)


def test_nf4_is_that_of_the_quantizer() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    weight, quantized = table("nf4")
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    assert torch.equal(quantized.matrix(), functional.dequantize_4bit(packed, state))


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_multiplies_by_the_table(kind: Any) -> None:
    _, quantized = table(kind, rows=TILE_ROWS + 3)
    bias = torch.randn(TILE_ROWS + 3)
    x = torch.randn(2, 5, 128)
    head = QuantizedHead(quantized, bias)
    assert torch.allclose(head(x), x @ quantized.matrix().t() + bias, atol=1e-4)
    assert torch.equal(head.weight, quantized.matrix())


def load(folder: Path, **kwargs: Any) -> Policy:
    policy = load_policy(PolicyConfig(str(folder), dtype="fp32", **kwargs), LoRAConfig(4), seed=1)
    torch.manual_seed(1)
    for name, parameter in policy.trainable_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.1)
    return policy


def score(policy: Policy) -> tuple[Tensor, Tensor]:
    policy.zero_grad()
    prompts = left_pad([[3, 4, 5], [10]], 0)
    completions = torch.tensor([[5, 6, 7], [8, 9, 4]])
    logprobs = policy.score(*prompts, completions, torch.ones_like(completions, dtype=torch.bool)).logprobs
    (logprobs * torch.tensor([[1.0], [-0.5]])).sum().backward()
    return logprobs.detach(), torch.cat([p.grad.flatten() for _, p in policy.trainable_parameters()])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_scores_as_one_with_the_rounded_weights(tiny_llama: Path, kind: str, fused: bool) -> None:
    policy = load(tiny_llama, head_quantization=kind, fused_layers=fused)
    rounded = load(tiny_llama, fused_layers=fused)
    plain = score(rounded)
    with torch.no_grad():
        for get in ("get_input_embeddings", "get_output_embeddings"):
            getattr(rounded.model, get)().weight.copy_(getattr(policy.model, get)().table.matrix())
    expected, found = score(rounded), score(policy)
    for mine, other, unrounded in zip(found, expected, plain, strict=True):
        assert (mine - other).norm() <= 1e-5 * other.norm()
        assert (mine - unrounded).norm() > 1e-4 * other.norm()
    ledger = tensor_ledger(policy.model)
    scales = 2 * VOCAB * 4 * (64 // 64 if kind == "nf4" else 1)
    assert ledger["embedding, head"] - scales == pytest.approx(2 * VOCAB * (32 if kind == "nf4" else 64), abs=2 * 64)
    generated = policy.model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=3, do_sample=False)
    assert generated.shape == (1, 6)


def test_a_tied_table_is_held_once(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, tie_word_embeddings=True)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    policy = load(tmp_path, head_quantization="int8")
    assert policy.model.get_input_embeddings().table is policy.model.get_output_embeddings().table
    assert tensor_ledger(policy.model)["embedding, head"] == 64 * 64 + 64 * 4
    drawn = load(tmp_path, head_quantization="nf4", random_weights=True, quantization="nf4")
    assert drawn.model.get_input_embeddings().table is drawn.model.get_output_embeddings().table
    assert not score(drawn)[1].isnan().any()


def test_refusals(tiny_llama: Path, tiny_gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="model.lora"):
        load_policy(PolicyConfig(str(tiny_llama), head_quantization="int8"), None)
    with pytest.raises(UserError, match="rows of 96"):
        QuantizedTable(torch.ones(4, 96), "nf4", torch.float32, CPU)


def test_the_graph_engine_decodes_with_it(tiny_llama: Path) -> None:
    """Its log-probs are those of the scoring pass, which multiplies by the whole table."""
    from grpo_lit.prompts import load_tokenizer
    from grpo_lit.rollout.base import SamplingConfig
    from grpo_lit.rollout.graph import GraphEngine
    from grpo_lit.rollout.model_reader import UnsupportedModel, read_model
    from grpo_lit.rollout.sampling import row_keys

    policy = load(tiny_llama, head_quantization="nf4")
    engine = GraphEngine(policy, load_tokenizer(policy.source))
    keys = row_keys(0, 0, [0, 0, 1, 1], [0, 1, 0, 1])
    rollout = engine.generate([[3, 4, 5], [10]], [2, 2], keys, SamplingConfig(max_completion_length=6))
    with torch.no_grad():
        scores = policy.score(rollout.prompt_ids, rollout.prompt_mask, rollout.completion_ids, rollout.completion_mask)
    assert torch.allclose(scores.logprobs, rollout.logprobs, atol=1e-4)
    assert scores.logprobs.abs().max() > 0.5
    with pytest.raises(UnsupportedModel, match="int8"):
        read_model(load(tiny_llama, head_quantization="int8"))
