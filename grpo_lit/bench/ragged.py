"""Completions that end at random, and a layout for every step: how long ranks wait for the slowest one."""

from __future__ import annotations

import heapq
import json
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

FIELDS = (
    "layout",
    "steps",
    "tokens",
    "tokens_per_s",
    "step_s",
    "rollout_s",
    "rollout_wait_s",
    "train_wait_s",
    "waited_share",
)


class RaggedLengths(Callback):
    """Lets a model with nothing learnt end its completions, and takes the layouts in turn, a rollout step each.

    With random weights every token is about as likely as any other, so with V / mean of V tokens taken for an EOS the
    lengths are geometric with that mean, cut at the limit.

    Args:
        mean_length: tokens.
        layouts: values of model.rollout.layout.
    """

    def __init__(self, mean_length: int, layouts: list[str]) -> None:
        self.mean_length, self.layouts = mean_length, layouts

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set both for the step that begins."""
        module = cast(Any, pl_module)
        vocabulary = module.live_policy.model.get_input_embeddings().weight.shape[0]
        module.engine.eos_token_ids = list(range(max(1, round(vocabulary / self.mean_length))))
        module.rollout_config.layout = self.layouts[module.rollout_step % len(self.layouts)]


@dataclass(frozen=True)
class Waited:
    """Means over the steps of one layout."""

    layout: str
    steps: int
    tokens: float
    """Completion tokens of a step."""
    step_s: float
    rollout_s: float
    """The slowest rank's."""
    rollout_wait_s: float
    """The longest time that a rank stood still after its rollout."""
    train_wait_s: float
    """The longest time that a rank stood still after its forward and backward passes."""

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens a second of the whole step."""
        return self.tokens / self.step_s

    @property
    def waited_share(self) -> float:
        """Of the step, by the rank that waited longest."""
        return (self.rollout_wait_s + self.train_wait_s) / self.step_s

    def row(self) -> dict[str, object]:
        """Rounded, by `FIELDS`."""
        return {name: _rounded(getattr(self, name)) for name in FIELDS}


def _rounded(value: object) -> object:
    return round(value, 4) if isinstance(value, float) else value


def read_waits(metrics: Path, layouts: Sequence[str], warm_up: int) -> list[Waited]:
    """Sort the steps of a run by layout.

    Args:
        metrics: metrics.jsonl of a run with `RaggedLengths`.
        layouts: as given to it.
        warm_up: steps of each layout that do not count.
    """
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "perf/step_s" in line]
    found = []
    for place, layout in enumerate(layouts):
        timed = steps[place :: len(layouts)][warm_up:]

        def mean(keys: Iterable[str], timed: list[dict[str, float]] = timed) -> float:
            return statistics.fmean(sum(line.get(key, 0.0) for key in keys) for line in timed)

        found.append(
            Waited(
                layout,
                len(timed),
                statistics.fmean(line["perf/tokens_per_sec"] * line["perf/step_s"] for line in timed),
                mean(["perf/step_s"]),
                mean(["perf/rollout_s"]),
                mean(["perf/rank_wait_rollout_s"]),
                # the ranks meet after the backward passes; the all-reduce that follows waits for nobody
                mean(["perf/rank_wait_train_s"]),
            )
        )
    return found


def expected_wait(
    layout: str, ranks: int, prompts: int, group_size: int, in_flight: int, mean_length: float, limit: int
) -> float:
    """Share of a rollout that the rank which is through first waits for the last, by the lengths alone.

    The mean of 2000 rollouts in which every decode step takes as long, whatever the number of rows.

    >>> expected_wait("groups", 2, 3, group_size=2, in_flight=2, mean_length=1e9, limit=100)
    0.5

    Args:
        layout: of `grpo_lit.rollout.RolloutConfig`.
        ranks: processes.
        prompts: of a step, on all ranks together.
        group_size: completions of each.
        in_flight: rows of a rank that are sampled together.
        mean_length: tokens of a completion, geometric.
        limit: its most tokens.
    """
    generator, waited, total = random.Random(0), 0, 0
    for _ in range(2000):
        free = [[0] * in_flight for _ in range(ranks)]  # when each place of each rank is free again
        for prompt in range(prompts):
            first = prompt % ranks if layout == "groups" else 0
            if layout == "queue":  # who has a place free first
                first = min(range(ranks), key=lambda rank: free[rank][0])
            for row in range(group_size):
                places = free[(first + row) % ranks if layout == "split" else first]
                length = min(limit, 1 + int(generator.expovariate(1 / mean_length)))
                heapq.heapreplace(places, places[0] + length)
        ends = [max(places) for places in free]
        waited, total = waited + max(ends) - min(ends), total + max(ends)
    return waited / total
