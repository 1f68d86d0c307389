"""Sampling as a function of (seed, stream, step, prompt, completion, position) and nothing else.

Each row of a rollout has a 128-bit key; each position of it one uniform number from a counter-based generator
(Philox, Salmon et al. 2011, as numpy implements it). A token is drawn by inverting the cumulative distribution at
that number. So a replay, a resume or another batch size draws the same numbers for the same row, in every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

Stream = Literal["train", "val", "generate"]
_STREAMS: dict[Stream, int] = {"train": 0, "val": 1, "generate": 2}


def row_keys(
    seed: int, step: int, prompt_indices: Sequence[int], completion_indices: Sequence[int], stream: Stream = "train"
) -> NDArray[np.uint64]:
    """Keys of the rows of a rollout.

    Args:
        seed: of the run, taken modulo 2**32.
        step: rollout step, from 0, below 2**24.
        prompt_indices: (N,) index of each row's prompt in its dataset, below 2**40.
        completion_indices: (N,) number of each row within its group, below 2**24.
        stream: what the rollout is for, so that validation never repeats the draws of training.

    Returns:
        (N, 2) uint64; distinct for distinct arguments.
    """
    run = ((seed % 2**32) << 32) | (_STREAMS[stream] << 24) | step
    rows = [
        (run, (prompt << 24) | completion)
        for prompt, completion in zip(prompt_indices, completion_indices, strict=True)
    ]
    return np.array(rows, dtype=np.uint64).reshape(-1, 2)


def uniforms(keys: NDArray[np.uint64], num_tokens: int) -> Tensor:
    """One number in [0, 1) for each row and position.

    Args:
        keys: (N, 2) uint64 from `row_keys`.
        num_tokens: positions; the numbers of the first ones do not depend on it.

    Returns:
        (N, num_tokens) float64 on the CPU.
    """
    rows = [np.random.Generator(np.random.Philox(key=key)).random(num_tokens) for key in keys]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, num_tokens, dtype=torch.float64)


def sample_tokens(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token a row by inverting the cumulative distribution.

    The sum runs in float64: in float32 the tail of a large vocabulary would be lost to rounding.

    Args:
        logprobs: (N, V), normalised; -inf where a token is excluded.
        uniform: (N,) float64 in [0, 1).

    Returns:
        (N,) long: the first index whose cumulative probability exceeds the uniform number.
    """
    cumulative = logprobs.double().exp().cumsum(dim=-1)  # (N, V)
    target = uniform.to(cumulative).unsqueeze(-1) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # u * total can round up to total itself: then the answer is the last token of positive probability.
    last = (cumulative < cumulative[:, -1:]).sum(dim=-1)
    return torch.minimum(index, last)


def warpers(top_p: float, top_k: int, min_p: float) -> list[LogitsProcessor]:
    """transformers' truncations, in the order it applies them; those that are switched off are left out."""
    chosen: list[LogitsProcessor] = []
    if top_k > 0:
        chosen.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chosen.append(TopPLogitsWarper(top_p))
    if min_p > 0.0:
        chosen.append(MinPLogitsWarper(min_p))
    return chosen


class SeededSampler(LogitsProcessor):
    """A logits processor that picks the next token itself, from prescribed uniform numbers.

    transformers' ``generate`` then runs greedily over scores that are 0 at the chosen token and -inf elsewhere.

    Args:
        uniform: (N, T) float64, one number a row and position; ignored at temperature 0.
        num_prompt_tokens: length of the padded prompts.
        temperature: 0 takes the most probable token and reports its untempered log-prob.
        top_p, top_k, min_p: truncation, renormalised over what is kept; 1.0, 0 and 0.0 switch them off.

    Attributes:
        logprobs: one (N,) float32 tensor a position: log-prob of the chosen token in the distribution sampled from.
    """

    def __init__(
        self,
        uniform: Tensor,
        num_prompt_tokens: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
    ) -> None:
        self.uniform = uniform
        self.num_prompt_tokens = num_prompt_tokens
        self.temperature = temperature
        self.logprobs: list[Tensor] = []
        self._warpers = warpers(top_p, top_k, min_p)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Choose the token after input_ids (N, L) from scores (N, V)."""
        logits = scores.float()
        if self.temperature == 0:
            logprobs = logits.log_softmax(dim=-1)
            chosen = logits.argmax(dim=-1)
        else:
            logits = logits / self.temperature
            for warper in self._warpers:
                logits = warper(input_ids, logits)
            logprobs = logits.log_softmax(dim=-1)
            chosen = sample_tokens(logprobs, self.uniform[:, input_ids.shape[1] - self.num_prompt_tokens])
        self.logprobs.append(logprobs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1))
        return torch.full_like(scores, -torch.inf).scatter(-1, chosen.unsqueeze(-1), 0.0)
