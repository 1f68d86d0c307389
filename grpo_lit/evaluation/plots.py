"""Figures of the report, as SVG text that can stand inside an HTML page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_lit.evaluation.summary import CellScores, Comparison, Summary

COLORS = ("#7a8699", "#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def colors_of(models: Sequence[str]) -> dict[str, str]:
    """A color for each model, the same in all figures."""
    return {model: COLORS[i % len(COLORS)] for i, model in enumerate(models)}


def accuracy_figure(summary: Summary) -> str:
    """Mean accuracy with its interval, a line per model, dataset and protocol."""
    models = list(dict.fromkeys(cell.model for cell in summary.cells))
    groups = list(dict.fromkeys((cell.dataset, cell.protocol) for cell in summary.cells))
    colors = colors_of(models)
    figure = _figure(7.4, 0.9 + len(groups) * (0.24 * len(models) + 0.22))
    axis = figure.add_subplot()
    ticks, y = [], 0.0
    for dataset, protocol in groups:
        own = [cell for cell in summary.cells if (cell.dataset, cell.protocol) == (dataset, protocol)]
        start = y
        for cell in own:
            value, low, high = cell.metrics["pass@1"]
            label = cell.model if (dataset, protocol) == groups[0] else None
            axis.plot([low, high], [y, y], color=colors[cell.model], linewidth=2.4, solid_capstyle="round", alpha=0.55)
            axis.plot(
                value,
                y,
                marker=_MARKS[models.index(cell.model) % 8],
                color=colors[cell.model],
                label=label,
                linestyle="",
            )
            axis.annotate(f"{value:.3f}", (high, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
            y += 1
        ticks.append(((start + y - 1) / 2, f"{dataset}\n{protocol}"))
        y += 0.9
    axis.set_yticks([position for position, _ in ticks], [text for _, text in ticks], fontsize=9)
    axis.set_ylim(y - 0.9 + 0.1, -0.8)
    axis.set(xlim=(-0.02, 1.12), xlabel=f"pass@1, {summary.confidence:.0%} interval over problems")
    axis.legend(frameon=False, ncol=min(4, len(models)), loc="lower left", bbox_to_anchor=(0, 1), fontsize=9)
    return _svg(figure, axis)


def curve_figure(cells: Sequence[CellScores]) -> str | None:
    """pass@k (solid) and maj@k (dashed) against k for one dataset; None without several samples."""
    cells = [cell for cell in cells if cell.samples > 1]
    if not cells:
        return None
    colors = colors_of([cell.model for cell in cells])
    figure = _figure(4.6, 3.0)
    axis = figure.add_subplot()
    for cell in cells:
        for kind, style in (("pass", "-"), ("maj", "--")):
            points = sorted(
                (int(name.partition("@")[2]), interval)
                for name, interval in cell.metrics.items()
                if name.startswith(f"{kind}@")
            )
            if kind == "maj":
                points = [(1, cell.metrics["pass@1"]), *points]  # one vote is one sample
            sizes = [k for k, _ in points]
            axis.plot(
                sizes,
                [interval.value for _, interval in points],
                style,
                color=colors[cell.model],
                marker="o",
                markersize=3.5,
                label=f"{cell.model} {kind}@k",
            )
            if kind == "pass":
                lows, highs = [i.low for _, i in points], [i.high for _, i in points]
                axis.fill_between(sizes, lows, highs, color=colors[cell.model], alpha=0.12, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(k) for k in sizes])
    axis.minorticks_off()
    axis.set(xlabel="k", ylim=(-0.02, 1.04), ylabel="share of problems")
    axis.legend(frameon=False, fontsize=7.5, ncol=2)
    return _svg(figure, axis)


def length_figure(cells: Sequence[CellScores]) -> str:
    """Cumulative distribution of completion lengths for one dataset."""
    colors = colors_of([cell.model for cell in cells])
    figure = _figure(4.6, 3.0)
    axis = figure.add_subplot()
    longest = max(max(cell.lengths) for cell in cells)
    for cell in cells:
        lengths = np.sort(np.asarray(cell.lengths))
        x = np.concatenate([[0], lengths, [longest]])
        y = np.concatenate([[0], np.arange(1, len(lengths) + 1) / len(lengths), [1]])
        axis.step(x, y, where="post", color=colors[cell.model], label=cell.model)
    axis.set(xlabel="tokens of a completion", ylabel="share at most as long", ylim=(0, 1.02), xlim=(0, None))
    axis.legend(frameon=False, fontsize=8)
    return _svg(figure, axis)


def paired_figure(pairs: Sequence[Comparison], confidence: float) -> str | None:
    """Differences between models with their intervals; None without a pair."""
    if not pairs:
        return None
    figure = _figure(7.4, 0.8 + 0.34 * len(pairs))
    axis = figure.add_subplot()
    for y, pair in enumerate(pairs):
        result = pair.result
        clear = result.low > 0 or result.high < 0
        color = "#2563eb" if clear else "#9aa3b2"
        axis.plot([result.low, result.high], [y, y], color=color, linewidth=2.4, solid_capstyle="round", alpha=0.6)
        axis.plot(result.difference, y, "o", color=color)
    axis.axvline(0, color="#444", linewidth=0.8)
    labels = [f"{p.first} − {p.second}  ({p.dataset}, {p.protocol})" for p in pairs]
    axis.set_yticks(range(len(pairs)), labels, fontsize=8.5)
    axis.set_ylim(len(pairs) - 0.4, -0.6)
    axis.set(xlabel=f"difference in mean accuracy, {confidence:.0%} paired bootstrap")
    return _svg(figure, axis)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Figure, axis: Axes) -> str:
    """The figure as an SVG element without the XML head, the same for the same data."""
    axis.grid(alpha=0.25, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    target = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "grpo-lit", "font.family": "sans-serif"}):
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    return re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
