"""A policy of 24 logits that learns to repeat a letter, small enough to enumerate.

```
prompt a, b or c -> state 0, 1, 2 --action--> a, b, c: state 3, 4, 5 --action--> ... up to three tokens
                                     \\-----> EOS: the completion ends
```
Six states of four actions (a, b, c, EOS). The second and third token depend on the token before them alone.
Reward 1 for the prompt's letter followed by EOS, otherwise 0; with all logits 0 that has probability 1/16.
It is the task of grpo.cpp's tiny trainer, and everything but the policy comes from `grpo_lit.loss`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

NUM_PROMPTS = 3
NUM_ACTIONS = 4
EOS = 3
MAX_TOKENS = 3


class Uniforms(Protocol):
    """A source of uniform random numbers."""

    def uniforms(self, count: int) -> np.ndarray:
        """The next `count` numbers in [0, 1)."""
        ...


class EchoRollout(NamedTuple):
    """Sampled completions, one a row, prompts in order.

    Args:
        states: (N, 3) state each action was taken in; 0 behind the end.
        actions: (N, 3) actions; 0 behind the end.
        mask: (N, 3) bool, True up to the end, EOS included.
        group_ids: (N,) prompt.
        rewards: (N,) float32.
    """

    states: Tensor
    actions: Tensor
    mask: Tensor
    group_ids: Tensor
    rewards: Tensor


class EchoPolicy(nn.Module):
    """The 24 logits, all 0 at the start."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(2 * NUM_PROMPTS, NUM_ACTIONS, dtype=dtype))

    def logprobs(self, states: Tensor, actions: Tensor) -> Tensor:
        """Log-prob of each action in its state, any shape."""
        return torch.log_softmax(self.logits, dim=-1)[states, actions]

    @torch.no_grad()
    def success(self) -> float:
        """Mean over prompts of the exact probability of the right answer."""
        probabilities = torch.softmax(self.logits, dim=-1).double()
        right = [probabilities[i, i] * probabilities[NUM_PROMPTS + i, EOS] for i in range(NUM_PROMPTS)]
        return float(sum(right) / NUM_PROMPTS)

    @torch.no_grad()
    def is_greedy_right(self) -> bool:
        """The most probable completion is right for every prompt."""
        best = self.logits.argmax(dim=-1).tolist()
        return all(best[i] == i and best[NUM_PROMPTS + i] == EOS for i in range(NUM_PROMPTS))

    @torch.no_grad()
    def sample(self, uniforms: Uniforms, counts: int | Sequence[int]) -> EchoRollout:
        """Completions for each prompt, one after the other, by inverse CDF.

        Args:
            uniforms: source of random numbers, one a token in the order of sampling.
            counts: completions of every prompt, or of each one.
        """
        counts = [counts] * NUM_PROMPTS if isinstance(counts, int) else counts
        cumulative = _cumulative(torch.softmax(self.logits, dim=-1).numpy())
        completions: list[tuple[int, tuple[int, ...]]] = []
        for prompt in range(NUM_PROMPTS):
            for _ in range(counts[prompt]):
                actions: list[int] = []
                state = prompt
                while len(actions) < MAX_TOKENS and EOS not in actions:
                    action = int(np.searchsorted(cumulative[state], uniforms.uniforms(1)[0], side="left"))
                    actions.append(action)
                    state = NUM_PROMPTS + action
                completions.append((prompt, tuple(actions)))
        return as_rollout(completions)

    @torch.no_grad()
    def enumerate(self, prompt: int) -> tuple[EchoRollout, Tensor]:
        """Every completion of a prompt, with its exact probability (rows,) float64."""
        completions = [
            (prompt, actions)
            for length in range(1, MAX_TOKENS + 1)
            for actions in itertools.product(range(NUM_ACTIONS), repeat=length)
            if EOS not in actions[:-1] and (actions[-1] == EOS or length == MAX_TOKENS)
        ]
        rollout = as_rollout(completions)
        logprobs = torch.where(rollout.mask, self.logprobs(rollout.states, rollout.actions).double(), 0)
        return rollout, logprobs.sum(dim=1).exp()


def as_rollout(completions: list[tuple[int, tuple[int, ...]]]) -> EchoRollout:
    """Rows from pairs of prompt and actions, with their rewards."""
    shape = (len(completions), MAX_TOKENS)
    states = torch.zeros(shape, dtype=torch.long)
    actions = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    rewards = torch.zeros(shape[0])
    for row, (prompt, taken) in enumerate(completions):
        length = len(taken)
        visited = [prompt, *(NUM_PROMPTS + action for action in taken[:-1])]
        states[row, :length] = torch.tensor(visited)
        actions[row, :length] = torch.tensor(taken)
        mask[row, :length] = True
        rewards[row] = float(taken == (prompt, EOS))
    group_ids = torch.tensor([prompt for prompt, _ in completions])
    return EchoRollout(states, actions, mask, group_ids, rewards)


def _cumulative(probabilities: np.ndarray) -> np.ndarray:
    """Cumulative sums of float32 rows, renormalised in float64, the last one exactly 1."""
    exact = probabilities.astype(np.float64)
    cumulative = np.cumsum(exact / exact.sum(axis=1, keepdims=True), axis=1)
    cumulative[:, -1] = 1.0
    return cumulative
