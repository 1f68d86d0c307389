"""The next token of each row from its logits and one uniform number, and its log-prob, in one reading.

With p = softmax(logits / temperature) and u in [0, 1) the token is the first one whose cumulative probability
exceeds u: inversion of the distribution function, so the same numbers give the same tokens in every engine.
The sums run in float64; in float32 the tail of a large vocabulary would be lost to rounding. Temperature 0
takes the most probable token (the first of equals) and its log-prob at temperature 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.kernels.dispatch import resolve_impl


@torch.no_grad()
def sample_token(
    logits: Tensor, uniform: Tensor, *, temperature: float = 1.0, impl: str | None = None
) -> tuple[Tensor, Tensor]:
    """Draws a token a row. No gradient flows.

    Args:
        logits: (R, V); -inf excludes a token, at least one a row must be finite.
        uniform: (R,) float64 in [0, 1); not read at temperature 0.
        temperature: divides the logits; 0 is greedy.
        impl: ``"triton"``, ``"torch"`` or None for the device's default.

    Returns:
        ids (R,) long, and logprobs (R,) float32 in the distribution drawn from.

    Raises:
        UserError: for shapes that don't fit, or a temperature below 0.
    """
    if logits.dim() != 2 or logits.shape[1] < 1:
        raise UserError("logits", tuple(logits.shape), "(R, V), V >= 1")
    if uniform.shape != logits.shape[:1] or uniform.dtype != torch.float64:
        raise UserError("uniform", (uniform.dtype, tuple(uniform.shape)), f"float64 ({len(logits)},)")
    if not temperature >= 0:
        raise UserError("temperature", temperature, "a number of at least 0")
    if resolve_impl("sample_token", impl, logits.device) == "triton":
        from grpo_lit.kernels._triton.sample_token import sample

        return sample(logits, uniform, temperature)
    return _reference(logits, uniform, temperature)


def _reference(logits: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    if temperature == 0:
        logprobs = wide.log_softmax(dim=-1)
        chosen = wide.argmax(dim=-1, keepdim=True)
    else:
        logprobs = (wide / temperature).log_softmax(dim=-1)
        cumulative = logprobs.double().exp().cumsum(dim=-1)  # (R, V)
        target = uniform.unsqueeze(-1) * cumulative[:, -1:]
        index = torch.searchsorted(cumulative, target, right=True)
        # u times the total can round up to the total: then it is the last token of positive probability
        last = (cumulative < cumulative[:, -1:]).sum(dim=-1, keepdim=True)
        chosen = torch.minimum(index, last)
    return chosen.squeeze(-1), logprobs.gather(-1, chosen).squeeze(-1)
