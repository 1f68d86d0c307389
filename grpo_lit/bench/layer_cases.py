"""Cases of the kernel benchmark around the layers: adapters over frozen weights, and the entropy mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from grpo_lit.bench.kernel_cases import Case, relative
from grpo_lit.bench.timing import Candidate
from grpo_lit.kernels import Nf4Weight, entropy_mask, lora_linear


def _separate(x: Tensor, base: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """An adapter as PEFT computes it: the base's own forward, two products, a scaling, a sum."""
    low = nn.functional.linear(x.to(a.dtype), a)
    return base(x) + (nn.functional.linear(low, b) * scaling).to(x.dtype)


def lora_case(rows: int, width: int, out: int, dtype: torch.dtype, device: torch.device, *, nf4: bool) -> Case:
    """``lora_linear`` with float32 adapters of rank 16, forward and backward, over one frozen (out, width) weight."""
    gen = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=gen)

    scaling, rank = 2.0, 16
    x = normal(rows, width).to(dtype).requires_grad_()
    a = (normal(rank, width) * width**-0.5).requires_grad_()
    b = (normal(out, rank) * rank**-0.5).requires_grad_()
    up = normal(rows, out).to(dtype)
    base: Any = nn.Linear(width, out, bias=False, device=device, dtype=dtype).requires_grad_(False)
    frozen: Tensor | Nf4Weight = base.weight
    if nf4:
        from grpo_lit.frozen4bit import FrozenLinear4bit

        base = FrozenLinear4bit.from_linear(base, dtype, device)
        frozen = Nf4Weight.from_bitsandbytes(base.weight.data, base.weight.quant_state)
    dense = frozen.dequantize(dtype) if isinstance(frozen, Nf4Weight) else frozen
    losses: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: lora_linear(x, frozen, a, b, scaling),
        "separate, fp32 adapters": lambda: _separate(x, base, a, b, scaling),
        "separate, 16-bit adapters": lambda: _separate(x, base, a.to(dtype), b.to(dtype), scaling),
    }
    true = torch.autograd.grad(
        _separate(x.double(), lambda t: t @ dense.double().t(), a.double(), b.double(), scaling), x, up.double()
    )[0].double()
    errors: dict[str, float] = {}
    candidates: list[Candidate] = []
    for name, forward in losses.items():
        errors[name] = relative(torch.autograd.grad(forward(), x, up)[0], true)

        def full(forward: Callable[[], Tensor] = forward) -> None:
            x.grad = a.grad = b.grad = None
            forward().backward(up)

        candidates.append(Candidate(name, "full", full))
    weight = "NF4" if nf4 else str(dtype).removeprefix("torch.")
    label = f"{rows} rows, {width} -> {out}, rank {rank}, {weight} weight"
    return Case("lora_linear", label, candidates, errors, "separate, 16-bit adapters", 0, ("ours",))


