"""The decode ops' Triton kernels against float64; run by test_decode_triton.py, in a process of its own.

On the CPU under Triton's interpreter (TRITON_INTERPRET=1), on a GPU as compiled code and with larger sizes.
The rule: the error may be at most twice that of plain torch in the same dtype, plus a little, measured on the
scale of the tensor.
"""

from __future__ import annotations

import pytest
import torch

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
from grpo_lit.kernels.dispatch import interpreting

DEVICE = "cpu" if interpreting() else "cuda"
# The interpreter cuts float32 off to bfloat16 where the GPU rounds: up to 2^-7 of a value.
SLACK = {torch.float32: 2e-6, torch.bfloat16: 1e-3 if DEVICE == "cuda" else 8e-3, torch.float16: 2e-4}
DTYPES = list(SLACK)
IMPLS = ("triton", "torch")
only_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="a size for the GPU: minutes in the interpreter")
GEN = torch.Generator(DEVICE)


@pytest.fixture(autouse=True)
def _seed():
    GEN.manual_seed(0)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=GEN, device=DEVICE).to(dtype)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_close(got, same_dtype, true, dtype):
    """The rule at the top of this file."""
    assert got.dtype == same_dtype.dtype == dtype
    got, same_dtype, true = (t.double() for t in (got, same_dtype, true))
    scale = true.abs().max()
    assert scale > 0  # a comparison with nothing would prove nothing
    allowed = 2 * (same_dtype - true).abs().max() + SLACK[dtype] * scale
    assert (got - true).abs().max() <= allowed


