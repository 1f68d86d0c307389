"""The inputs of the kernel benchmark, and for each op the implementations that are timed on them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_lit.bench import kernel_baselines as baselines
from grpo_lit.bench.timing import Candidate, Timer
from grpo_lit.kernels import fused_linear_grpo, fused_logits_grpo, grpo_token_loss, linear_logprobs
from grpo_lit.kernels.token_terms import TokenScalars, token_terms

_CHECKED_ROWS = 64
_SEPARATE: dict[str, dict[str, bool]] = {
    "three kernels": {},
    "three kernels, one element a thread": {"vectors": False},
    "three kernels + entropy": {"entropy": True},
}


@dataclass
class Case:
    """One size of one op.

    Attributes:
        op: name of the op.
        label: the size, as printed.
        candidates: what is timed.
        errors: relative error of each implementation's gradient against float64, by name.
        reference: the implementation in plain torch whose error is the yardstick.
        floor_bytes: bytes that any implementation must move, 0 where bytes aren't the limit.
        ours: names of this package's implementations.
    """

    op: str
    label: str
    candidates: list[Candidate]
    errors: dict[str, float]
    reference: str
    floor_bytes: int
    ours: tuple[str, ...]

    def failures(self, slack: float) -> list[str]:
        """Our implementations that are further from float64 than twice plain torch plus ``slack``."""
        allowed = 2 * self.errors[self.reference] + slack
        return [name for name in self.ours if not self.errors[name] <= allowed]


def _tokens(n: int, t: int, vocab: int, device: torch.device, gen: torch.Generator) -> tuple[Tensor, ...]:
    """(ids, old, advantages, weights) with weights that sum to 1 and no masked token."""
    ids = torch.randint(vocab, (n, t), device=device, generator=gen)
    advantages = torch.randn(n, device=device, generator=gen)
    weights = torch.rand(n, t, device=device, generator=gen) + 0.5
    return ids, torch.zeros(n, t, device=device), advantages, weights / weights.sum()


def _near(logp: Tensor, gen: torch.Generator) -> Tensor:
    """Old log-probs that put some ratios beyond the clip."""
    return (logp + 0.2 * torch.randn(logp.shape, device=logp.device, generator=gen)).float()


def relative(got: Tensor, true: Tensor) -> float:
    """Norm of the error over the norm of the truth."""
    return float((got.double() - true).norm() / true.norm())


# a loss, its leaf, and what has to be done before each call
_Way = tuple[Callable[[Tensor], Tensor], Tensor, Callable[[], None] | None]


def _logits_ways(logits: Tensor, whole: Tensor, tokens: tuple[Tensor, ...], compiled: bool) -> dict[str, _Way]:
    """The implementations on ``logits``, which Liger takes with a step more: ``whole``."""
    ids, old, advantages, weights = tokens
    steps = ids.shape[1]
    half = weights * (torch.arange(steps, device=ids.device) < steps // 2)
    work = torch.empty_like(logits).requires_grad_()

    def refresh() -> None:
        work.data.copy_(logits.data)

    def ours(some: Tensor = weights, **options: Any) -> Callable[[Tensor], Any]:
        return lambda z: fused_logits_grpo(z, ids, old, advantages, some, impl="triton", **options)

    ways: dict[str, _Way] = {
        "ours": (ours(), logits, None),
        "ours in place": (ours(inplace=True), work, refresh),
        "ours + entropy": (lambda z: ours(return_stats=True)(z)[0], logits, None),
        "ours, half masked": (ours(half), logits, None),
        "ours, half masked, untouched": (ours(half, masked_rows="untouched"), logits, None),
        "eager": (lambda z: baselines.eager_logits_loss(z, *tokens), logits, None),
    }
    if compiled:
        fast = torch.compile(baselines.eager_logits_loss, dynamic=False)
        ways["torch.compile"] = (lambda z: fast(z, *tokens), logits, None)
    liger = baselines.liger_logits_loss() if ids.is_cuda else None
    if liger is not None:
        whole.requires_grad_()
        ways["liger"] = (lambda z: liger(z, *tokens), whole, None)
    return ways


def logits_case(
    n: int,
    t: int,
    vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    compiled: bool,
    modes: tuple[str, ...],
) -> Case:
    """``fused_logits_grpo`` and its rivals on (n, t, vocab) logits."""
    gen = torch.Generator(device).manual_seed(0)
    whole = (torch.randn(n, t + 1, vocab, device=device, generator=gen) * 2).to(dtype)
    logits = whole[:, :-1].contiguous().requires_grad_()
    ids, _, advantages, weights = _tokens(n, t, vocab, device, gen)
    with torch.no_grad():
        logp = torch.cat(
            [row.float().log_softmax(-1).gather(-1, i[:, None]) for row, i in zip(logits, ids, strict=True)]
        )
    old = _near(logp.view(n, t), gen)
    tokens = (ids, old, advantages, weights)
    rows = torch.randperm(n * t, device=device, generator=gen)[:_CHECKED_ROWS]
    true = _true_logits_gradient(logits.detach()[rows // t, rows % t], rows, list(tokens))
    errors: dict[str, float] = {}
    candidates: list[Candidate] = []
    for name, (loss, leaf, prepare) in _logits_ways(logits, whole, tokens, compiled).items():
        if prepare is not None:
            prepare()
        (grad,) = torch.autograd.grad(loss(leaf), leaf)
        if "half masked" not in name:
            errors[name] = relative(grad[:, :t].reshape(n * t, vocab)[rows], true)
        del grad
        candidates += _modes(name, loss, leaf, prepare, modes)
    for name, choice in _SEPARATE.items():
        separate = functools.partial(
            baselines.separate_kernels, logits.detach(), ids, old, advantages, weights, **choice
        )
        errors[name] = relative(separate()[1].view(n * t, vocab)[rows], true)
        candidates.append(Candidate(name, "full", separate))
    size = 2 * logits.numel() * logits.element_size()
    label = f"{n * t} x {vocab} {str(dtype).removeprefix('torch.')}"
    ours = ("ours", "ours in place", "ours + entropy")
    return Case("fused_logits_grpo", label, candidates, errors, "eager", size, ours)


def _modes(
    name: str,
    loss: Callable[[Tensor], Tensor],
    leaf: Tensor,
    prepare: Callable[[], None] | None,
    modes: tuple[str, ...],
) -> Iterator[Candidate]:
    def full() -> None:
        leaf.grad = None
        loss(leaf).backward()

    def fresh() -> None:
        leaf.grad = None
        if prepare is not None:
            prepare()

    if "full" in modes:
        yield Candidate(name, "full", full, fresh)
    if "forward" in modes:
        yield Candidate(name, "forward", lambda: loss(leaf), fresh)
    if "backward" in modes:
        held: list[Tensor] = []

        def forward() -> None:
            fresh()
            held[:] = [loss(leaf)]

        yield Candidate(name, "backward", lambda: held[0].backward(), forward)


def _true_logits_gradient(x: Tensor, rows: Tensor, tokens: list[Tensor]) -> Tensor:
    """(len(rows), V) gradient in float64, ``x`` their logits; ``tokens``: ids, old, advantages, weights."""
    ids, old, advantages, weights = tokens
    picked = [t.expand_as(old).flatten()[rows] for t in (ids, old, advantages[:, None], weights)]
    log_p = x.double().log_softmax(-1)
    logp = log_p.gather(-1, picked[0][:, None]).squeeze(-1)
    old, advantages, weights = (t.double() for t in picked[1:])
    _, slope = token_terms(logp, old, advantages, weights, None, TokenScalars())
    return (-log_p.exp() * slope[:, None]).scatter_add_(1, picked[0][:, None], slope[:, None])


def _token_inputs(n: int, t: int, device: torch.device, gen: torch.Generator, ragged: bool) -> tuple[Tensor, ...]:
    """(logprobs, old, advantages, weights); ``ragged`` rows end at random."""
    _, old, advantages, weights = _tokens(n, t, 2, device, gen)
    old = old - torch.rand(n, t, device=device, generator=gen) * 5
    if ragged:
        lengths = torch.randint(1, t + 1, (n, 1), device=device, generator=gen)
        weights = weights * (torch.arange(t, device=device) < lengths)
    return _near(old, gen).requires_grad_(), old, advantages, weights


def token_case(n: int, t: int, device: torch.device, *, compiled: bool, ragged: bool, sets: int) -> Case:
    """``grpo_token_loss`` and its rivals on n x t tokens; a call goes over several sets of inputs in turn.

    The inputs of one call fit in a large second-level cache, so a call repeated on the same ones would time
    that.
    """
    gen = torch.Generator(device).manual_seed(0)
    inputs = [_token_inputs(n, t, device, gen, ragged) for _ in range(sets)]

    def over_sets(loss: Callable[..., object], backward: bool) -> Callable[[], None]:
        def call() -> None:
            for logp, *rest in inputs:
                logp.grad = None
                out = loss(logp if backward else logp.detach(), *rest)
                if backward and isinstance(out, Tensor):
                    out.backward()

        return call

    def gradient(loss: Callable[..., Tensor]) -> Tensor:
        return torch.autograd.grad(loss(*inputs[0]), inputs[0][0])[0]

    logp, old, advantages, weights = (t.detach().double() for t in inputs[0])
    true = token_terms(logp, old, advantages[:, None], weights, None, TokenScalars())[1]
    losses: dict[str, Callable[..., Tensor]] = {
        "ours": functools.partial(grpo_token_loss, impl="triton"),
        "eager": baselines.eager_token_loss,
    }
    if compiled:
        losses["torch.compile"] = torch.compile(baselines.eager_token_loss, dynamic=False)
    errors = {name: relative(gradient(loss), true) for name, loss in losses.items()}
    candidates = [Candidate(name, "full", over_sets(loss, True), divide=sets) for name, loss in losses.items()]
    with torch.no_grad():
        errors["atomics"] = relative(baselines.atomic_token_loss(*inputs[0])[1], true)
    atomics = over_sets(baselines.atomic_token_loss, False)
    # what the baseline does, and no more: loss and derivative, without autograd around them
    op = torch.ops.grpo_lit.grpo_token_loss
    scalars, impl = list(TokenScalars()), "triton"
    bare = over_sets(lambda *args: op(*args, None, scalars, impl), False)
    errors["ours (kernel)"] = errors["ours"]
    candidates.append(Candidate("ours (kernel)", "full", bare, divide=sets))
    candidates.append(Candidate("atomics", "full", atomics, divide=sets))
    numbers = 2 * n * t
    pairs = [(torch.randn(numbers, device=device), torch.empty(numbers, device=device)) for _ in range(sets)]
    errors["copy of as many bytes"] = 0.0

    def copy() -> None:
        for source, target in pairs:
            target.copy_(source)

    candidates.append(Candidate("copy of as many bytes", "full", copy, divide=sets))
    label = f"{n * t} tokens ({n} x {t}), {'ragged' if ragged else 'full'}"
    ours = ("ours", "ours (kernel)")
    return Case("grpo_token_loss", label, candidates, errors, "eager", 16 * n * t, ours)


def _head_rivals(weight: Tensor, tokens: tuple[Tensor, ...], compiled: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """Losses of hidden states by others, with the frozen head ``weight``."""
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "eager": lambda h: baselines.eager_logits_loss(h @ weight.t(), *tokens)
    }
    if compiled:
        fast = torch.compile(baselines.eager_logits_loss, dynamic=False)
        losses["torch.compile"] = lambda h: fast(h @ weight.t(), *tokens)
    trl = baselines.trl_head_loss() if weight.is_cuda else None
    if trl is not None:
        losses["trl"] = lambda h: trl(h, weight, *tokens)
    liger = baselines.liger_head_loss(weight) if weight.is_cuda and compiled else None
    if liger is not None:
        losses["liger"] = lambda h: liger(h, *tokens)
    return losses


def head_case(
    n: int,
    t: int,
    width: int,
    vocab: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rivals: bool,
    compiled: bool,
) -> Case:
    """``fused_linear_grpo`` and ``linear_logprobs`` with a frozen head, and their rivals."""
    gen = torch.Generator(device).manual_seed(0)
    weight = (torch.randn(vocab, width, device=device, generator=gen) * width**-0.5 * 2).to(dtype)
    hidden = torch.randn(n, t, width, device=device, generator=gen).to(dtype).requires_grad_()
    ids, old, advantages, weights = _tokens(n, t, vocab, device, gen)
    with torch.no_grad():
        old = _near(linear_logprobs(hidden, weight, ids)[0], gen)
    # the training path leaves the others out of the products
    half = weights * (torch.arange(t, device=device) < t // 2)

    def through_logprobs(h: Tensor, some: Tensor = weights, count: int = n * t) -> Tensor:
        mask = None if some is weights else some != 0
        logp, _ = linear_logprobs(h, weight, ids, mask=mask, num_tokens=count, impl="triton")
        return grpo_token_loss(logp, old, advantages, some, impl="triton")

    def ours(h: Tensor, some: Tensor = weights, count: int = n * t, **options: Any) -> Tensor:
        known = {"num_tokens": count, "impl": "triton"}
        return fused_linear_grpo(h, weight, ids, old, advantages, some, **known, **options)  # type: ignore[arg-type,no-any-return]

    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "ours": ours,
        "ours, half masked": lambda h: ours(h, half, n * (t // 2)),
        "ours, 16-bit logits": lambda h: ours(h, logits_dtype=dtype),
        "ours, linear_logprobs": through_logprobs,
        "ours, linear_logprobs, half masked": lambda h: through_logprobs(h, half, n * (t // 2)),
    }
    if rivals:
        losses |= _head_rivals(weight, (ids, old, advantages, weights), compiled)
    rows = torch.randperm(n * t, device=device, generator=gen)[: _CHECKED_ROWS // 2]
    z = hidden.detach().reshape(n * t, width)[rows].double() @ weight.double().t()
    dz = _true_logits_gradient(z, rows, [ids, old, advantages, weights])
    true = dz @ weight.double()
    errors: dict[str, float] = {}
    candidates: list[Candidate] = []
    for name, loss in losses.items():
        (grad,) = torch.autograd.grad(loss(hidden), hidden)
        if name != "liger" and "half masked" not in name:  # Liger weighs tokens its own way
            errors[name] = relative(grad.reshape(n * t, width)[rows], true)
        candidates += _modes(name, loss, hidden, None, ("full",))
    label = f"{n} x {t} x {vocab}, hidden {width}, {str(dtype).removeprefix('torch.')}"
    reference = "eager" if rivals else "ours, 16-bit logits"
    names = ("ours", "ours, 16-bit logits", "ours, linear_logprobs")
    return Case("fused_linear_grpo", label, candidates, errors, reference, 0, names)


def bandwidth_curve(
    vocabularies: tuple[int, ...], dtype: torch.dtype, device: torch.device, timer: Timer, budget: int
) -> list[float]:
    """Bytes per second of ``fused_logits_grpo`` on ``budget`` bytes of logits of each vocabulary."""
    speeds = []
    for vocab in vocabularies:
        rows = max(1, budget // (vocab * dtype.itemsize))
        gen = torch.Generator(device).manual_seed(0)
        logits = torch.randn(1, rows, vocab, device=device, generator=gen).to(dtype).requires_grad_()
        tokens = _tokens(1, rows, vocab, device, gen)

        def call(logits: Tensor = logits, tokens: tuple[Tensor, ...] = tokens) -> None:
            logits.grad = None
            fused_logits_grpo(logits, *tokens, impl="triton").backward()

        candidate = Candidate("ours", "full", call)
        timer.run([candidate])
        speeds.append(2 * logits.numel() * dtype.itemsize / candidate.percentile(0.5) * 1e3)
    return speeds