def _by_sorting(entropy: Tensor, mask: Tensor, keep: float) -> Tensor:
    """The same mask through the host: select, sort, compare."""
    values = entropy[mask]
    count = max(1, int(-(-keep * len(values) // 1)))
    threshold = values.sort(descending=True).values[count - 1]
    return mask & (entropy >= threshold)


def entropy_case(n: int, t: int, device: torch.device) -> Case:
    """``entropy_mask`` on (n, t) tokens; the errors say whether the masks are the same, 0 for yes."""
    gen = torch.Generator(device).manual_seed(0)
    entropy = torch.rand(n, t, device=device, generator=gen) * 5
    lengths = torch.randint(1, t + 1, (n, 1), device=device, generator=gen)
    mask = torch.arange(t, device=device) < lengths
    masks: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: entropy_mask(entropy, mask, keep=0.2),
        "ours, row minimum 4": lambda: entropy_mask(entropy, mask, keep=0.2, min_tokens=4),
        "select and sort": lambda: _by_sorting(entropy, mask, 0.2),
        "torch.quantile": lambda: mask & (entropy >= entropy[mask].quantile(0.8)),
    }
    wanted = masks["select and sort"]()
    errors = {name: float((made() != wanted).float().mean()) for name, made in masks.items()}
    errors["ours, row minimum 4"] = 0.0  # another mask by design
    candidates = [Candidate(name, "forward", made) for name, made in masks.items()]
    return Case("entropy_mask", f"{n} x {t} tokens, top 20 %", candidates, errors, "select and sort", 0, ("ours",))


def _adapted_layer(width: int, heads: int, wide: int, positions: int, dtype: torch.dtype, device: torch.device) -> Any:
    """A Qwen2 of one layer over NF4 with adapters of rank 16 whose B is not 0."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from grpo_lit.base_model import quantize_nf4
    from grpo_lit.lora import inject_lora

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=width,
        intermediate_size=wide,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 6),
        max_position_embeddings=positions,
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(device, dtype)
    quantize_nf4(model, dtype, device)
    inject_lora(model, 16, 32.0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.1)
    return model


def decoder_case(rows: int, tokens: int, width: int, device: torch.device, *, heads: int, wide: int) -> Case:
    """One Qwen2 decoder layer over NF4 with adapters on q, k, v and o, forward and backward, full rows.

    The errors are those of all adapters' gradients together, against the same layer in float32.
    """
    from grpo_lit.fused_decoder import FusedDecoder
    from grpo_lit.memory.checkpointing import LayerCheckpointing

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = _adapted_layer(width, heads, wide, max(tokens, 128), dtype, device)
    gen = torch.Generator(device).manual_seed(0)
    ids = torch.randint(0, 64, (rows, tokens), device=device, generator=gen)
    real = torch.ones_like(ids, dtype=torch.bool)
    up = torch.randn(rows, tokens - 1, width, device=device, generator=gen)
    parameters = [p for p in model.parameters() if p.requires_grad]

    def plain(of: Any) -> Tensor:
        hidden: Tensor = of.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        return hidden

    def fused(decoder: FusedDecoder) -> Tensor:
        counts = torch.arange(rows * (tokens - 1), device=device)
        return decoder(ids[:, :1], real[:, :1], ids[:, 1:], real[:, 1:], counts).view_as(up)

    checkpointing = LayerCheckpointing(model)
    ways: dict[str, tuple[int, Callable[[], Tensor]]] = {
        "ours, checkpointed": (1, lambda: fused(FusedDecoder(model, checkpointing))),
        "transformers, checkpointed": (1, lambda: plain(model)),
        "ours": (0, lambda: fused(FusedDecoder(model, None))),
        "transformers": (0, lambda: plain(model)),
    }
    exact = _in_float32(model)
    truth = torch.cat([g.flatten() for g in torch.autograd.grad(plain(exact), _adapters(exact), up)]).double()
    errors: dict[str, float] = {}
    candidates: list[Candidate] = []
    for name, (count, forward) in ways.items():

        def full(forward: Callable[[], Tensor] = forward) -> list[Tensor]:
            return list(torch.autograd.grad(forward(), parameters, up.to(dtype)))

        def prepare(count: int = count) -> None:
            checkpointing.count = count
            model.train(count > 0)

        prepare()
        errors[name] = relative(torch.cat([g.flatten() for g in full()]), truth)
        candidates.append(Candidate(name, "full", full, prepare))
    label = f"{rows} x {tokens} tokens, hidden {width}, NF4"
    return Case("decoder_layer", label, candidates, errors, "transformers", 0, ("ours", "ours, checkpointed"))


def _adapters(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def _in_float32(model: nn.Module) -> Any:
    """The same numbers in float32, no longer in 4 bits."""
    import copy

    from grpo_lit.lora import LoRALinear

    exact = copy.deepcopy(model)
    for name, module in list(exact.named_modules()):
        base: Any = module.base_layer if isinstance(module, LoRALinear) else module
        if not hasattr(getattr(base, "weight", None), "quant_state"):
            continue
        weight = Nf4Weight.from_bitsandbytes(base.weight.data, base.weight.quant_state).dequantize(torch.float32)
        dense = nn.Linear(weight.shape[1], weight.shape[0], bias=base.bias is not None, device=weight.device)
        dense.weight.data = weight
        if base.bias is not None:
            dense.bias.data = base.bias.data
        dense.requires_grad_(False)
        if isinstance(module, LoRALinear):
            module.base_layer = dense
        elif "base_layer" not in name:
            exact.set_submodule(name, dense)
    return exact.float().eval()
