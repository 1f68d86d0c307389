"""The decode ops in torch, against transformers' own modules; the Triton kernels are in decode_triton_cases.py."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from grpo_lit.errors import UserError
from grpo_lit.kernels import (
    PAGE,
    LoraUpdate,
    Nf4Weight,
    RmsNorm,
    add_layer_norm,
    add_rms_norm,
    decode_linear,
    gated_activation,
    paged_attention,
    rope_cache,
    sample_token,
)
from grpo_lit.lora import LoRALinear
from grpo_lit.rollout.sampling import sample_tokens

GEN = torch.Generator()


@pytest.fixture(autouse=True)
def _seed():
    GEN.manual_seed(0)


def randn(*shape):
    return torch.randn(*shape, generator=GEN)


def cache(num_pages, kv_heads, width, fill=float("nan")):
    return [torch.full((num_pages, kv_heads, PAGE, width), fill) for _ in range(2)]


def test_attention_reads_the_filled_positions_of_each_rows_pages():
    heads, kv_heads, width, lengths = 6, 2, 8, [1, PAGE, PAGE + 1, 150, 0]
    k_pages, v_pages = cache(16, kv_heads, width)  # nan wherever nothing is written
    table = torch.randperm(16, generator=GEN)[:15].view(5, 3).int()
    table[4] = 99  # of an empty row: never followed
    q, want = randn(5, heads, width), torch.zeros(5, heads, width)
    for r, length in enumerate(lengths[:4]):
        k, v = randn(kv_heads, length, width), randn(kv_heads, length, width)
        for t in range(length):
            k_pages[table[r, t // PAGE], :, t % PAGE] = k[:, t]
            v_pages[table[r, t // PAGE], :, t % PAGE] = v[:, t]
        k, v = (u.repeat_interleave(heads // kv_heads, 0)[None] for u in (k, v))
        want[r] = functional.scaled_dot_product_attention(q[r, None, :, None], k, v, scale=0.3)[0, :, 0]
    got = paged_attention(q, k_pages, v_pages, table, torch.tensor(lengths).int(), scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(got[4], torch.zeros_like(got[4]))


@pytest.mark.parametrize("per_row", [False, True], ids=["table", "per row"])
def test_rope_cache_is_what_qwen3_does_before_attention(per_row):
    heads, kv_heads, width, rows = 4, 2, 16, 3
    config = Qwen3Config(
        hidden_size=64, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=width, num_hidden_layers=1
    )
    q_norm, k_norm = (qwen3.Qwen3RMSNorm(width, eps=1e-5) for _ in range(2))
    q_norm.weight.data, k_norm.weight.data = randn(width), randn(width)
    positions = torch.tensor([70, 5, 127]).int()
    rotary = qwen3.Qwen3RotaryEmbedding(config)
    qkv = randn(rows, (heads + 2 * kv_heads) * width)
    q, k, v = qkv.view(rows, -1, width).split([heads, kv_heads, kv_heads], 1)
    at = positions.long()[:, None]
    cos, sin = rotary(qkv, at)  # (rows, 1, width)
    want_q, want_k = qwen3.apply_rotary_pos_emb(q_norm(q)[:, None], k_norm(k)[:, None], cos, sin, unsqueeze_dim=2)
    if not per_row:
        cos, sin = (u[0] for u in rotary(qkv, torch.arange(128)[None]))
    k_pages, v_pages = cache(8, kv_heads, width)
    table = torch.tensor([[3, 1], [4, 0], [2, 6]]).int()
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads}
    norms = {"q_norm": q_norm.weight, "k_norm": k_norm.weight, "eps": 1e-5}
    got = rope_cache(qkv, k_pages, v_pages, table, positions, cos=cos, sin=sin, **norms, **sizes)
    torch.testing.assert_close(got, want_q[:, 0], rtol=1e-6, atol=1e-6)
    for r, (page, slot) in enumerate([(1, 6), (4, 5), (6, 63)]):
        torch.testing.assert_close(k_pages[page, :, slot], want_k[r, 0], rtol=1e-6, atol=1e-6)
        assert torch.equal(v_pages[page, :, slot], v[r])
    assert k_pages.isfinite().sum() == v_pages.isfinite().sum() == rows * kv_heads * width  # nothing else written


@pytest.mark.parametrize("positions", [[3, -1, 64, -1], [-1, 2, -1, -1], [-1, -1, -1, -1]])
def test_rows_without_a_position_write_nothing(positions):
    k_pages, v_pages = cache(8, 2, 8, fill=7.0)
    table = torch.zeros(4, 2).int()  # rows that have ended still point at pages that others own by now
    table[0], table[1], table[2] = torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6])
    qkv = randn(4, 8 * 8)
    rope_cache(qkv, k_pages, v_pages, table, torch.tensor(positions).int(), num_heads=4, num_kv_heads=2)
    written = {(int(table[r, p // PAGE]), p % PAGE): r for r, p in enumerate(positions) if p >= 0}
    for page in range(8):
        for slot in range(PAGE):
            row = written.get((page, slot))
            k = 7.0 * torch.ones(2, 8) if row is None else qkv[row].view(8, 8)[4:6]
            assert torch.equal(k_pages[page, :, slot], k)
    assert (v_pages != 7.0).sum() == len(written) * 16


def test_norms_are_transformers_norms_of_the_sum():
    x, residual, weight, bias = randn(3, 64), randn(3, 64), randn(64), randn(64)
    norm = qwen3.Qwen3RMSNorm(64, eps=1e-3)
    norm.weight.data = weight
    got, total = add_rms_norm(x.bfloat16(), residual.bfloat16(), weight.bfloat16(), 1e-3)
    assert torch.equal(total, x.bfloat16() + residual.bfloat16())
    assert torch.equal(got, copy.deepcopy(norm).bfloat16()(total))
    got, total = add_rms_norm(x, None, weight, 1e-3)
    assert torch.equal(total, x)
    assert torch.equal(got, norm(x))
    got, total = add_layer_norm(x, residual, weight, bias, 1e-3)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(got, functional.layer_norm(total, (64,), weight, bias, 1e-3))


def test_gated_activation_gates_with_the_first_half():
    gate_up = randn(3, 20)
    want = functional.silu(gate_up[:, :10]) * gate_up[:, 10:]
    assert torch.equal(gated_activation(gate_up), want)
    want = functional.gelu(gate_up[:, :10], approximate="tanh") * gate_up[:, 10:]
    assert torch.equal(gated_activation(gate_up, "gelu_pytorch_tanh"), want)


def test_linear_is_the_training_paths_modules_side_by_side():
    layers = [LoRALinear(torch.nn.Linear(32, n, bias=n != 5), rank=4, alpha=12.0) for n in (8, 5)]
    for layer in layers:
        layer.lora_B.data = randn(*layer.lora_B.shape)
    plain = torch.nn.Linear(32, 6, bias=False)
    x, residual = randn(3, 32), randn(3, 19)
    with torch.no_grad():
        want = torch.cat([layers[0](x), layers[1](x), plain(x)], dim=1) + residual
    updates = [LoraUpdate(layer.lora_A, layer.lora_B, layer.scaling) for layer in layers]
    weights = [layers[0].base_layer.weight, layers[1].base_layer.weight, plain.weight]
    got = decode_linear(
        x, weights, bias=[layers[0].base_layer.bias, None, None], lora=[*updates, None], residual=residual
    )
    assert not got.requires_grad
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    one = decode_linear(x, weights[0], bias=layers[0].base_layer.bias, lora=updates[0])
    torch.testing.assert_close(one, want[:, :8] - residual[:, :8], rtol=1e-5, atol=1e-5)


def test_linear_with_norm_and_activation_is_the_steps_one_by_one():
    x, weight = randn(3, 32), randn(32)
    gate, up = randn(10, 32), randn(32, 10)
    got = decode_linear(x, [gate, up.t()], norm=RmsNorm(weight, 1e-2), activation="silu")
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2) * weight
    torch.testing.assert_close(got, functional.silu(normed @ gate.t()) * (normed @ up), rtol=1e-5, atol=1e-5)


def test_linear_over_nf4_multiplies_by_bitsandbytes_numbers():
    functional_4bit = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes has no build here")
    data, state = functional_4bit.quantize_4bit(randn(20, 128), quant_type="nf4", compress_statistics=True)
    x = randn(2, 128)
    got = decode_linear(x, Nf4Weight.from_bitsandbytes(data, state))
    want = x @ functional_4bit.dequantize_4bit(data, state).float().t()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert want.abs().max() > 5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampling_makes_the_rollouts_choice(temperature):
    logits = randn(50, 300) * 3
    logits[:, 17] = -torch.inf
    uniform = torch.rand(50, generator=GEN, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, 1 - 2**-53
    ids, logprobs = sample_token(logits, uniform, temperature=temperature)
    want = (logits / temperature).log_softmax(-1)
    assert torch.equal(ids, sample_tokens(want, uniform))
    assert torch.equal(logprobs, want.gather(1, ids[:, None])[:, 0])
    assert ids[:2].tolist() == [0, 299]


def test_greedy_takes_the_largest_and_its_plain_log_prob():
    logits = randn(5, 30)
    ids, logprobs = sample_token(logits, torch.zeros(5, dtype=torch.float64), temperature=0)
    assert torch.equal(ids, logits.argmax(-1))
    assert torch.equal(logprobs, logits.log_softmax(-1).max(-1).values)


def test_mistakes_are_named():
    x, weight = randn(2, 8), randn(4, 8)
    for match, wrong in {
        "weight=": lambda: decode_linear(x, randn(4, 9)),
        "bias=": lambda: decode_linear(x, weight, bias=randn(5)),
        "lora=": lambda: decode_linear(x, weight, lora=LoraUpdate(randn(2, 8), randn(5, 2), 1.0)),
        "residual=": lambda: decode_linear(x, weight, residual=randn(2, 5)),
        "norm=": lambda: decode_linear(x, weight, norm=RmsNorm(randn(4), 1e-6)),
        "activation=": lambda: gated_activation(x, "sigmoid"),
        "two weights of one size": lambda: decode_linear(x, [weight, randn(5, 8)], activation="silu"),
        "temperature=": lambda: sample_token(x, torch.zeros(2, dtype=torch.float64), temperature=-1.0),
        "uniform=": lambda: sample_token(x, torch.zeros(2)),
        "gate_up=": lambda: gated_activation(randn(2, 3)),
        "eps|weight=": lambda: add_rms_norm(x, None, randn(4), 1e-6),
        "k_pages=": lambda: paged_attention(
            randn(2, 2, 8), randn(4, 1, 16, 8), randn(4, 1, 16, 8), torch.zeros(2, 1).int(), torch.ones(2).int()
        ),
        "cos=": lambda: rope_cache(
            randn(2, 32),
            *cache(2, 1, 8),
            torch.zeros(2, 1).int(),
            torch.zeros(2).int(),
            cos=randn(2, 8),
            num_heads=2,
            num_kv_heads=1,
        ),
    }.items():
        with pytest.raises(UserError, match=match):
            wrong()
