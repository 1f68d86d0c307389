"""Which prompts get more completions: VIGOR's rounds, and the uniform allocation of the same budget.

```
round 1   2 each for all 8 prompts      rank by variance of all rewards so far, keep half
round 2   4 each for the best 4         ...
round 3   8 each for the best 2
round 4  16 for the best one            30 14 6 6 2 2 2 2 = 64 completions, as many as 8 each
```
VIGOR, 2607.22002. A group whose rewards are all equal teaches nothing, so the budget goes to where they
differ. Two cautions. With two binary rewards the first variance is 0 or 1/4, so index ties decide much of
round one: pass a seed to break them at random. And the number of completions of a prompt depends on its
rewards, which biases the group's mean a little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_lit.errors import UserError


class VigorAllocator:
    """Hands out completions in rounds, more of them to prompts whose rewards vary.

    Usage: draw `next_counts()` completions, `observe` the rewards of every prompt that got some, repeat until
    `next_counts()` returns None. One allocator serves one rollout.

    Args:
        num_prompts: prompts in the rollout.
        initial_count: completions of each prompt in the first round.
        rounds: rounds in all.
        keep_fraction: share of the active prompts that goes on, rounded up, at least one.
        expansion: factor on the completions per prompt from one round to the next.
        seed: break ties by a random order of the prompts; None breaks them by lower index.

    Raises:
        UserError: for a value out of its range.
    """

    def __init__(
        self,
        num_prompts: int,
        initial_count: int = 2,
        rounds: int = 4,
        *,
        keep_fraction: float = 0.5,
        expansion: int = 2,
        seed: int | None = None,
    ) -> None:
        for name, value in (
            ("num_prompts", num_prompts),
            ("initial_count", initial_count),
            ("rounds", rounds),
        ):
            if int(value) != value or value < 1:
                raise UserError(f"vigor.{name}", value, "a whole number >= 1")
        if not 0 < keep_fraction <= 1:
            raise UserError("vigor.keep_fraction", keep_fraction, "in (0, 1]")
        if int(expansion) != expansion or expansion <= 1:
            raise UserError("vigor.expansion", expansion, "a whole number > 1")
        self.num_prompts = num_prompts
        self.initial_count = initial_count
        self.rounds = rounds
        self.keep_fraction = keep_fraction
        self.expansion = expansion
        self.seed = seed
        self._active = list(range(num_prompts))
        self._rewards: list[list[float]] = [[] for _ in range(num_prompts)]
        self._round = -1  # no round handed out yet
        self._observed: set[int] = set()
        self._priority = list(range(num_prompts))
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self._priority = torch.randperm(num_prompts, generator=generator).tolist()

    @property
    def round(self) -> int:
        """Rounds handed out so far."""
        return self._round + 1

    def next_counts(self) -> Tensor | None:
        """Completions to draw now for each prompt, (num_prompts,) int64; None when all rounds are done.

        Raises:
            RuntimeError: if an active prompt of the round before was not observed.
        """
        if self._round >= 0:
            missing = [prompt for prompt in self._active if prompt not in self._observed]
            if missing:
                raise RuntimeError(f"prompts {missing} were not observed in round {self.round}")
        if self._round + 1 >= self.rounds:
            return None
        if self._round >= 0:
            ranked = sorted(self._active, key=lambda prompt: (-self.variance(prompt), self._priority[prompt]))
            self._active = ranked[: _kept(len(ranked), self.keep_fraction)]
        self._round += 1
        self._observed = set()
        counts = torch.zeros(self.num_prompts, dtype=torch.int64)
        counts[self._active] = self._count(self._round)
        return counts

    def observe(self, prompt_index: int, rewards: Sequence[float | None] | Tensor) -> None:
        """Takes the rewards of one prompt's completions of this round.

        Args:
            prompt_index: the prompt.
            rewards: one a completion; None or NaN = abstained, drawn but without a say in the variance.

        Raises:
            UserError: for a prompt that is not active or was observed already, a wrong number of rewards, or an
                infinite one.
        """
        values = rewards.tolist() if isinstance(rewards, Tensor) else list(rewards)
        numbers = [math.nan if value is None else float(value) for value in values]
        if self._round < 0 or prompt_index not in self._active:
            raise UserError("prompt_index", prompt_index, f"a prompt active in this round: {sorted(self._active)}")
        if prompt_index in self._observed:
            raise UserError("prompt_index", prompt_index, "a prompt not observed yet in this round")
        if len(numbers) != self._count(self._round):
            raise UserError("rewards", f"{len(numbers)} numbers", f"{self._count(self._round)} numbers this round")
        if any(math.isinf(number) for number in numbers):
            raise UserError("rewards", numbers, "finite numbers, None or NaN")
        self._rewards[prompt_index].extend(numbers)
        self._observed.add(prompt_index)

    def variance(self, prompt_index: int) -> float:
        """Population variance of all rewards of the prompt so far; exactly 0 if equal or none is known."""
        known = [reward for reward in self._rewards[prompt_index] if not math.isnan(reward)]
        if not known or min(known) == max(known):
            return 0.0
        # fsum rounds once, whatever the order: equal sets of rewards tie exactly
        mean = math.fsum(known) / len(known)
        return math.fsum((reward - mean) ** 2 for reward in known) / len(known)

    def totals(self) -> Tensor:
        """Completions observed so far for each prompt, (num_prompts,) int64."""
        return torch.tensor([len(rewards) for rewards in self._rewards], dtype=torch.int64)

    def budget(self) -> int:
        """Completions of all rounds together; known beforehand, whatever the rewards."""
        total, active = 0, self.num_prompts
        for index in range(self.rounds):
            total += active * self._count(index)
            active = _kept(active, self.keep_fraction)
        return total

    def budget_note(self) -> str | None:
        """One line where the budget is not `initial_count * rounds` completions each; otherwise None."""
        budget, even = self.budget(), self.num_prompts * self.initial_count * self.rounds
        if budget == even:
            return None
        return (
            f"VIGOR draws {budget} completions for {self.num_prompts} prompts, not the {even} of "
            f"{self.initial_count * self.rounds} each: {budget / self.num_prompts:.2f} a prompt"
        )

    def _count(self, index: int) -> int:
        """Completions of each active prompt in a round."""
        return int(self.initial_count * self.expansion**index)


class UniformAllocator:
    """The same number of completions for every prompt, in one round; same interface as `VigorAllocator`.

    Args:
        num_prompts: prompts in the rollout.
        budget: completions in all. What doesn't divide evenly goes to the prompts of lowest index, one each.

    Raises:
        UserError: if there are fewer completions than prompts.
    """

    def __init__(self, num_prompts: int, budget: int) -> None:
        if num_prompts < 1:
            raise UserError("num_prompts", num_prompts, "a whole number >= 1")
        if budget < num_prompts:
            raise UserError("budget", budget, f"at least one completion a prompt, so >= {num_prompts}")
        self.num_prompts = num_prompts
        share, rest = divmod(budget, num_prompts)
        self._counts = torch.full((num_prompts,), share, dtype=torch.int64)
        self._counts[:rest] += 1
        self._handed_out = False

    def next_counts(self) -> Tensor | None:
        """Completions to draw now for each prompt, (num_prompts,) int64; None after the only round."""
        if self._handed_out:
            return None
        self._handed_out = True
        return self._counts.clone()

    def observe(self, prompt_index: int, rewards: Sequence[float | None] | Tensor) -> None:
        """Checks the number of completions; their rewards change nothing here.

        Raises:
            UserError: for a wrong number of rewards.
        """
        expected = int(self._counts[prompt_index])
        if len(rewards) != expected:
            raise UserError("rewards", f"{len(rewards)} numbers", f"{expected} numbers")

    def budget(self) -> int:
        """Completions in all."""
        return int(self._counts.sum())

    def budget_note(self) -> str | None:
        """One line where prompts don't all get the same number; otherwise None."""
        low, high = int(self._counts.min()), int(self._counts.max())
        if low == high:
            return None
        return f"{self.budget()} completions over {self.num_prompts} prompts: {low} or {high} each"


def _kept(active: int, fraction: float) -> int:
    # rounded first: 0.07 * 100 is 7.000000000000001 in floating point
    return max(1, math.ceil(round(fraction * active, 9)))