def pages_of(kv_heads, width, lengths, dtype, spare=2):
    """Random pages with nan wherever nothing is written, and the rows' tables."""
    per_row = max(1, -(-max(lengths) // PAGE)) + spare
    count = per_row * len(lengths)
    table = torch.randperm(count, generator=GEN, device=DEVICE).view(len(lengths), per_row).int()
    k, v = (randn(count, kv_heads, PAGE, width, dtype=dtype) for _ in range(2))
    for r, length in enumerate(lengths):
        for p in range(per_row):
            filled = min(max(length - p * PAGE, 0), PAGE)
            k[table[r, p], :, filled:] = v[table[r, p], :, filled:] = torch.nan
    return k, v, table


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "lengths"),
    [
        (6, 2, 64, [1, 0, 130]),
        (3, 3, 16, [64, 65]),
        (2, 1, 80, [200]),
        pytest.param(12, 2, 128, [900, 1, 64, 333], marks=only_gpu),
        pytest.param(12, 2, 128, [(i * 37) % 1000 for i in range(128)], marks=only_gpu),
    ],
    ids=str,
)
def test_paged_attention(heads, kv_heads, width, lengths, dtype):
    k, v, table = pages_of(kv_heads, width, lengths, dtype)
    q = randn(len(lengths), heads, width, dtype=dtype)
    true = torch.zeros(len(lengths), heads, width, dtype=torch.float64, device=DEVICE)
    for r, length in enumerate(lengths):
        if length:
            rows = [u[table[r]].transpose(0, 1).flatten(1, 2)[:, :length].double() for u in (k, v)]
            keys, values = (u.repeat_interleave(heads // kv_heads, 0) for u in rows)
            shares = (0.2 * (keys @ q[r].double()[:, :, None])).softmax(1)
            true[r] = (shares * values).sum(1)
    got, same = (paged_attention(q, k, v, table, int32(lengths), scale=0.2, impl=impl) for impl in IMPLS)
    assert_close(got, same, true, dtype)
    again = paged_attention(q, k, v, table, int32(lengths), scale=0.2, impl="triton")
    assert torch.equal(again, got)  # the arrival counters are back at 0, and the order of sums is fixed


@pytest.mark.parametrize(("splits", "spare"), [(1, 2), (2, 2), (8, 2), (8, 40)])
def test_paged_attention_however_it_is_split(splits, spare):
    from grpo_lit.kernels._triton.paged_attention import attend

    lengths = [300, 64, 0, 1]
    k, v, table = pages_of(1, 16, lengths, torch.float32, spare)
    q = randn(4, 2, 16)
    want = paged_attention(q, k, v, table, int32(lengths), impl="torch")
    torch.testing.assert_close(attend(q, k, v, table, int32(lengths), 0.25, splits=splits), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(4, 2, 32), (3, 1, 80), pytest.param(12, 2, 128, marks=only_gpu)], ids=str
)
def test_rope_cache(heads, kv_heads, width, norm, dtype):
    positions = [70, -1, 5, 63, -1, 64]
    qkv = randn(6, (heads + 2 * kv_heads) * width, dtype=dtype)
    angles = torch.rand(128, width, generator=GEN, device=DEVICE) * 6
    tables = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    norms = {"q_norm": randn(width, dtype=dtype), "k_norm": randn(width, dtype=dtype)} if norm else {}
    page_table = torch.arange(12, device=DEVICE).view(6, 2).int()
    page_table[1], page_table[4] = page_table[0], page_table[0]  # rows that have ended
    results = []
    for impl in (*IMPLS, "true"):
        wide = torch.float64 if impl == "true" else dtype
        pages = [torch.full((12, kv_heads, PAGE, width), 7.0, dtype=wide, device=DEVICE) for _ in range(2)]
        given = {name: u.to(wide) for name, u in (tables | norms).items()}
        q = rope_cache(
            qkv.to(wide),
            *pages,
            page_table,
            int32(positions),
            **given,
            eps=1e-3,
            num_heads=heads,
            num_kv_heads=kv_heads,
            impl="torch" if impl == "true" else impl,
        )
        results.append((q[[0, 2, 3, 5]], *pages))
    for got, same, true in zip(*results, strict=True):
        assert_close(got, same, true, dtype)
    assert torch.equal(results[0][1] == 7.0, results[1][1] == 7.0)
    assert torch.equal(results[0][2], results[1][2])  # values are copied


def test_rope_cache_takes_angles_by_row_and_none_at_all():
    positions, qkv = int32([3, 1]), randn(2, 4 * 16)
    cos, sin = randn(9, 16), randn(9, 16)
    page_table = int32([[0], [1]])
    at = positions.long()
    for angles in ({}, {"cos": cos[at][:, None], "sin": sin[at][:, None]}, {"cos": cos, "sin": sin}):
        pages = [torch.zeros(2, 1, PAGE, 16, device=DEVICE) for _ in range(4)]
        got, want = (
            rope_cache(qkv, *two, page_table, positions, num_heads=2, num_kv_heads=1, impl=impl, **angles)
            for two, impl in zip((pages[:2], pages[2:]), IMPLS, strict=True)
        )
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(pages[0], pages[2])
        assert pages[0].abs().max() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("width", [64, 100, pytest.param(1536, marks=only_gpu)])
def test_norms(width, residual, dtype):
    x, other = randn(3, width, dtype=dtype) + 1, randn(3, width, dtype=dtype) if residual else None
    weight, bias = randn(width, dtype=dtype), randn(width, dtype=dtype)
    total = (x if other is None else x + other).double()
    centred = total - total.mean(1, keepdim=True)
    for op, args, wide in ((add_rms_norm, (weight,), total), (add_layer_norm, (weight, bias), centred)):
        true = wide * (wide.square().mean(1, keepdim=True) + 1e-3).rsqrt() * weight.double()
        true = true + (bias.double() if len(args) == 2 else 0)
        (got, got_total), (same, same_total) = (op(x, other, *args, 1e-3, impl=impl) for impl in IMPLS)
        assert_close(got, same, true, dtype)
        assert_close(got_total, same_total, total, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_gated_activation(activation, dtype):
    gate_up = randn(3, 2 * 1100, dtype=dtype) * 2
    true = gated_activation(gate_up.double(), activation)
    got, same = (gated_activation(gate_up, activation, impl=impl) for impl in IMPLS)
    assert_close(got, same, true, dtype)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [50, 5000, pytest.param(151936, marks=only_gpu)])
def test_sample_token(vocab, dtype, temperature):
    rows = 40
    logits = randn(rows, vocab, dtype=dtype) * 3
    logits[:, vocab // 3 : vocab // 3 + 10] = -torch.inf
    logits[1, 2 * vocab // 3 :] = -torch.inf
    uniform = torch.rand(rows, generator=GEN, device=DEVICE, dtype=torch.float64)
    uniform[:4] = torch.tensor([0.0, 1 - 2**-53, 1 - 2**-53, 0.5], dtype=torch.float64)
    ids, logprobs = sample_token(logits, uniform, temperature=temperature, impl="triton")
    true = (logits.double() / (temperature or 1.0)).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), true.gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    if temperature == 0:
        assert torch.equal(true.gather(1, ids[:, None])[:, 0], true.max(-1).values)
        return
    assert ids[1] == 2 * vocab // 3 - 1
    after = true.exp().cumsum(-1).gather(1, ids[:, None])[:, 0]
    before = after - true.exp().gather(1, ids[:, None])[:, 0]
    assert (before <= uniform + 1e-6).all()
    assert (uniform <= after + 1e-6).all()
    want, _ = sample_token(logits, uniform, temperature=temperature, impl="torch")
    assert (ids == want).float().mean() > 0.95  # others lie on a boundary up to rounding


def test_a_draw_does_not_depend_on_its_company():
    logits, uniform = randn(5, 5000), torch.rand(5, generator=GEN, device=DEVICE, dtype=torch.float64)
    ids, logprobs = sample_token(logits, uniform, impl="triton")
    for r in range(5):
        alone = sample_token(logits[r : r + 1], uniform[r : r + 1], impl="triton")
        assert torch.equal(alone[0], ids[r : r + 1])
        assert torch.equal(alone[1], logprobs[r : r + 1])


def nf4(matrix, nested=True):
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes isn't installed")
    options = {"quant_type": "nf4", "compress_statistics": nested, "blocksize": 64}
    return Nf4Weight.from_bitsandbytes(*functional.quantize_4bit(matrix, **options))


def true_linear(x, weights, biases, loras, residual, norm, activation):
    x = x.double()
    if norm is not None:
        x = x * (x.square().mean(1, keepdim=True) + norm.eps).rsqrt() * norm.weight.double()
    outs = []
    for weight, bias, lora in zip(weights, biases, loras, strict=True):
        dense = weight.double() if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float64)
        y = x @ dense.T + (0 if bias is None else bias.double())
        if lora is not None:
            y = y + (x @ lora.a.double().T) @ lora.b.double().T * lora.scaling
        outs.append(y)
    out = torch.cat(outs, 1) if activation is None else gated_activation(torch.cat(outs, 1), activation)
    return out + (0 if residual is None else residual.double())


def check_linear(rows, width, columns, dtype, *, packed, bias, rank, activation=None, residual=False, norm=False):
    weights = [randn(n, width, dtype=dtype) * width**-0.5 for n in columns]
    if packed is not None:
        weights = [nf4(weight, packed) for weight in weights]
    biases = [randn(n, dtype=dtype) if use else None for n, use in zip(columns, bias, strict=True)]
    loras = [
        LoraUpdate(randn(r, width) * width**-0.5, randn(n, r), 0.5) if r else None
        for n, r in zip(columns, rank, strict=True)
    ]
    x = randn(rows, width, dtype=dtype)
    total = columns[0] if activation else sum(columns)
    added = {
        "residual": randn(rows, total, dtype=dtype) if residual else None,
        "norm": RmsNorm(randn(width, dtype=dtype), 1e-3) if norm else None,
        "activation": activation,
    }
    true = true_linear(x, weights, biases, loras, **added)
    # once more where K is split over programs: the arrival counters are back at 0, and the order of sums is fixed
    twice = DEVICE == "cuda" or (width > 1000 and packed is None)
    got, same, *again = (
        decode_linear(x, weights, bias=biases, lora=loras, impl=impl, **added) for impl in (*IMPLS, *["triton"] * twice)
    )
    assert_close(got, same, true, dtype)
    assert all(torch.equal(other, got) for other in again)


LINEARS = {
    "one matrix": {"columns": [100], "bias": [True], "rank": [0], "residual": True},
    "qkv": {"columns": [96, 40, 32], "bias": [True, False, True], "rank": [5, 0, 16], "norm": True},
    "gate and up": {"columns": [72, 72], "bias": [False, True], "rank": [0, 20], "activation": "silu"},
}


@pytest.mark.parametrize("packed", [None, True, False], ids=["dense", "nf4", "nf4, plain scales"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 1088), (20, 640), (40, 128)], ids=str)
@pytest.mark.parametrize("case", LINEARS)
def test_decode_linear(case, rows, width, dtype, packed):
    if DEVICE == "cpu" and (rows > 1 and dtype == torch.float16 or packed is False and rows not in (1, 5)):
        pytest.skip("takes the interpreter too long; one of each is run")
    check_linear(rows, width, dtype=dtype, packed=packed, **LINEARS[case])


