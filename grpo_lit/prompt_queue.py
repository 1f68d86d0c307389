"""One queue of prompts for all ranks, and rows dealt out so that every rank trains on as many tokens.

With a fixed share each, a rank whose completions end early stands still until the slowest rank is through. Here every
rank takes the next prompt when it has slots free, so at the end a rank waits for the rows in flight elsewhere and not
for a whole share. What is expected to be long comes first, so that little is left to wait for at the end: a prompt
that was answered before, in an earlier round of VIGOR or an earlier epoch, is expected to be answered as long again
(`PromptLengths`). Where ranks are many for the groups, groups are given out in parts (`longest_first`).

Afterwards the lengths are known: the rows are dealt out longest first, each to the rank with the fewest tokens so far.
Both orders are R. L. Graham's (Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17, 1969: at most 4/3 of
the best split). Rows depend on their keys alone and the deal on the rows alone, so who sampled what, and when, leaves
no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_lit.rollout import Rollout, RolloutEngine

if TYPE_CHECKING:
    from grpo_lit.world import WorldView


PARTS_OF_A_SHARE = 4
"""A rank comes to the queue at least so often. In simulations of two groups a rank 2 leave the rollout longer than 4,
and what 8 save in waiting goes into prefilling the prompt of every part anew."""


def longest_first(
    wanted: Sequence[range], expected: Sequence[float], num_ranks: int, in_flight: int
) -> list[tuple[int, range]]:
    """The order in which rows are given out: prompts by expected length, each whole or in parts of about equal size.

    No part is larger than a quarter of a rank's equal share of the rows (`PARTS_OF_A_SHARE`), so with four groups a
    rank or more they stay whole. What fills the slots of all ranks at the start is dealt like cards: the rank that
    comes first takes as much as it has slots for, and that must not be everything long.

    >>> [prompt for prompt, _ in longest_first([range(2)] * 8, [5, 8, 1, 3, 7, 2, 6, 4], num_ranks=2, in_flight=4)]
    [1, 6, 4, 0, 7, 3, 5, 2]
    >>> longest_first([range(4), range(4, 6)], [9, 9], num_ranks=1, in_flight=2)
    [(0, range(0, 2)), (0, range(2, 4)), (1, range(4, 6))]

    Args:
        wanted: completion numbers of each prompt, the same on every rank like all arguments.
        expected: tokens of each prompt's longest completion; where it is equal, the order stays as it is.
        num_ranks: that share the queue.
        in_flight: rows that a rank samples at once.

    Returns:
        Prompt and completion numbers of each part.
    """
    most = max(1, -(-sum(map(len, wanted)) // (PARTS_OF_A_SHARE * num_ranks)))
    parts: list[tuple[int, range]] = []
    at_once = 0  # parts that are taken at the start
    for prompt in sorted(range(len(wanted)), key=lambda prompt: -expected[prompt]):
        rows, count = wanted[prompt], -(-len(wanted[prompt]) // most)
        for part in range(count):
            at_once += in_flight * num_ranks > sum(len(rows) for _, rows in parts)
            parts.append((prompt, rows[len(rows) * part // count : len(rows) * (part + 1) // count]))
    return [part for rank in range(num_ranks) for part in parts[rank:at_once:num_ranks]] + parts[at_once:]


class PromptLengths:
    """How long the longest completion of each prompt was in a round, by the prompt's row number in the dataset.

    What ranks wait for is the last long row. Where rows of one prompt differ little, the longest tells as much as the
    mean; where any prompt may have one long row, to go by the mean makes rollouts up to 5 % longer than no order at
    all, in simulations, and to go by the longest does not. Each round counts as much as all before it, since lengths
    drift while a policy learns.

    Args:
        most: prompts to remember; the ones that were answered longest ago are forgotten.
    """

    def __init__(self, most: int = 2**16) -> None:
        self._most = most
        self._longest: dict[int, float] = {}

    def observe(self, prompts: Sequence[int], lengths: Sequence[int]) -> None:
        """Learn from a round.

        Args:
            prompts: (N) row number of each row's prompt.
            lengths: (N) tokens of each row's completion.
        """
        round_longest: dict[int, int] = {}
        for prompt, length in zip(prompts, lengths, strict=True):
            round_longest[prompt] = max(round_longest.get(prompt, 0), length)
        for prompt, longest in round_longest.items():
            self._longest[prompt] = (self._longest.pop(prompt, longest) + longest) / 2  # at the end, as the latest
        while len(self._longest) > self._most:
            del self._longest[next(iter(self._longest))]

    def expected(self, prompts: Sequence[int]) -> list[float]:
        """Tokens of the longest completion of each prompt; of one never answered, the mean of the others given.

        >>> lengths = PromptLengths()
        >>> lengths.observe([7, 7, 3], [10, 25, 5])
        >>> lengths.expected([3, 4, 7])
        [5.0, 15.0, 25.0]
        """
        known = [self._longest[prompt] for prompt in prompts if prompt in self._longest]
        mean = sum(known) / len(known) if known else 0.0
        return [self._longest.get(prompt, mean) for prompt in prompts]

    def state_dict(self) -> dict[int, float]:
        """For a checkpoint, the prompts answered longest ago first."""
        return dict(self._longest)

    def load_state_dict(self, state: dict[int, float]) -> None:
        """Go on from what `state_dict` gave."""
        self._longest = dict(state)


class PromptQueue:
    """Gives each of some prompts to exactly one rank, in their order.

    The counter lies in the store that the process group keeps anyway; taking a prompt is one request to it and waits
    for nobody.

    Args:
        prompts: positions to give out, the same on every rank.
        number: of the queue, the same on every rank and new for every queue, such as `PhaseRecorder.attempt_number`;
            queues that a rank counted itself would drift apart where one rank fails before it made its own.
        store: shared by the ranks; None takes that of the process group.
    """

    def __init__(self, prompts: Sequence[int], number: int, store: dist.Store | None = None) -> None:
        self._prompts = prompts
        self._store = store or dist.distributed_c10d._get_default_store()
        self._key = f"prompt_queue/{number}"

    def __call__(self) -> int | None:
        """The next prompt, None after the last."""
        taken = int(self._store.add(self._key, 1)) - 1
        return self._prompts[taken] if taken < len(self._prompts) else None


def generate_from_queue(
    engine: RolloutEngine, queue: PromptQueue, share: int, generate: Callable[[], Rollout]
) -> tuple[Rollout, list[int]]:
    """Sample what this rank takes from the queue.

    Args:
        engine: one with an attribute `claim`.
        queue: of the engine's prompts.
        share: rows in flight at most, so that no rank takes everything at the start.
        generate: calls the engine for the rows of all prompts.

    Returns:
        This rank's rows, and which of all rows they are.
    """
    batch_size, share = engine.batch_size, max(share, 1)
    engine.batch_size, engine.claim = min(batch_size or share, share), queue  # type: ignore[attr-defined]
    try:
        rollout = generate()
    finally:
        engine.batch_size, engine.claim = batch_size, None  # type: ignore[attr-defined]
    own = rollout.lengths.nonzero().squeeze(-1)
    return rollout.select(own), own.tolist()


def deal_longest_first(tokens: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Which rows each rank gets, in ascending order.

    >>> deal_longest_first([9, 1, 5, 4, 2], 2)
    [[0, 4], [1, 2, 3]]
    """
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    totals = [0] * num_ranks
    for row in sorted(range(len(tokens)), key=lambda row: -tokens[row]):
        rank = min(range(num_ranks), key=lambda rank: (totals[rank], rank))
        dealt[rank].append(row)
        totals[rank] += tokens[row]
    return [sorted(rows) for rows in dealt]


