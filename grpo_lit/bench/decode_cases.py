"""Cases of the kernel benchmark for one decode step: products of a few rows, attention over pages, sampling.

A decode step runs inside a CUDA graph, so these are timed inside one: each candidate is a graph of as many calls as
it takes to read more than the second-level cache holds, eight at least, each on weights or caches of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from grpo_lit.bench.kernel_cases import Case, relative
from grpo_lit.bench.timing import Candidate
from grpo_lit.kernels import (
    PAGE,
    LoraUpdate,
    Nf4Weight,
    RmsNorm,
    decode_linear,
    nf4_matmul,
    paged_attention,
    sample_token,
)

_CACHE_BYTES = 150 << 20
_MATRICES = {"q, o": (1536, 1536), "k, v": (256, 1536), "gate, up": (8960, 1536), "down": (1536, 8960)}
# width, columns of each weight, bias, rank, activation, residual
_LAYERS: dict[str, tuple[int, tuple[int, ...], bool, int, str | None, bool]] = {
    "norm, q, k, v": (1536, (1536, 256, 256), True, 16, None, False),
    "o, residual": (1536, (1536,), False, 16, None, True),
    "norm, gate, up, silu": (1536, (8960, 8960), False, 0, "silu", False),
    "down, residual": (8960, (1536,), False, 0, None, True),
}


def nf4_cases(device: torch.device) -> Iterator[Case]:
    """``nf4_matmul`` with each matrix of the 1.5B's layer, and with all seven of them; tiny on the CPU."""
    on_cuda = device.type == "cuda"
    for rows in (4, 16) if on_cuda else (3,):
        matrices = _MATRICES if on_cuda else {"tiny": (40, 128)}
        for name, shape in matrices.items():
            yield nf4_case(name, rows, [shape], torch.bfloat16, device)
        counts = (2, 2, 2, 1) if on_cuda else (2,)
        layer = [shape for shape, count in zip(matrices.values(), counts, strict=True) for _ in range(count)]
        yield nf4_case("a layer's seven matrices" if on_cuda else "both", rows, layer, torch.bfloat16, device)


def decode_cases(device: torch.device) -> Iterator[Case]:
    """The others at the 1.5B's shapes; one tiny one of each on the CPU."""
    on_cuda = device.type == "cuda"
    dtype = torch.bfloat16
    for packed in (False, True):
        for rows in (4, 32) if on_cuda else (2,):
            for name in _LAYERS if on_cuda else ("o, residual",):
                yield linear_case(name, rows, dtype, device, packed=packed, tiny=not on_cuda)
    for rows, length in ((4, 512), (32, 512), (128, 512), (32, 896)) if on_cuda else ((2, 70),):
        yield attention_case(rows, length, (12, 2, 128) if on_cuda else (4, 2, 16), dtype, device)
    for rows in (4, 32, 128) if on_cuda else (2,):
        yield sample_case(rows, 151936 if on_cuda else 500, dtype, device)


def _candidate(name: str, call: Callable[[int], object], count: int, device: torch.device) -> Candidate:
    """``count`` calls, with 0 to count - 1; in one graph on CUDA."""

    def calls() -> None:
        for i in range(count):
            call(i)

    if device.type != "cuda":
        return Candidate(name, "full", calls, divide=count)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return Candidate(name, "full", graph.replay, divide=count)


def _quantized(weight: Tensor) -> tuple[Tensor, Any]:
    import bitsandbytes.functional

    packed, state = bitsandbytes.functional.quantize_4bit(
        weight, quant_type="nf4", compress_statistics=True, blocksize=64
    )
    return packed, state


def _copies(bytes_each: float, device: torch.device) -> int:
    return max(8, min(64, int(_CACHE_BYTES / bytes_each))) if device.type == "cuda" else 1


