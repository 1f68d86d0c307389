"""Completions that end at random, and a layout for every step: how long ranks wait for the slowest one."""

from __future__ import annotations

import heapq
import json
import math
import random
import statistics
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from numpy.typing import NDArray
from typing_extensions import override

from grpo_lit.prompt_queue import PromptLengths, longest_first
from grpo_lit.rollout import Rollout, row_keys

FIELDS = (
    "layout",
    "by_prompt",
    "steps",
    "tokens",
    "tokens_per_s",
    "step_s",
    "rollout_s",
    "rollout_wait_s",
    "train_wait_s",
    "waited_share",
)


LAYOUTS = ("groups", "split", "queue", "longest")
"""Those of `grpo_lit.rollout.RolloutConfig`, its queue once with no prompt seen before and once with all."""


class _Lengths(PromptLengths):
    """Learns in every step, and knows in some."""

    knows = True

    @override
    def expected(self, prompts: Sequence[int]) -> list[float]:
        return super().expected(prompts) if self.knows else [0.0] * len(prompts)


class RaggedLengths(Callback):
    """Lets a model with nothing learnt end its completions, and takes the layouts in turn, a rollout step each.

    With random weights every token is about as likely as any other, so with V / mean of V tokens taken for an EOS the
    lengths are geometric with that mean, cut at the limit.

    Args:
        mean_length: tokens.
        layouts: of `LAYOUTS`.
        by_prompt: all rows of a prompt draw the same random numbers, in every step, and so are as long.
    """

    def __init__(self, mean_length: int, layouts: list[str], by_prompt: bool = False) -> None:
        self.mean_length, self.layouts, self.by_prompt = mean_length, layouts, by_prompt

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have lengths known in some steps only, and go by prompt if wanted."""
        module = cast(Any, pl_module)
        module.prompt_lengths = _Lengths()
        generate = module.engine.generate

        def generate_by_prompt(
            prompts: Sequence[Sequence[int]], counts: Sequence[int], keys: NDArray[np.uint64], *others: Any
        ) -> Rollout:
            del keys
            names = [
                zlib.crc32(repr(list(ids)).encode()) for ids, n in zip(prompts, counts, strict=True) for _ in range(n)
            ]
            return cast(Rollout, generate(prompts, counts, row_keys(0, 0, names, [0] * len(names)), *others))

        if self.by_prompt:
            module.engine.generate = generate_by_prompt

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set what is an EOS, and the layout, for the step that begins."""
        module = cast(Any, pl_module)
        vocabulary = module.live_policy.model.get_input_embeddings().weight.shape[0]
        module.engine.eos_token_ids = list(range(max(1, round(vocabulary / self.mean_length))))
        layout = self.layouts[module.rollout_step % len(self.layouts)]
        module.prompt_lengths.knows = layout == "longest"
        module.rollout_config.layout = "queue" if layout == "longest" else layout


@dataclass(frozen=True)
class Waited:
    """Means over the steps of one layout."""

    layout: str
    by_prompt: int
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


def read_waits(metrics: Path, layouts: Sequence[str], by_prompt: bool, warm_up: int) -> list[Waited]:
    """Sort the steps of a run by layout.

    Args:
        metrics: metrics.jsonl of a run with `RaggedLengths`.
        layouts: as given to it.
        by_prompt: likewise.
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
                int(by_prompt),
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
    layout: str,
    ranks: int,
    prompts: int,
    group_size: int,
    in_flight: int,
    mean_length: float,
    limit: int,
    by_prompt: float = 0.0,
) -> tuple[float, float]:
    """What the lengths alone make of a layout, as the mean of 1000 rollouts.

    Every decode step takes as long, whatever the number of rows, and prefilling takes no time.

    >>> expected_wait("groups", 2, 3, group_size=2, in_flight=2, mean_length=1e9, limit=100)
    (0.5, 200.0)

    Args:
        layout: of `LAYOUTS`.
        ranks: processes.
        prompts: of a step, on all ranks together.
        group_size: completions of each.
        in_flight: rows of a rank that are sampled together.
        mean_length: tokens of a completion, geometric.
        limit: its most tokens.
        by_prompt: share of the variance that lies between prompts, of the lengths' normal scores: with 1 all rows of a
            prompt are as long.

    Returns:
        Share of a rollout that the rank which is through first waits for the last; decode steps of the rollout.
    """
    generator, waited, total = random.Random(0), 0, 0
    wanted, between, within = [range(group_size)] * prompts, math.sqrt(by_prompt), math.sqrt(1 - by_prompt)

    def group(of_prompt: float) -> list[int]:
        scores = [between * of_prompt + within * generator.gauss(0, 1) for _ in range(group_size)]
        # of a normal score, the exponential number with as many below it
        return [min(limit, 1 - int(mean_length * math.log(math.erfc(score / math.sqrt(2)) / 2))) for score in scores]

    for _ in range(1000):
        of_prompts = [generator.gauss(0, 1) for _ in wanted]
        earlier = [max(group(of_prompt)) if layout == "longest" else 0.0 for of_prompt in of_prompts]
        parts = list(enumerate(wanted))
        if layout in ("queue", "longest"):
            parts = longest_first(wanted, earlier, ranks, in_flight)
        lengths = [group(of_prompt) for of_prompt in of_prompts]
        free = [[0] * in_flight for _ in range(ranks)]  # when each place of each rank is free again
        for prompt, rows in parts:
            first = prompt % ranks if layout == "groups" else 0
            if layout in ("queue", "longest"):  # who has a place free first
                first = min(range(ranks), key=lambda rank: free[rank][0])
            for row in rows:
                places = free[(first + row) % ranks if layout == "split" else first]
                heapq.heapreplace(places, places[0] + lengths[prompt][row])
        ends = [max(places) for places in free]
        waited, total = waited + max(ends) - min(ends), total + max(ends)
    return waited / total, total / 1000