@dataclass(frozen=True)
class JudgedRows:
    """Sampled rows with what was found about them, in any order."""

    rollout: Rollout
    numbers: list[int]
    """(N) number of each row within its group."""
    completions: list[str]
    """(N) text of each row."""
    rewards: Tensor
    """(N,) float32."""
    per_function: dict[str, Tensor]
    """Reward of each function, (N,) each."""

    @staticmethod
    def concat(parts: Sequence[JudgedRows]) -> JudgedRows:
        """The rows of all parts, one after the other."""
        return JudgedRows(
            Rollout.concat([part.rollout for part in parts]),
            [number for part in parts for number in part.numbers],
            [text for part in parts for text in part.completions],
            torch.cat([part.rewards for part in parts]),
            {name: torch.cat([part.per_function[name] for part in parts]) for name in parts[0].per_function},
        )

    def select(self, rows: list[int]) -> JudgedRows:
        """The given rows, in the given order."""
        index = torch.tensor(rows, dtype=torch.long, device=self.rollout.group_ids.device)
        return JudgedRows(
            self.rollout.select(index),
            [self.numbers[row] for row in rows],
            [self.completions[row] for row in rows],
            self.rewards[rows],
            {name: values[rows] for name, values in self.per_function.items()},
        )

    def in_order(self) -> JudgedRows:
        """Groups together, numbers ascending."""
        groups = self.rollout.group_ids.tolist()
        return self.select(sorted(range(len(groups)), key=lambda row: (groups[row], self.numbers[row])))

    def dealt(self, world: WorldView) -> JudgedRows:
        """The rows of all ranks, dealt out anew by `deal_longest_first`; every rank has to call it."""
        device = self.rollout.group_ids.device
        ranks: list[JudgedRows] = world.gather(replace(self, rollout=_moved(self.rollout, "cpu")))
        rows = JudgedRows.concat(ranks).in_order()
        tokens = rows.rollout.prompt_mask.sum(dim=1) + rows.rollout.lengths
        own = rows.select(deal_longest_first(tokens.tolist(), world.size)[world.rank])
        return replace(own, rollout=_moved(own.rollout, device))


def _moved(rollout: Rollout, device: torch.device | str) -> Rollout:
    return Rollout(**{field.name: getattr(rollout, field.name).to(device) for field in fields(rollout)})
