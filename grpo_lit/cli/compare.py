"""``grpo-lit compare RUN RUN...``: settings, curves, results, speed and memory of runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_lit.errors import OneLineParser
from grpo_lit.evaluation.compare_runs import curves, markdown, read_runs
from grpo_lit.files import write_whole
from grpo_lit.paths import output_folder


def main(arguments: Sequence[str]) -> int:
    """Read, compare, write."""
    parser = OneLineParser(prog="grpo-lit compare", description="Compare run folders of grpo-lit fit.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="Run folder; two or more.")
    parser.add_argument("--output", default="comparison", help="Folder for what is printed, and the curves.")
    options = parser.parse_args(list(arguments))
    folder = output_folder(options.output, "output")
    runs = read_runs(options.runs)
    text = markdown(runs)
    write_whole(folder / "comparison.md", text)
    curves(runs).savefig(folder / "curves.png", dpi=110)
    print(text)
    print(f"written: {folder / 'comparison.md'}, {folder / 'curves.png'}")
    return 0