@pytest.mark.parametrize("plan", [(16, 3, 1, 4, 4, 8, 4), (32, 2, 2, 2, 3, 0, 2), (32, 2, 4, 2, 3, 0, 1)], ids=str)
@pytest.mark.parametrize(("rows", "activation"), [(3, None), (12, "silu")])
def test_nf4_products_however_they_are_cut(rows, activation, plan):
    """21 blocks along K over programs, warps and steps that don't divide them; the order of sums is fixed."""
    from grpo_lit.kernels._triton.decode_linear import Plan, product
    from grpo_lit.kernels.decode_linear import Part

    parts = [Part(nf4(randn(70, 1344, dtype=torch.bfloat16)), None, None) for _ in range(2)]
    x = randn(rows, 1344, dtype=torch.bfloat16)
    x[-1] *= 100  # a row taken for another would show
    got, again = (product(x, parts, None, None, activation, plan=Plan(*plan)) for _ in range(2))
    same = decode_linear(x, [part.weight for part in parts], activation=activation, impl="torch")
    true = true_linear(x, [part.weight for part in parts], [None] * 2, [None] * 2, None, None, activation)
    assert_close(got, same, true, torch.bfloat16)
    assert_close(got[:-1], same[:-1], true[:-1], torch.bfloat16)
    assert torch.equal(again, got)


