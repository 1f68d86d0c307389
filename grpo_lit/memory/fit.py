"""What fits a budget: the plan turned round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from grpo_lit.memory.plan import KINDS, MIB, Formats, PhasePlan, StepSizes, plan_step
from grpo_lit.memory.sizes import ModelSizes

HEADROOM = 0.95
"""Share of a budget that live tensors may fill: the allocator's rounding and gaps took up to 5 % when measured."""


def peak(sizes: ModelSizes, formats: Formats, step: StepSizes) -> PhasePlan:
    """The phase with the largest peak."""
    return max(plan_step(sizes, formats, step).values(), key=lambda plan: plan.total)


def fits(sizes: ModelSizes, formats: Formats, step: StepSizes, budget: int) -> bool:
    """Whether every phase stays within the budget, in bytes; rows that the graph engine lets wait need no room."""
    rows = rows_in_flight(sizes, formats, step, budget)
    return rows > 0 and peak(sizes, formats, replace(step, rollout_rows=rows)).total <= HEADROOM * budget


def rows_in_flight(sizes: ModelSizes, formats: Formats, step: StepSizes, budget: int) -> int:
    """Rows generated at once: all that were asked for, or as many as fit where the engine queues the others.

    0 where not even one row fits; only the graph engine queues.
    """

    def holds(rows: int) -> bool:
        plan = plan_step(sizes, formats, replace(step, rollout_rows=rows))["rollout"]
        return plan.total <= HEADROOM * budget

    if formats.engine != "graph":
        return step.rollout_rows
    return _largest(step.rollout_rows, holds)


def longest_completion(
    sizes: ModelSizes, formats: Formats, step: StepSizes, budget: int, positions: int | None = None
) -> int:
    """Tokens of the longest completion that fits, all other sizes as they are; 0 where none does.

    Args:
        sizes: of the model.
        formats: and levers.
        step: what else a step holds.
        budget: bytes.
        positions: of the model; prompt and completion together do not exceed them.
    """
    limit = 2**22 if positions is None else max(positions - step.prompt_tokens, 0)
    return _largest(limit, lambda tokens: fits(sizes, formats, step.with_completions(tokens), budget))


def largest_micro_batch(sizes: ModelSizes, formats: Formats, step: StepSizes, budget: int, rows: int) -> int:
    """Rows of the largest micro-batch that fits, at most all rows of the step; 0 where not even one does."""
    return _largest(rows, lambda micro: fits(sizes, formats, replace(step, micro_rows=micro, score_rows=micro), budget))


def _largest(limit: int, holds: Callable[[int], bool]) -> int:
    """The largest number from 1 to `limit` for which a condition holds that only larger numbers break; else 0."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def plan_table(plans: Sequence[PhasePlan]) -> list[str]:
    """Lines of a table of kinds by phase, in MiB."""
    used = [kind for kind in KINDS if any(plan.kinds.get(kind, 0) for plan in plans)]
    width = max(len(kind) for kind in [*used, "MiB at the peak"])
    lines = [f"{'MiB at the peak':<{width}}" + "".join(f"{plan.phase:>11}" for plan in plans)]
    for kind in used:
        cells = (f"{plan.kinds.get(kind, 0) / MIB:>11,.0f}" for plan in plans)
        lines.append(f"{kind:<{width}}" + "".join(cells))
    lines.append(f"{'in all':<{width}}" + "".join(f"{plan.total / MIB:>11,.0f}" for plan in plans))
    return lines
