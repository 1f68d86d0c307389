"""What a search leaves behind: records, the winner as YAML, a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from matplotlib.figure import Figure

from grpo_lit.files import write_whole
from grpo_lit.tune.search import Comparison, Outcome

matplotlib.use("Agg")


def write_outcome(folder: Path, outcome: Outcome, resolved: str) -> None:
    """``decisions.jsonl``, ``changes.yaml``, ``winner.yaml`` (the whole configuration) and ``tune.png``."""
    found = [*outcome.comparisons, *([outcome.final] if outcome.final else [])]
    lines = "".join(json.dumps(asdict(comparison)) + "\n" for comparison in found)
    write_whole(folder / "decisions.jsonl", lines)
    write_whole(folder / "changes.yaml", yaml.safe_dump(nested(outcome.winner), sort_keys=True))
    write_whole(folder / "winner.yaml", resolved)
    figure(outcome).savefig(folder / "tune.png", dpi=110)


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as sections.

    >>> nested({"a.b": 1, "a.c": 2})
    {'a': {'b': 1, 'c': 2}}
    """
    root: dict[str, Any] = {}
    for key, value in changes.items():
        *parents, last = key.split(".")
        section = root
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value
    return root


def figure(outcome: Outcome) -> Figure:
    """Tokens per second of every comparison: each run a dot, incumbent hollow, candidate filled."""
    found = [*outcome.comparisons, *([outcome.final] if outcome.final else [])]
    chart = Figure(figsize=(8.2, 0.9 + 0.42 * max(1, len(found))), layout="constrained")
    axis = chart.add_subplot()
    for place, comparison in enumerate(found):
        _row(axis, place, comparison)
    axis.set_yticks(range(len(found)), [label(c) for c in found], fontsize=8.5)
    axis.set_ylim(len(found) - 0.4, -0.6)
    axis.set(xlabel="tokens per second of a step", xlim=(0, None))
    axis.grid(alpha=0.25, axis="x")
    axis.spines[["top", "right"]].set_visible(False)
    axis.plot([], [], "o", mfc="none", mec="#667085", label="best so far")
    axis.plot([], [], "o", color="#047857", label="candidate, accepted")
    axis.plot([], [], "o", color="#b42318", label="candidate, rejected")
    axis.legend(frameon=False, fontsize=8, ncol=3, loc="lower left", bbox_to_anchor=(0, 1))
    return chart


def _row(axis: Any, place: int, comparison: Comparison) -> None:
    color = "#047857" if comparison.decision.accepted else "#b42318"
    incumbent = [speed for speed in comparison.incumbent_speed if speed is not None]
    candidate = [speed for speed in comparison.candidate_speed if speed is not None]
    axis.plot(incumbent, [place - 0.12] * len(incumbent), "o", mfc="none", mec="#667085", markersize=5)
    axis.plot(candidate, [place + 0.12] * len(candidate), "o", color=color, markersize=5)
    if not candidate:
        reason = comparison.decision.reason.split(":")[0]
        axis.annotate(reason, (0, place + 0.12), xytext=(4, 0), textcoords="offset points", va="center", fontsize=7)


def label(comparison: Comparison) -> str:
    """A comparison in a few words."""
    if comparison.key == "winner":
        return "winner against start"
    name = comparison.key.removeprefix("model.")
    return f"{name} = {'null' if comparison.value is None else comparison.value}"
