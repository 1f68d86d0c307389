"""In which order, and how many, an epoch serves its prompts: shuffled, by weight, or from pools of difficulty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from grpo_lit.errors import UserError


@dataclass
class SamplerConfig:
    """Which prompts an epoch serves; weights and pools need pass rates, of a SENT cache or a column ``pass_rate``."""

    name: Literal["all", "weighted", "pools"] = "all"
    """all: every prompt once. weighted: a share of them, those of middling pass rate first of all. pools: a fixed
    mixture of pools of pass rate in every batch."""
    fraction: float = 0.5
    """weighted: share of the prompts that an epoch serves."""
    floor: float = 0.05
    """weighted: what is added to each weight p(1 - p), so that no prompt is out for good."""
    pool_edges: list[float] = field(default_factory=lambda: [0.25, 0.75])
    """pools: pass rates where one pool ends (inclusive) and the next begins."""
    pool_shares: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.25])
    """pools: share of each pool in a batch, hard to easy."""

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise UserError("data.sampler.fraction", self.fraction, "above 0 and at most 1")
        if not self.floor > 0:
            raise UserError("data.sampler.floor", self.floor, "a number above 0")
        if self.pool_edges != sorted(set(self.pool_edges)) or not all(0 <= edge < 1 for edge in self.pool_edges):
            raise UserError("data.sampler.pool_edges", self.pool_edges, "ascending pass rates of at least 0, below 1")
        if len(self.pool_shares) != len(self.pool_edges) + 1 or min(self.pool_shares) < 0 or not any(self.pool_shares):
            accepted = f"{len(self.pool_edges) + 1} shares of at least 0, one a pool"
            raise UserError("data.sampler.pool_shares", self.pool_shares, accepted)
        default = {"fraction": 0.5, "floor": 0.05, "pool_edges": [0.25, 0.75], "pool_shares": [0.25, 0.5, 0.25]}
        for option, value in default.items():
            owner = "pools" if option.startswith("pool") else "weighted"
            if self.name != owner and getattr(self, option) != value:
                raise UserError(f"data.sampler.{option}", getattr(self, option), f"{value} without name: {owner}")


def epoch_generator(seed: int, epoch: int) -> np.random.Generator:
    """The random numbers of an epoch's order: a function of seed and epoch alone."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**63, epoch]))


def shuffled(num_prompts: int, generator: np.random.Generator) -> list[int]:
    """All positions in random order."""
    return [int(index) for index in generator.permutation(num_prompts)]


def weighted_order(
    pass_rates: Sequence[float], fraction: float, floor: float, generator: np.random.Generator
) -> list[int]:
    """A weighted sample without replacement, in the order it is drawn.

    Weight: p(1 - p) + floor, the variance of a right-or-wrong reward: a prompt that is always or never solved teaches
    nothing. Drawn by keys u^(1/w), largest first (Efraimidis and Spirakis 2006, algorithm A-Res).

    Args:
        pass_rates: of each prompt.
        fraction: share of the prompts to draw, rounded up.
        floor: added to each weight.
        generator: see `epoch_generator`.
    """
    rates = np.asarray(pass_rates, dtype=np.float64)
    keys = np.log(generator.random(len(rates))) / (rates * (1 - rates) + floor)
    return [int(index) for index in np.argsort(-keys, kind="stable")[: math.ceil(round(fraction * len(rates), 9))]]


def pool_order(
    pass_rates: Sequence[float], edges: Sequence[float], shares: Sequence[float], generator: np.random.Generator
) -> list[int]:
    """Positions such that every stretch of the order holds the pools in their shares; ends when a pool is used up.

    Args:
        pass_rates: of each prompt.
        edges: pass rates that end a pool, inclusive.
        shares: of each pool, need not sum to 1.
        generator: see `epoch_generator`.

    Raises:
        UserError: a pool with a share above 0 is empty.
    """
    pools = np.searchsorted(np.asarray(edges), np.asarray(pass_rates), side="left")
    members = [list(generator.permutation(np.flatnonzero(pools == pool))) for pool in range(len(shares))]
    total = sum(shares)
    empty = [pool for pool, share in enumerate(shares) if share and not members[pool]]
    if empty:
        counts = [len(pool) for pool in members]
        accepted = f"0 for pool {empty[0] + 1}, which is empty (prompts in the pools: {counts})"
        raise UserError("data.sampler.pool_shares", list(shares), accepted)
    order: list[int] = []
    credit = [0.0] * len(shares)
    while True:
        credit = [have + share / total for have, share in zip(credit, shares, strict=True)]
        pool = max(range(len(shares)), key=lambda i: (credit[i], -i))
        if not members[pool]:
            return order
        credit[pool] -= 1
        order.append(int(members[pool].pop()))
