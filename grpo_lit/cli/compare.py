"""``grpo-lit compare RUN RUN...``: settings, curves, results, speed and memory of runs side by side."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_lit.errors import UserError
from grpo_lit.evaluation.compare_runs import curves, markdown, read_runs
from grpo_lit.files import write_whole
from grpo_lit.paths import output_folder

USAGE = """usage: grpo-lit compare RUN RUN... [--output FOLDER]

Compare run folders of grpo-lit fit. Prints Markdown and writes it with the curves to FOLDER (comparison by default).
"""


def main(arguments: Sequence[str]) -> int:
    """Read, compare, write."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE, end="")
        return 0
    folders, output = [], "comparison"
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if argument == "--output" or argument.startswith("--output="):
            output = argument.partition("=")[2] or (queue.pop(0) if queue else "")
        elif argument.startswith("-"):
            raise UserError("compare", argument, "run folders and --output FOLDER")
        else:
            folders.append(argument)
    if not output:
        raise UserError("output", output, "a folder")
    folder = output_folder(output, "output")
    runs = read_runs(folders)
    text = markdown(runs)
    write_whole(folder / "comparison.md", text)
    curves(runs).savefig(folder / "curves.png", dpi=110)
    print(text)
    print(f"written: {folder / 'comparison.md'}, {folder / 'curves.png'}")
    return 0
