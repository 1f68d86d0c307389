"""Compiles every Triton kernel of the package for GPUs that need not be there, and lists what each takes.

    python scripts/compile_kernels.py                                  all cards and models, minutes
    python scripts/compile_kernels.py --cards 3060ti --models qwen     the reference job on its card

No GPU is needed, only the compilers that come with Triton. The package's own code runs, a decode step and the parts of
a training pass with the launch plans that they make for the card, on torch's fake CUDA tensors, which have a shape and
no memory; each launch compiles its kernel and stops. So this says that a kernel fits, not that it is right or fast.

A line is a kernel as compiled: the first launch that took it (and how many more did), registers a thread, bytes of its
stack (what was spilled), bytes of shared memory, and a hash of the PTX, which two versions of the package can be
compared by. Exit code 1 if a kernel does not compile, takes more shared memory than the card has, or was left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from absent_gpu import CARDS, Compiled, absent_gpu
from sanitize_kernels import kernels
from torch import Tensor, nn

from grpo_lit.kernels import logit_rows
from grpo_lit.kernels._triton import decoder
from grpo_lit.kernels._triton.nf4 import dequantize
from grpo_lit.kernels._triton.scale import scale
from grpo_lit.kernels._triton.token_loss import ordered_sum, token_loss
from grpo_lit.kernels.advance_rows import RowState
from grpo_lit.kernels.decode_linear import LoraUpdate, Part
from grpo_lit.kernels.head import default_chunk_rows, gradient_buffer
from grpo_lit.kernels.nf4 import Nf4Weight
from grpo_lit.kernels.token_terms import TokenInputs, TokenScalars
from grpo_lit.rollout.base import SamplingConfig
from grpo_lit.rollout.decode import DecodeStep
from grpo_lit.rollout.model_reader import LayerSpec, ModelSpec, Norm
from grpo_lit.rollout.pages import CacheShape, KVCache

CONFIG = Path(logit_rows.__file__).parents[1] / "configs" / "3060ti.yaml"
RANK = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["model"]["lora"]["rank"]
ROWS = (1, 4, 16, 32, 128)  # of a decode step
TOKENS = 4096  # of a training pass
BF16, F32 = torch.bfloat16, torch.float32
DTYPES = {"nf4": BF16, "bf16": BF16, "fp32": F32}  # of activations over such weights


class Model(NamedTuple):
    """Sizes of a decoder; a GPT-2 if it has learned ``positions``, else a Llama, maybe with a ``bias`` in q, k, v."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    size: int
    vocab: int
    bias: bool = False
    positions: int = 0


MODELS = {
    "qwen": Model(1536, 8960, 12, 2, 128, 151936, bias=True),  # DeepSeek-R1-Distill-Qwen-1.5B
    "smollm2": Model(576, 1536, 9, 3, 64, 49152),
    "gpt2": Model(768, 3072, 12, 12, 64, 50257, bias=True, positions=1024),
}