MODEL = {
    "qkv": (1536, {"columns": [1536, 256, 256], "bias": [True] * 3, "rank": [16] * 3, "norm": True}),
    "o": (1536, {"columns": [1536], "bias": [False], "rank": [16], "residual": True}),
    "gate and up": (1536, {"columns": [8960, 8960], "bias": [False] * 2, "rank": [0] * 2, "activation": "silu"}),
    "down": (8960, {"columns": [1536], "bias": [False], "rank": [0], "residual": True}),
    "head": (1536, {"columns": [151936], "bias": [False], "rank": [0]}),
}


@only_gpu
@pytest.mark.parametrize("packed", [None, True], ids=["dense", "nf4"])
@pytest.mark.parametrize("rows", [1, 4, 32, 128])
@pytest.mark.parametrize("case", MODEL)
def test_decode_linear_at_the_size_of_a_model(case, rows, packed):
    width, sizes = MODEL[case]
    check_linear(rows, width, dtype=torch.bfloat16, packed=packed, **sizes)


def test_what_the_kernels_do_not_take_goes_through_torch():
    x, matrix = randn(3, 64), randn(64, 48)
    torch.testing.assert_close(decode_linear(x, matrix.t(), impl="triton"), x @ matrix, rtol=1e-4, atol=1e-4)
    x, matrix = x.bfloat16(), matrix.bfloat16()
    want = decode_linear(x, matrix.t().contiguous(), impl="torch")
    assert torch.equal(decode_linear(x, matrix.t(), impl="triton"), decode_linear(x, matrix.t(), impl="torch"))
    torch.testing.assert_close(decode_linear(x, matrix.t(), impl="triton"), want, rtol=2e-2, atol=2e-2)


def test_a_plan_fits_the_shared_memory_of_small_gpus():
    from grpo_lit.kernels._triton.decode_linear import dense_plan, fewer_stages

    for rows in (1, 32):
        plan = dense_plan(rows, 17920, 1536, True)
        for limit in (101376, 232448):  # of compute capability 8.6 and 9.0
            fitted = fewer_stages(plan, 2, max(16, rows), limit)
            assert fitted.num_stages * (2 * plan.columns + max(16, rows)) * plan.depth * 2 <= limit
            assert fitted.num_stages >= 2
    assert fewer_stages(plan, 2, 32, 232448) == plan
