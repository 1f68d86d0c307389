"""How semantic entropy is distributed over the prompts: a table and a figure."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from grpo_lit.datamodules.sent_cache import SentCache, SentEntry
from grpo_lit.markdown import table


def levels(cache: SentCache) -> list[tuple[float, list[SentEntry]]]:
    """The entries by entropy, low to high: with M samples there are few different values."""
    found: dict[float, list[SentEntry]] = defaultdict(list)
    for entry in cache.entries:
        found[entry.entropy].append(entry)
    return sorted(found.items())


def markdown(cache: SentCache, samples: int) -> str:
    """A table with a row for each entropy: how many prompts, how many answers, how often right."""
    rows = []
    for entropy, entries in levels(cache):
        rates = [entry.pass_rate for entry in entries if entry.pass_rate is not None]
        sizes = sorted({entry.num_clusters for entry in entries})
        mean = f"{sum(rates) / len(rates):.3f}" if rates else "-"
        shares = [f"{entropy:.4f}", len(entries), f"{len(entries) / len(cache.entries):.3f}"]
        rows.append([*shares, ", ".join(map(str, sizes)), mean, rates.count(1.0), rates.count(0.0)])
    header = ["entropy (nats)", "prompts", "share", "clusters", "pass rate", "always right", "always wrong"]
    return "\n".join(
        [f"semantic entropy of {len(cache.entries)} prompts, {samples} answers each", "", *table(header, rows)]
    )


def draw(cache: SentCache, path: Path) -> None:
    """Histogram of the entropies as PNG, split into always right, sometimes right and never right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    found = levels(cache)
    positions = range(len(found))
    bottom = [0] * len(found)
    for label, color, matches in (
        ("always right", "tab:green", lambda rate: rate == 1.0),
        ("sometimes right", "tab:blue", lambda rate: rate is not None and 0 < rate < 1),
        ("never right", "tab:red", lambda rate: rate == 0.0),
        ("no verdict", "tab:gray", lambda rate: rate is None),
    ):
        heights = [sum(bool(matches(entry.pass_rate)) for entry in entries) for _, entries in found]
        if any(heights):
            axis.bar(positions, heights, bottom=bottom, color=color, label=label)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axis.set_xticks(positions, [f"{entropy:.2f}" for entropy, _ in found], rotation=60 if len(found) > 8 else 0)
    axis.set(xlabel="semantic entropy (nats)", ylabel="prompts", title=f"{len(cache.entries)} prompts")
    axis.legend(frameon=False)
    figure.savefig(path, dpi=110)
