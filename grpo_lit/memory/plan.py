"""What each phase of a step will take at its peak, from shapes alone.

All figures are bytes of live tensors, as ``torch.cuda.memory_allocated`` counts them; what the allocator reserves is
a few percent more, and the CUDA context (0.3 to 0.5 GB, depending on the driver) is outside of both.

Words: n tokens of a micro-batch, padding included (without it in the fused layers), m of them completion tokens that
are scored, H hidden, I intermediate, A and K the widths of queries and of keys, e bytes of a number (2 for bf16).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from grpo_lit.memory.sizes import ModelSizes

MIB, GIB = 2**20, 2**30
PAGE = 64
LOGIT_CHUNK_BYTES = 160 << 20
"""Budget of one chunk of logits, as in grpo_lit.kernels.head."""
PREFILL_TOKENS = 2048
"""Tokens of one prefill forward of the graph engine."""
KINDS = (
    "base weights",
    "embedding, head",
    "adapters",
    "optimizer",
    "gradients",
    "KV cache",
    "layer inputs",
    "activations",
    "logits",
    "workspace",
)
PHASES = ("load", "rollout", "score", "train", "optimizer")
Ledger = dict[str, int]


@dataclass(frozen=True)
class StepSizes:
    """How much of what a step holds at once."""

    prompt_tokens: int
    """Longest prompt."""
    completion_tokens: int
    """Longest completion."""
    rollout_rows: int
    """Rows generated at once."""
    prompts: int
    """Prompts of a step: rows of one share the pages of its prompt."""
    micro_rows: int
    """Rows of a forward and backward."""
    score_rows: int
    """Rows of a scoring forward."""

    @property
    def row_tokens(self) -> int:
        """Longest prompt with its completion."""
        return self.prompt_tokens + self.completion_tokens

    def with_completions(self, tokens: int) -> StepSizes:
        """The same with another longest completion."""
        return replace(self, completion_tokens=tokens)


@dataclass(frozen=True)
class Formats:
    """Number formats and levers: what of a policy's, a LoRA's and an optimizer's settings memory depends on."""

    width: int = 2
    """Bytes of a number of the base and of the computation."""
    nf4: bool = False
    head_bytes: float | None = None
    """Bytes a weight of embedding and output layer; None for `width`."""
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    lora_width: int = 4
    moment_bytes: float = 8.0
    """Bytes of optimizer state on the device for each trained weight: 8 for AdamW, about 2 for its 8-bit form."""
    checkpointed: int | None = None
    """Layers that are recomputed; None for all."""
    offload: bool = False
    mlp_tile: int | None = None
    fused: bool = True
    """Whether the layers run through grpo_lit.fused_layers."""
    chunk_tokens: int = 2048
    """Tokens of a chunk of the fused feed-forward part."""
    engine: Literal["graph", "hf", "vllm"] = "graph"
    """What holds keys and values; vLLM's memory is its own, set aside by its settings."""
    scores: bool = False
    """Whether a step scores its rows before the first pass."""
    workspace: int = 32 * MIB + 128 * 1024
    """Of cuBLAS, for each of the two threads that run forward and backward: by default Hopper's."""


@dataclass
class PhasePlan:
    """The peak of one phase by kind."""

    phase: str
    kinds: Ledger = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return sum(self.kinds.values())


def plan_step(sizes: ModelSizes, formats: Formats, step: StepSizes) -> dict[str, PhasePlan]:
    """Peaks of all phases that a configuration runs, by phase name."""
    weights = weight_ledger(sizes, formats)
    resident = weights | {"optimizer": int(trained_weights(sizes, formats) * formats.moment_bytes)}
    gradients = trained_weights(sizes, formats) * (formats.lora_width if formats.lora_rank else formats.width)
    plans = {
        "load": _load(sizes, formats),
        "rollout": _rollout(sizes, formats, step),
        "train": _train(sizes, formats, step) | {"gradients": gradients},
        "optimizer": {"gradients": gradients, "activations": 2 * gradients},  # the foreach step's temporaries
    }
    if formats.scores:
        plans["score"] = _score(sizes, formats, step)
    threads = {"rollout": 1, "score": 1, "train": 2, "optimizer": 2}
    for phase, count in threads.items():
        if phase in plans:
            plans[phase] |= resident | {"workspace": count * formats.workspace}
    plans["load"] |= weights
    return {phase: PhasePlan(phase, {k: plans[phase].get(k, 0) for k in KINDS}) for phase in PHASES if phase in plans}


# ---- what stays ---------------------------------------------------------------------------------------------------


def weight_ledger(sizes: ModelSizes, formats: Formats) -> Ledger:
    """Bytes of the weights.

    NF4 with double quantization (QLoRA, 2305.14314): 4 bits a weight, a scale of 8 bits for 64, and one of 32 bits
    for 256 of these.
    """
    linear = sum(_linear_bytes(shape, formats) for shape in sizes.linear.values())
    tables = (sizes.embedding + sizes.head) * (formats.width if formats.head_bytes is None else formats.head_bytes)
    ledger = {"base weights": linear + sizes.other * formats.width, "embedding, head": int(tables)}
    if formats.lora_rank is not None:
        ledger["adapters"] = trained_weights(sizes, formats) * formats.lora_width
    return ledger


