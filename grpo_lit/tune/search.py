"""The walk through the space: one change at a time, each judged by a benchmark against the best so far.

A search library would earn its place in a large or continuous space. This one has a few dozen points, a measurement
of which is noisy and takes up to minutes, and every accepted step must be one that a reader can check; so it is a
hill climb whose every comparison alternates candidate and incumbent on the same machine at the same time.

The walk has no state but the runs on disk. A killed search, started again, walks the same way over the recorded runs
and goes on with the first one missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_lit.tune.judge import Decision, decide
from grpo_lit.tune.space import Space, candidates, lookup, resolve_value
from grpo_lit.tune.trial import Changes, Measurement

Measure = Callable[[Changes, str], Measurement]
"""(changes, name of the run) -> measurement; runs it, or finds it on disk."""


@dataclass
class Comparison:
    """A candidate against the incumbent."""

    key: str
    value: Any
    incumbent: dict[str, Any]
    candidate: dict[str, Any]
    decision: Decision
    incumbent_speed: list[float | None]
    candidate_speed: list[float | None]


@dataclass
class Outcome:
    """The whole walk."""

    winner: dict[str, Any]
    """Changes over the configuration that was tuned; empty where nothing was faster."""
    comparisons: list[Comparison] = field(default_factory=list)
    final: Comparison | None = None
    """Winner against the untouched configuration."""


def run_name(comparison: str, round_: int, role: str) -> str:
    """Name of a run: folders and records carry it."""
    return f"{comparison}-r{round_}-{role}"


def comparison_id(incumbent: Changes, candidate: Changes) -> str:
    """Digest of the two configurations of a comparison."""
    text = json.dumps([dict(incumbent), dict(candidate)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def compare(
    incumbent: Changes,
    candidate: Changes,
    measure: Measure,
    *,
    rounds: int,
    tolerance: float,
    min_gain: float,
    label: tuple[str, Any],
    prefix: str = "",
) -> Comparison:
    """Run both in alternating order, candidate first in every second round; stop at the first failure."""
    name = prefix + comparison_id(incumbent, candidate)
    runs: dict[str, list[Measurement]] = {"incumbent": [], "candidate": []}
    for round_ in range(rounds):
        order = ("incumbent", "candidate") if round_ % 2 == 0 else ("candidate", "incumbent")
        for role in order:
            changes = incumbent if role == "incumbent" else candidate
            runs[role].append(measure(changes, run_name(name, round_, role)))
        if any(run[-1].status != "ok" for run in runs.values()):
            break
    decision = decide(runs["incumbent"], runs["candidate"], tolerance=tolerance, min_gain=min_gain)
    speeds = {role: [run.tokens_per_s for run in own] for role, own in runs.items()}
    return Comparison(*label, dict(incumbent), dict(candidate), decision, speeds["incumbent"], speeds["candidate"])


def search(
    config: Mapping[str, Any],
    space: Space,
    measure: Measure,
    *,
    rounds: int,
    tolerance: float,
    min_gain: float,
    rows: int,
    say: Callable[[str], None],
) -> Outcome:
    """Try every change of the space on top of those accepted before it, then prove the winner against the start.

    Args:
        config: resolved configuration to tune.
        space: see `grpo_lit.tune.space`.
        measure: runs a trial.
        rounds: alternations of each comparison.
        tolerance: see `comparable`.
        min_gain: share below which a gain does not count.
        rows: completions of a step, what ``None`` stands for where a number of rows is halved or doubled.
        say: told of every decision.
    """
    settings: dict[str, Any] = {"rounds": rounds, "tolerance": tolerance, "min_gain": min_gain}
    outcome = Outcome({})
    tried: set[str] = set()
    for key, wanted in candidates(space):
        current = outcome.winner.get(key, lookup(config, key))
        value = resolve_value(wanted, current, rows)
        candidate = {**outcome.winner, key: value}
        mark = json.dumps(candidate, sort_keys=True)
        if value == current or mark in tried:
            continue
        tried.add(mark)
        found = compare(outcome.winner, candidate, measure, label=(key, value), **settings)
        outcome.comparisons.append(found)
        say(f"{'accepted' if found.decision.accepted else 'rejected'}  {key}={value}: {found.decision.reason}")
        if found.decision.accepted:
            outcome.winner = candidate
    if outcome.winner:
        # measured anew: of many candidates the one that was lucky is accepted more easily
        outcome.final = compare({}, outcome.winner, measure, label=("winner", None), prefix="final-", **settings)
        say(f"winner against the start: {outcome.final.decision.reason}")
        if not outcome.final.decision.accepted:
            outcome.winner = {}
    return outcome