def new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def nf4(columns: int, width: int) -> Nf4Weight:
    blocks = columns * width // 64
    scales = new(blocks, dtype=torch.uint8), new(256, dtype=F32), new(-(-blocks // 256), dtype=F32), new(dtype=F32)
    return Nf4Weight(new(blocks * 32, dtype=torch.uint8), *scales, new(16, dtype=F32), columns, width)


def decode_step(model: Model, weights: str, rows: int, *, rank: int = 0, pages: int = 20, greedy: bool = False) -> None:
    """A decode step of one layer as the rollout engine runs it, 64 ``pages`` tokens a row at most."""
    dtype, gpt2 = DTYPES[weights], model.positions > 0
    queries, keys = model.heads * model.size, model.kv_heads * model.size

    def part(columns: int, width: int, bias: bool = gpt2, rank: int = 0) -> Part:
        dense = new(width, columns, dtype=dtype).t() if gpt2 else new(columns, width, dtype=dtype)
        lora = LoraUpdate(new(rank, width, dtype=F32), new(columns, rank, dtype=F32), 2.0) if rank else None
        matrix = nf4(columns, width) if weights == "nf4" else dense
        return Part(matrix, new(columns, dtype=dtype) if bias else None, lora)

    def vector(size: int = model.hidden) -> Tensor:
        return new(size, dtype=dtype)

    norm = Norm(vector(), vector() if gpt2 else None, 1e-6)
    columns = [3 * queries] if gpt2 else [queries, keys, keys]
    up = [part(model.inner, model.hidden) for _ in range(1 if gpt2 else 2)]
    qkv = [part(n, model.hidden, model.bias, rank) for n in columns]
    down = part(model.hidden, model.inner)
    layer = LayerSpec(norm, qkv, None, None, model.size**-0.5, part(model.hidden, queries, gpt2, rank), norm, up, down)
    # the output layer is in 16 bits in the reference job; in 4 here where there are no adapters
    table = nf4(model.vocab, model.hidden) if weights == "nf4" and not rank else vector(model.vocab * model.hidden)
    spec = ModelSpec(
        layers=[layer],
        embedding=nn.Embedding(model.vocab, model.hidden, device="cuda", dtype=dtype),
        vocab_size=model.vocab,
        position_embedding=new(model.positions, model.hidden, dtype=dtype) if gpt2 else None,
        final_norm=norm,
        head=Part(table.view(model.vocab, -1) if isinstance(table, Tensor) else table, None, None),
        logit_scale=1.0,
        softcap=None,
        activation="gelu_new" if gpt2 else "silu",
        gated=not gpt2,
        num_heads=model.heads,
        cache=CacheShape(1, model.kv_heads, model.size, dtype),
        norm_eps=1e-6,
    )
    angles = None if gpt2 else (new(64 * pages, model.size, dtype=dtype), new(64 * pages, model.size, dtype=dtype))
    cache = KVCache(spec.cache, 1 + rows * pages, torch.device("cuda"))
    step = DecodeStep(spec, cache, angles, SamplingConfig(temperature=1.0 - greedy), new(2, dtype=torch.int64))
    slots = [new(rows, dtype=d) for d in (torch.int64, *[torch.int32] * 4, torch.float64)]
    step(
        RowState(*slots, *(new(rows + 1, 768, dtype=d) for d in (torch.float64, torch.int64, F32))),
        new(rows, pages, dtype=torch.int32),
    )


def training(model: Model) -> None:
    """The small operations of a Llama layer's forward and backward pass, and its weights back in 16 bits."""
    x, norm = new(TOKENS, model.hidden), new(model.hidden)
    decoder.rms_norm(x, norm, 1e-6)
    decoder.rms_norm_backward(x, x, norm, 1e-6, x, x)
    qkv, angles = new(TOKENS, (model.heads + 2 * model.kv_heads) * model.size), new(TOKENS, model.size)
    dq, dk = (new(TOKENS, n, model.size) for n in (model.heads, model.kv_heads))
    for norm_of in (None, new(model.size)):  # with norms as in Qwen3
        decoder.rotary(qkv, angles, angles, model.heads, model.kv_heads, norm_of, norm_of, 1e-6)
        decoder.rotary_backward((dq, dk, dk), qkv, angles, angles, norm_of, norm_of, 1e-6)
    gate_up, inner = new(TOKENS, 2 * model.inner), new(TOKENS, model.inner)
    decoder.gated_silu(gate_up)
    for activation in (True, False):
        decoder.gated_silu_backward_(gate_up, inner, activation)
    for columns, width in ((model.inner, model.hidden), (model.hidden, model.inner)):
        dequantize(nf4(columns, width), BF16)


def loss(model: Model, dtype: torch.dtype, logits_dtype: torch.dtype) -> None:
    """Log-probs, entropy, loss and gradients of a chunk of logits; training has them in float32."""
    weight, scalars = new(model.vocab, model.hidden, dtype=dtype), TokenScalars(0.2, 0.3, delta=1.5)
    options = logit_rows.RowOptions(1.0, 0.0, model.vocab, "triton")
    logits = new(default_chunk_rows(weight, logits_dtype), model.vocab, dtype=logits_dtype)
    grad = gradient_buffer(logits, weight, "triton")[None]
    ids, per_row = new(len(logits), dtype=torch.int64), new(len(logits), dtype=F32)
    for entropy in (False, True):
        out = logit_rows.RowResults.empty(ids, dtype, loss=False, entropy=entropy)
        logit_rows.stat_rows(logits[None], ids, options, out)
        e = per_row if entropy else None
        logit_rows.given_rows(logits[None], ids, per_row, e, options, out, grad)
        out = logit_rows.RowResults.empty(ids, dtype, loss=True, entropy=entropy)
        for old, ref in ((None, None), (per_row, None), (per_row, per_row)):
            inputs, beta = TokenInputs(ids, old, per_row, per_row, ref), 0.0 if ref is None else 0.04
            logit_rows.loss_rows(logits[None], inputs, scalars._replace(beta=beta), options, out, grad)
    ordered_sum(per_row)
    scale(new(TOKENS, model.hidden, dtype=dtype), new(dtype=F32))
    logprobs, advantages = new(16, 768, dtype=F32), new(16, dtype=F32)
    for ref in (None, logprobs):
        token_loss(logprobs, logprobs, advantages, logprobs, ref, scalars)


def compile_model(name: str, compiled: Compiled) -> None:
    """Everything that ``name`` of `MODELS` launches, inside `absent_gpu`."""
    model = MODELS[name]
    kinds = [("fp32", 0), ("bf16", 0)] if model.positions else [("nf4", RANK), ("nf4", 0), ("bf16", RANK), ("bf16", 0)]
    for weights, rank in kinds:
        title = f"{name} {weights}{' + lora' if rank else ''}"
        for rows in ROWS:
            compiled.shape = f"{title}, {rows} rows"
            decode_step(model, weights, rows, rank=rank)
        compiled.shape = f"{title}, 16 rows, long, greedy"
        decode_step(model, weights, 16, rank=rank, pages=264, greedy=True)
    compiled.shape = f"{name}, training"
    if not model.positions:
        training(model)
    for weights, logits in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")):
        compiled.shape = f"{name} {weights}, loss, {logits} logits"
        loss(model, DTYPES[weights], DTYPES[logits])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=list(CARDS))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args(argv)
    failed, every_model = False, set(options.models) == set(MODELS)
    for name in options.cards:
        card = CARDS[name]
        title = f"{name}, compute capability {card.capability[0]}.{card.capability[1]}"
        print(f"\n{title}: {card.shared_memory} bytes of shared memory")
        print(f"{'kernel':28s}{'shape':46s}{'registers':>9s}{'spilled':>9s}{'shared':>9s}  ptx       verdict")
        with absent_gpu(card) as compiled:
            for model in options.models:
                compile_model(model, compiled)
        for key, k in sorted(compiled.kernels.items()):
            shape = k.shape + (f" (+{compiled.launches[key] - 1})" if compiled.launches[key] > 1 else "")
            print(f"{k.name:28s}{shape:46s}{k.registers:9d}{k.spilled:9d}{k.shared:9d}  {k.ptx}  {k.verdict}")
        bad = sum(k.verdict != "fits" for k in compiled.kernels.values())
        spilling = sum(k.spilled > 0 for k in compiled.kernels.values())
        missing = kernels() - {k.name for k in compiled.kernels.values()}
        print(f"{title}: {len(compiled.kernels)} kernels, {bad} do not fit, {spilling} spill", flush=True)
        if every_model and missing:
            print(f"never launched: {', '.join(sorted(missing))}")
        failed |= bool(bad or (every_model and missing))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