def nf4_case(name: str, rows: int, shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> Case:
    """``nf4_matmul`` beside bitsandbytes and a product of 16-bit weights; the floor is reading 4 bits a weight.

    ``shapes`` (out, width) of the matrices that one call multiplies, each with an input of its width.
    """
    gen = torch.Generator(device).manual_seed(0)
    floor = int(sum(out * width for out, width in shapes) * (0.5 + 1 / 64))
    dense, quantized, weights = [], [], []
    inputs: dict[int, Tensor] = {}
    for _ in range(_copies(floor, device)):
        dense.append([(torch.randn(*s, device=device, generator=gen) * s[1] ** -0.5).to(dtype) for s in shapes])
        quantized.append([_quantized(weight) for weight in dense[-1]])
        weights.append([Nf4Weight.from_bitsandbytes(*pair) for pair in quantized[-1]])
    for _, width in shapes:
        inputs.setdefault(width, torch.randn(rows, width, device=device, generator=gen).to(dtype))
    xs = [inputs[width] for _, width in shapes]

    def each(product: Callable[[Tensor, Any], Tensor], sets: list[list[Any]]) -> Callable[[int], list[Tensor]]:
        return lambda i: [product(x, weight) for x, weight in zip(xs, sets[i], strict=True)]

    calls: dict[str, Callable[[int], list[Tensor]]] = {
        "ours": each(functools.partial(nf4_matmul, impl="triton"), weights),
        "dequantized, multiplied": each(functools.partial(nf4_matmul, impl="torch"), weights),
    }
    if device.type == "cuda":
        from bitsandbytes import matmul_4bit

        calls["bitsandbytes"] = each(lambda x, pair: matmul_4bit(x, pair[0].t(), quant_state=pair[1]), quantized)
    true = [x.double() @ weight.dequantize(torch.float64).T for x, weight in zip(xs, weights[0], strict=True)]
    errors = {label: max(map(relative, call(0), true)) for label, call in calls.items()}
    calls["16-bit weights"] = each(functional.linear, dense)
    candidates = [_candidate(label, call, len(dense), device) for label, call in calls.items()]
    size = "" if len(shapes) > 1 else f": {shapes[0][1]} -> {shapes[0][0]}"
    label = f"{rows} rows, {name}{size}"
    return Case("nf4_matmul", label, candidates, errors, "dequantized, multiplied", floor, ("ours",))


def linear_case(
    name: str, rows: int, dtype: torch.dtype, device: torch.device, *, packed: bool, tiny: bool = False
) -> Case:
    """``decode_linear`` and the same in torch, one after the other; the floor is reading the weights."""
    width, columns, has_bias, rank, activation, has_residual = _LAYERS[name]
    width, columns = (128, (64,) * len(columns)) if tiny else (width, columns)
    gen = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=gen)

    floor = int(sum(columns) * width * (0.5 + 1 / 64 if packed else dtype.itemsize))
    count = _copies(floor, device)
    sets = [[(normal(n, width) * width**-0.5).to(dtype) for n in columns] for _ in range(count)]
    weights = [[Nf4Weight.from_bitsandbytes(*_quantized(w)) for w in some] if packed else some for some in sets]
    shared: dict[str, Any] = {
        "bias": [normal(n).to(dtype) for n in columns] if has_bias else None,
        "lora": [LoraUpdate(normal(rank, width) * width**-0.5, normal(n, rank) * 0.1, 2.0) for n in columns]
        if rank and packed
        else None,
        "norm": RmsNorm(normal(width).to(dtype), 1e-6) if name.startswith("norm") else None,
        "residual": normal(rows, sum(columns)).to(dtype) if has_residual else None,
        "activation": activation,
    }
    x = normal(rows, width).to(dtype)
    calls: dict[str, Callable[[int], Tensor]] = {
        "ours": lambda i: decode_linear(x, weights[i], impl="triton", **shared),
        "torch": lambda i: decode_linear(x, weights[i], impl="torch", **shared),
    }
    wide = {key: _double(value) for key, value in shared.items()}
    dense = [w.dequantize(torch.float64) if isinstance(w, Nf4Weight) else w.double() for w in weights[0]]
    true = decode_linear(x.double(), dense, impl="torch", **wide)
    errors = {label: relative(call(0), true) for label, call in calls.items()}
    candidates = [_candidate(label, call, count, device) for label, call in calls.items()]
    kind = "NF4" + (f" + rank {rank}" if shared["lora"] else "") if packed else str(dtype).removeprefix("torch.")
    return Case("decode_linear", f"{rows} rows, {name}, {kind}", candidates, errors, "torch", floor, ("ours",))