def _linear_bytes(shape: tuple[int, int], formats: Formats) -> int:
    numbers = shape[0] * shape[1]
    if not formats.nf4:
        return numbers * formats.width
    blocks = -(-numbers // 64)
    # packed weights, first scales, second scales, and two small tables; the allocator gives each whole 512 bytes
    return sum(_rounded(part) for part in (numbers // 2, blocks, 4 * -(-blocks // 256), 1024, 64, 4))


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


def trained_weights(sizes: ModelSizes, formats: Formats) -> int:
    """Trained weights: r (in + out) for each adapted layer, or all of the model."""
    if formats.lora_rank is None:
        return sizes.total
    return sum(formats.lora_rank * (shape[0] + shape[1]) for _, shape in _targets(sizes, formats))


def _targets(sizes: ModelSizes, formats: Formats) -> Iterable[tuple[str, tuple[int, int]]]:
    return ((n, shape) for n, shape in sizes.linear.items() if n.rpartition(".")[2] in formats.lora_targets)


def kv_bytes_per_token(sizes: ModelSizes, formats: Formats) -> int:
    """Bytes of keys and values of a token over all layers."""
    return 2 * sizes.layers * sizes.kv_width * formats.width


# ---- phases -------------------------------------------------------------------------------------------------------


def _load(sizes: ModelSizes, formats: Formats) -> Ledger:
    """One layer's floating-point weight is on the device while it is quantized."""
    if not formats.nf4 or not sizes.linear:
        return {}
    return {"activations": max(a * b for a, b in sizes.linear.values()) * formats.width}


def _rollout(sizes: ModelSizes, formats: Formats, step: StepSizes) -> Ledger:
    if formats.engine == "vllm":
        return {}
    rows, per_token = step.rollout_rows, kv_bytes_per_token(sizes, formats)
    prompt_rows = min(rows, max(1, step.prompts)) if formats.engine == "graph" else rows
    n = min(prompt_rows * step.prompt_tokens, max(PREFILL_TOKENS, step.prompt_tokens))
    if formats.engine == "hf":
        n = rows * step.prompt_tokens
        cache = rows * (step.row_tokens - 1) * per_token
        growing = cache // (2 * sizes.layers)  # torch.cat makes one layer's keys anew while the old ones live
        logits = rows * sizes.vocab * 44  # 16-bit, two of 32 bits, three and a half of 64, and comparisons
    else:
        full = (step.prompt_tokens - 1) // PAGE
        own = -(-(step.row_tokens - 1) // PAGE) - full
        cache = (prompt_rows * -(-(step.prompt_tokens - 1) // PAGE) + rows * own + 1) * PAGE * per_token
        growing, logits = 0, rows * sizes.vocab * (4 + formats.width)
    forward = _forward(sizes, replace(formats, fused=False), n)  # engines run the layers in a way of their own
    return {"KV cache": cache, "activations": max(growing, forward), "logits": logits}


def _score(sizes: ModelSizes, formats: Formats, step: StepSizes) -> Ledger:
    n, m = step.score_rows * step.row_tokens, step.score_rows * step.completion_tokens
    hidden = n * sizes.hidden * formats.width
    head = {"activations": 3 * hidden, "logits": logit_bytes(sizes, formats, m)}
    layers = {"activations": hidden + _forward(sizes, formats, n), "logits": 0}
    return max(head, layers, key=lambda ledger: sum(ledger.values()))


def _forward(sizes: ModelSizes, formats: Formats, n: int) -> int:
    """Bytes of one layer's forward without gradients: the residual, the MLP's parts, dequantized weights."""
    tile = formats.chunk_tokens if formats.fused else formats.mlp_tile
    c = n if tile is None else min(n, tile)
    e = formats.width
    wide = (3 if sizes.gated else 2) * c * sizes.intermediate * e
    attention = n * e * (3 * sizes.attention_width + 3 * sizes.kv_width)
    return 3 * n * sizes.hidden * e + max(wide, attention) + _dequantized(sizes, formats)


def _dequantized(sizes: ModelSizes, formats: Formats) -> int:
    """4-bit weights as they are multiplied: those of the MLP together in the fused layers, one at a time elsewhere."""
    if not formats.nf4:
        return 0
    matrix = sizes.hidden * sizes.intermediate * formats.width
    return (3 if sizes.gated else 2) * matrix if formats.fused else matrix


def logit_bytes(sizes: ModelSizes, formats: Formats, m: int) -> int:
    """One chunk of float32 logits, their gradient written over them; a quantized output layer as numbers beside it."""
    rows = max(1, LOGIT_CHUNK_BYTES // (4 * sizes.vocab))
    rows = min(m, rows // 64 * 64 if rows >= 64 else rows)
    numbers = 0 if formats.head_bytes is None else sizes.vocab * sizes.hidden * formats.width
    return rows * sizes.vocab * 4 + numbers


def _train(sizes: ModelSizes, formats: Formats, step: StepSizes) -> Ledger:
    """The peak of micro-batches of all lengths up to the longest.

    A longer one can take less: cut into one more chunk, or into tiles, its parts are smaller.
    """
    n, m = step.micro_rows * step.row_tokens, step.micro_rows * step.completion_tokens
    if formats.fused:
        widest = n // formats.chunk_tokens * formats.chunk_tokens or n  # the longest whose chunks are all full
    else:
        widest = n if formats.mlp_tile is None else min(n, formats.mlp_tile)
    ledgers = [_micro_batch(sizes, formats, n - less, max(m - less, 0)) for less in (0, n - widest)]
    return max(ledgers, key=lambda ledger: sum(ledger.values()))


def _micro_batch(sizes: ModelSizes, formats: Formats, n: int, m: int) -> Ledger:
    """The larger of two moments: the output layer's, and a layer's backward, while all layer inputs wait."""
    hidden = n * sizes.hidden * formats.width
    recomputed = sizes.layers if formats.checkpointed is None else formats.checkpointed
    # with offload the one in use and the next are on the device
    inputs = min(recomputed, 2) * hidden if formats.offload else recomputed * hidden
    kept = (sizes.layers - recomputed) * kept_by_layer(sizes, formats, n)
    tokens_scored = m * sizes.hidden * (4 + 3 * formats.width)  # final norm in fp32 and out, what goes in, J
    head = {"layer inputs": inputs, "activations": kept + hidden + tokens_scored}
    head["logits"] = logit_bytes(sizes, formats, m)
    layer = {"layer inputs": inputs, "activations": kept + backward_of_layer(sizes, formats, n), "logits": 0}
    return max(head, layer, key=lambda ledger: sum(ledger.values()))


def _lora_inputs(sizes: ModelSizes, formats: Formats, n: int) -> int:
    """Copies of their inputs in the adapters' dtype, and the low-rank products, that `LoRALinear` keeps in a layer."""
    if formats.lora_rank is None:
        return 0
    first = next(iter(name for name in sizes.linear), "")
    prefix = first[: first.find(".0.") + 3]
    layer = [shape for name, shape in _targets(sizes, formats) if name.startswith(prefix)]
    return sum(n * (columns + formats.lora_rank) * formats.lora_width for _, columns in layer)


def kept_by_layer(sizes: ModelSizes, formats: Formats, n: int) -> int:
    """Bytes that a layer which is not recomputed keeps for its backward."""
    e, h, i = formats.width, sizes.hidden, sizes.intermediate
    a, k = sizes.attention_width, sizes.kv_width
    statistics = 4 * n * sizes.heads  # log-sum-exp of attention
    if formats.fused:  # x, normed, q|k|v, turned, out, h, gate|up
        return n * e * (3 * h + (a + 2 * k) + (a + k) + a + 2 * i) + statistics
    norms = 2 * 4 * n * h  # float32 copies of their inputs
    attention = n * e * (2 * a + 2 * k)
    mlp = n * e * (3 if sizes.gated else 2) * i
    if formats.mlp_tile is not None and n > formats.mlp_tile:
        mlp = 2 * n * e * h
    return norms + _lora_inputs(sizes, formats, n) + attention + statistics + mlp


def backward_of_layer(sizes: ModelSizes, formats: Formats, n: int) -> int:
    """Bytes of one layer's backward at its peak, its recomputation included, its input not."""
    e, h, i = formats.width, sizes.hidden, sizes.intermediate
    a, k = sizes.attention_width, sizes.kv_width
    statistics = 4 * n * sizes.heads
    gradients = 2 * n * h * e  # of the layer's output, and of the middle
    # queries' gradient also in float32, as flash attention sums it; then q|k|v's together
    attention = n * (e * (a + 2 * (a + 2 * k)) + 4 * a)
    if formats.fused:
        seen = n * e * (2 * h + (a + 2 * k) + (a + k) + a) + statistics
        chunks = max(1, -(-n // formats.chunk_tokens))
        c = -(-n // chunks)
        weights = e * (h * (a + 2 * k) + a * h) if formats.nf4 else 0
        feed_forward = c * e * (3 * i + 2 * h) + _dequantized(sizes, formats)
        more = n * h * e  # found by measuring from 3,584 to 49,280 tokens
        return seen + gradients + more + weights + max(feed_forward, attention)
    c = n if formats.mlp_tile is None else min(n, formats.mlp_tile)
    tiled = 0 if c == n else 2 * n * h * e
    kept = kept_by_layer(sizes, formats, n) - (0 if c < n else n * e * (3 if sizes.gated else 2) * i)
    mlp = c * e * (6 if sizes.gated else 3) * i + tiled
    lora = n * 4 * (a + h) if formats.lora_rank is not None else 0  # float32 gradients of an adapter's output and input
    return kept + gradients + _dequantized(sizes, formats) + max(mlp, attention + lora)
