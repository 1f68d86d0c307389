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
