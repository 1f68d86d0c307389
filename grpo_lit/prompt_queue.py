"""One queue of prompts for all ranks, and rows dealt out so that every rank trains on as many tokens.

With a fixed share each, a rank whose completions end early stands still until the slowest rank is through. Here every
rank takes the next prompt when it has slots free, so at the end a rank waits for the rows in flight elsewhere and not
for a whole share; nobody knows the lengths before, so no fixed order does better. Afterwards they are known: the rows
are dealt out longest first, each to the rank with the fewest tokens so far (R. L. Graham: Bounds on multiprocessing
timing anomalies, SIAM J. Appl. Math. 17, 1969: at most 4/3 of the best split). Rows depend on their keys alone and the
deal on the rows alone, so who sampled what leaves no trace.
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
        queue: of the prompts that have rows.
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
    own = rollout.completion_mask[:, 0].nonzero().squeeze(-1) if rollout.num_rows else torch.empty(0, dtype=torch.long)
    return select_rows(rollout, own), own.tolist()


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


def select_rows(rollout: Rollout, rows: Tensor) -> Rollout:
    """`Rollout.select`, for no rows too."""
    if len(rows):
        return rollout.select(rows)
    return Rollout(**{field.name: getattr(rollout, field.name)[:0] for field in fields(rollout)})


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

    def select(self, rows: list[int]) -> JudgedRows:
        """The given rows, in the given order."""
        index = torch.tensor(rows, dtype=torch.long, device=self.rollout.group_ids.device)
        return JudgedRows(
            select_rows(self.rollout, index),
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
        rows = JudgedRows(
            Rollout.concat([rank.rollout for rank in ranks]),
            [number for rank in ranks for number in rank.numbers],
            [text for rank in ranks for text in rank.completions],
            torch.cat([rank.rewards for rank in ranks]),
            {name: torch.cat([rank.per_function[name] for rank in ranks]) for name in self.per_function},
        ).in_order()
        tokens = rows.rollout.prompt_mask.sum(dim=1) + rows.rollout.lengths
        own = rows.select(deal_longest_first(tokens.tolist(), world.size)[world.rank])
        return replace(own, rollout=_moved(own.rollout, device))


def _moved(rollout: Rollout, device: torch.device | str) -> Rollout:
    return Rollout(**{field.name: getattr(rollout, field.name).to(device) for field in fields(rollout)})