def _double(value: Any) -> Any:
    """The same with every tensor in float64."""
    if isinstance(value, Tensor):
        return value.double()
    if isinstance(value, LoraUpdate):
        return LoraUpdate(value.a.double(), value.b.double(), value.scaling)
    if isinstance(value, RmsNorm):
        return RmsNorm(value.weight.double(), value.eps)
    return [_double(item) for item in value] if isinstance(value, list) else value


def attention_case(
    rows: int, length: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> Case:
    """``paged_attention`` beside torch's attention on a cache without pages; the floor is reading keys and values."""
    heads, kv_heads, width = sizes
    gen = torch.Generator(device).manual_seed(0)
    per_row = -(-length // PAGE)
    floor = 2 * rows * length * kv_heads * width * dtype.itemsize
    count = _copies(floor, device)
    shape = (2, rows * per_row, kv_heads, PAGE, width)
    caches = [torch.randn(shape, device=device, generator=gen).to(dtype) for _ in range(count)]
    table = torch.randperm(rows * per_row, device=device, generator=gen).view(rows, per_row).int()
    lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
    q = torch.randn(rows, heads, width, device=device, generator=gen).to(dtype)

    def flat(pages: Tensor) -> Tensor:
        return pages[table.long()].transpose(1, 2).reshape(rows, kv_heads, -1, width)[:, :, :length].contiguous()

    whole = [(flat(cache[0]), flat(cache[1])) for cache in caches]
    sdpa: Callable[..., Tensor] = functools.partial(functional.scaled_dot_product_attention, enable_gqa=True)
    calls: dict[str, Callable[[int], Tensor]] = {
        "ours": lambda i: paged_attention(q, caches[i][0], caches[i][1], table, lengths, impl="triton"),
        "sdpa without pages": lambda i: sdpa(q[:, :, None], *whole[i])[:, :, 0],
    }
    true = sdpa(q.double()[:, :, None], whole[0][0].double(), whole[0][1].double())[:, :, 0]
    errors = {label: relative(call(0), true) for label, call in calls.items()}
    candidates = [_candidate(label, call, count, device) for label, call in calls.items()]
    label = f"{rows} rows of {length} tokens, {heads} heads over {kv_heads}, width {width}"
    return Case("paged_attention", label, candidates, errors, "sdpa without pages", floor, ("ours",))


def sample_case(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> Case:
    """``sample_token`` and the same in torch; the floor is reading the logits once."""
    gen = torch.Generator(device).manual_seed(0)
    count = _copies(rows * vocab * dtype.itemsize, device)
    logits = [(torch.randn(rows, vocab, device=device, generator=gen) * 2).to(dtype) for _ in range(count)]
    uniform = torch.rand(rows, device=device, generator=gen, dtype=torch.float64)
    true = logits[0].double().log_softmax(-1)
    calls: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
        "ours": lambda i: sample_token(logits[i], uniform, impl="triton"),
        "torch": lambda i: sample_token(logits[i], uniform, impl="torch"),
    }
    errors = {}
    for label, call in calls.items():
        ids, logprobs = call(0)
        errors[label] = relative(logprobs, true.gather(1, ids[:, None])[:, 0])
    candidates = [_candidate(label, call, count, device) for label, call in calls.items()]
    label = f"{rows} rows, vocabulary {vocab}, {str(dtype).removeprefix('torch.')}"
    return Case("sample_token", label, candidates, errors, "torch", rows * vocab * dtype.itemsize, ("ours",))
