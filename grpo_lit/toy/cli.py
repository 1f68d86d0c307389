"""`grpo-lit toy train`, `length` and `sharded`: small exact policies, tables on the terminal and figures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from grpo_lit.errors import OneLineParser, UserError
from grpo_lit.paths import output_folder
from grpo_lit.toy.distributed import Layout, run_processes, train_sharded
from grpo_lit.toy.length import LengthPolicy, LengthRow, length_tradeoff
from grpo_lit.toy.train import ToyRun, train_toy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DERIVATIVE_NOTE = """\
Only the row alpha = 1 is the derivative of the expected reward q^4: 4 q^4 (1 - q) = {derivative:.8f}. There
the score has mean 0 and the baseline changes nothing. Below 1 the weight shortens the pull of long
completions, and as the weighted score no longer has mean 0, subtracting the mean reward biases the update
too."""


def toy_train(
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    passes: int = 4,
    exact: bool = False,
    updates: int = 100,
    group_size: int = 16,
    output: Path = Path("toy"),
) -> list[ToyRun]:
    """Trains the 24-logit policy and compares several passes over each rollout with one.

    Prints the exact probability of the right answer after training, from 1/16, and draws the learning curves
    to `output`/toy_train.png.

    Args:
        seeds: one run each.
        passes: gradient steps on each rollout.
        exact: draw from std::mt19937, which repeats the figures of grpo.cpp to six digits; otherwise from
            torch's generator.
        updates: rollouts a run.
        group_size: completions of each of the three prompts in a rollout.
        output: folder of the figure.

    Returns:
        The runs with `passes` passes, in the order of the seeds.
    """
    if not seeds:
        raise UserError("seeds", list(seeds), "at least one seed")
    for seed in seeds:
        if not 0 <= seed < 2**32:
            raise UserError("seeds", seed, "whole numbers from 0 to 2**32 - 1")
    for name, value in (("passes", passes), ("updates", updates), ("group_size", group_size)):
        if value < 1:
            raise UserError(name, value, "a whole number >= 1")
    output = output_folder(output, "output")
    counts = sorted({passes, 1}, reverse=True)
    runs = {
        count: [train_toy(seed, exact, count, updates=updates, group_size=group_size) for seed in seeds]
        for count in counts
    }
    table = Table(title="Probability of the right answer", caption=f"{updates} updates from 1/16 = 0.0625")
    table.add_column("seed", justify="right")
    for count in counts:
        table.add_column(_passes(count), justify="right")
    table.add_column("greedy right")
    for index, seed in enumerate(seeds):
        figures = [f"{runs[count][index].success:.6f}" for count in counts]
        table.add_row(str(seed), *figures, "yes" if runs[passes][index].greedy_right else "no")
    table.add_row("median", *(f"{median(run.success for run in runs[count]):.6f}" for count in counts), "")
    console = Console()
    console.print(table)
    path = _plot_curves(runs, output / "toy_train.png")
    # once more on one line, for scripts
    print(" ".join(f"{run.success:.6f}" for run in runs[passes]))
    print(f"figure: {path}")
    return runs[passes]


def toy_length(
    groups: int = 100_000,
    group_size: int = 8,
    seed: int = 12345,
    alphas: Sequence[float] = (0.0, 0.5, 1.0),
    output: Path = Path("toy"),
) -> list[LengthRow]:
    """Compares the exact and the sampled update of the length policy for several length weights.

    Draws both against alpha to `output`/toy_length.png.

    Args:
        groups: groups to sample.
        group_size: completions in a group, at least 2.
        seed: of std::mt19937.
        alphas: exponents of the length weight in [0, 1].
        output: folder of the figure.

    Returns:
        One row an alpha.
    """
    if groups < 2:
        raise UserError("groups", groups, "a whole number >= 2")
    if group_size < 2:
        raise UserError("group_size", group_size, "a whole number >= 2")
    if not 0 <= seed < 2**32:
        raise UserError("seed", seed, "a whole number from 0 to 2**32 - 1")
    output = output_folder(output, "output")
    policy = LengthPolicy()
    rows = length_tradeoff(tuple(alphas), groups=groups, group_size=group_size, seed=seed, policy=policy)
    table = Table(title=f"Update of the shared logit, {groups} groups of {group_size}")
    for header in ("alpha", "exact", "sampled", "std. error", "weight of 8 tokens against 2", ""):
        table.add_column(header, justify="right")
    for row in rows:
        note = "derivative of the expected reward" if row.alpha == 1 else ""
        figures = (f"{row.exact:.8f}", f"{row.sampled:.8f}", f"{row.standard_error:.8f}")
        table.add_row(f"{row.alpha:g}", *figures, f"{100 * row.long_share:.2f} %", note)
    Console(width=120).print(table)
    print(_DERIVATIVE_NOTE.format(derivative=policy.exact_update(1.0)))
    path = _plot_length(policy, rows, output / "toy_length.png")
    print(f"figure: {path}")
    return rows


def toy_sharded(
    seeds: Sequence[int] = (0, 1, 2), processes: int = 2, layout: Layout = "split", updates: int = 100
) -> list[float]:
    """Trains the 24-logit policy in several processes, with one flat all-reduce per pass.

    Every rank compares a hash of its weights with the others' after each step and stops if they differ.

    Args:
        seeds: one run each.
        processes: of one gloo group on the CPU.
        layout: "split" gives every rank a part of each group, "whole" gives it whole groups.
        updates: rollouts a run.

    Returns:
        Exact probability of the right answer of each run.
    """
    if layout not in ("split", "whole"):
        raise UserError("layout", layout, "split | whole")
    for name, value in (("processes", processes), ("updates", updates), ("seeds", len(seeds))):
        if value < 1:
            raise UserError(name, value, "at least 1")
    table = Table(title=f"Probability of the right answer, {processes} processes, {layout} groups")
    for header in ("seed", "probability", "greedy right", "same on all ranks"):
        table.add_column(header, justify="right")
    figures = []
    for seed in seeds:
        results = run_processes(train_sharded, processes, seed, layout, updates)
        success, greedy_right = results[0]
        figures.append(success)
        same = all(result == results[0] for result in results)
        table.add_row(str(seed), f"{success:.6f}", "yes" if greedy_right else "no", "yes" if same else "no")
    table.add_row("median", f"{median(figures):.6f}", "", "")
    Console().print(table)
    return figures


def main(argv: Sequence[str]) -> int:
    """Runs `train`, `length` or `sharded`.

    Args:
        argv: arguments behind `grpo-lit toy`.

    Returns:
        Exit code: 0, or 2 after a user mistake.
    """
    parser = OneLineParser(prog="grpo-lit toy", description=__doc__)
    commands = parser.add_subparsers(required=True)

    def command(name: str, function: Callable[..., object], about: str) -> argparse.ArgumentParser:
        found = commands.add_parser(name, help=about, argument_default=argparse.SUPPRESS)  # the function has defaults
        found.set_defaults(function=function)
        return found

    train = command("train", toy_train, "train the 24-logit policy, several passes against one")
    train.add_argument("--seeds", type=int, nargs="+")
    train.add_argument("--passes", type=int, help="gradient steps on each rollout")
    train.add_argument("--exact", action="store_true", help="repeat the figures of grpo.cpp to six digits")
    train.add_argument("--updates", type=int, help="rollouts a run")
    train.add_argument("--group_size", type=int, help="completions of each prompt")
    length = command("length", toy_length, "exact and sampled update against the length weight")
    length.add_argument("--groups", type=int)
    length.add_argument("--group_size", type=int, help="completions in a group")
    length.add_argument("--seed", type=int)
    length.add_argument("--alphas", type=float, nargs="+")
    sharded = command("sharded", toy_sharded, "train the 24-logit policy in several processes")
    sharded.add_argument("--seeds", type=int, nargs="+")
    sharded.add_argument("--processes", type=int)
    sharded.add_argument("--layout", choices=["split", "whole"], help="groups over ranks")
    sharded.add_argument("--updates", type=int, help="rollouts a run")
    for drawing in (train, length):
        drawing.add_argument("--output", type=Path, help="folder of the figure")
    options = vars(parser.parse_args(list(argv)))
    options.pop("function")(**options)
    return 0


def _passes(count: int) -> str:
    return "1 pass" if count == 1 else f"{count} passes"


def _plot_curves(runs: dict[int, list[ToyRun]], path: Path) -> Path:
    figure, axes = _axes("update", "probability of the right answer")
    for index, (count, group) in enumerate(runs.items()):
        for number, run in enumerate(group):
            axes.plot(run.curve, color=f"C{index}", linewidth=1, label=_passes(count) if number == 0 else None)
    axes.set_ylim(0, 1)
    axes.legend()
    return _save(figure, path)


def _plot_length(policy: LengthPolicy, rows: list[LengthRow], path: Path) -> Path:
    figure, axes = _axes("alpha", "update of the logit")
    alphas = [step / 50 for step in range(51)]
    axes.plot(alphas, [policy.exact_update(alpha) for alpha in alphas], label="exact")
    errors = [2 * row.standard_error for row in rows]
    sampled = [row.sampled for row in rows]
    axes.errorbar([row.alpha for row in rows], sampled, yerr=errors, fmt="o", label="sampled, 2 standard errors")
    axes.axhline(policy.exact_update(1.0), color="grey", linestyle=":", label="derivative of the expected reward")
    axes.legend()
    return _save(figure, path)


def _axes(xlabel: str, ylabel: str) -> tuple[Figure, Axes]:
    # imported here: it takes a second; without pyplot it asks for no display
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    return figure, axes


def _save(figure: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path
