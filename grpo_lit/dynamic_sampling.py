"""Dynamic sampling (DAPO, 2503.14476, section 3.2): prompts whose groups are flat are replaced by further ones.

```
batch    p0 p1 p2 p3      rewards differ in p1, p3; the groups of p0 and p2 are flat: no gradient
round 1  p4 p5            two more of the epoch: p4 differs, p5 is flat
round 2  p6               differs: the step trains on p1 p3 p4 p6
```
Without it the useful part of a batch shrinks as the model learns. The number of rounds is capped; when the cap or the
end of the epoch comes first, flat groups fill the batch up. Prompts drawn count as consumed, so a resume goes on behind
them, and every rank decides from the same gathered rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lit.datamodules.loader import PromptBatch
from grpo_lit.rollout import Rollout
from grpo_lit.sampling_step import StepRows, sample_rows
from grpo_lit.step import GlobalRows, flat_kinds

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule


def sample_step(module: GRPOModule, batch: PromptBatch) -> StepRows:
    """This rank's rows of a step; with ``model.rollout.refill_rounds`` above 0, of groups that aren't flat.

    Args:
        module: policy, engine and rewards.
        batch: the step's prompts; its `refill` gives more.
    """
    first = sample_rows(module, batch)
    rounds = module.rollout_config.refill_rounds
    if not rounds:
        return first
    mask_truncated = module.loss_config.mask_truncated
    parts, useful = [first], [useful_groups(first.everyone, mask_truncated)]
    drawn = len(batch)
    while len(parts) <= rounds and (missing := len(batch) - sum(map(len, useful))):
        more = batch.refill(missing) if batch.refill is not None else None
        if more is None:
            break
        parts.append(sample_rows(module, more))
        useful.append(useful_groups(parts[-1].everyone, mask_truncated))
        drawn += len(more)
    kept = _filled_up(parts, useful, len(batch))
    rows = first if len(parts) == 1 else merge_rows(module, parts, kept)
    rows.reward_metrics.update(
        refill_rounds=float(len(parts) - 1),
        refill_prompts=float(drawn - len(batch)),
        refill_useful_share=sum(map(len, useful)) / drawn,
    )
    return rows


def useful_groups(everyone: GlobalRows, mask_truncated: bool) -> list[int]:
    """Groups with two different rewards among the rows that count, ascending; the others give no gradient."""
    kinds = flat_kinds(everyone, mask_truncated=mask_truncated)
    return [group for group, kind in kinds.items() if kind is None]


def _filled_up(parts: Sequence[StepRows], useful: Sequence[list[int]], wanted: int) -> list[list[int]]:
    """Groups to train on in each part: all useful ones and, up to the number wanted, the earliest flat ones."""
    missing = wanted - sum(map(len, useful))
    kept = []
    for part, groups in zip(parts, useful, strict=True):
        flat = [int(g) for g in part.everyone.group_ids.unique().tolist() if g not in groups][: max(missing, 0)]
        missing -= len(flat)
        kept.append(sorted([*groups, *flat]))
    return kept


def merge_rows(module: GRPOModule, parts: Sequence[StepRows], kept: Sequence[list[int]]) -> StepRows:
    """One step's rows out of several draws.

    Args:
        module: for what the ranks exchange.
        parts: the draws, each with group ids of its own.
        kept: the groups of each draw that stay; they are numbered anew in this order.
    """
    offset = 0
    chosen: list[tuple[StepRows, list[int], Tensor]] = []  # draw, its rows that stay, their new group ids
    for part, groups in zip(parts, kept, strict=True):
        number = {group: offset + position for position, group in enumerate(groups)}
        own = part.rollout.group_ids.tolist()
        rows = [row for row, group in enumerate(own) if group in number]
        chosen.append((part, rows, torch.tensor([number[own[row]] for row in rows], dtype=torch.long)))
        offset += len(groups)
    rollout = Rollout.concat([_select(part.rollout, rows, ids) for part, rows, ids in chosen])
    rewards = torch.cat([part.rewards[rows] for part, rows, _ in chosen])
    per_function = {
        name: torch.cat([part.per_function[name][rows] for part, rows, _ in chosen]) for name in parts[0].per_function
    }
    return StepRows(
        rollout=rollout,
        prompts=[part.prompts[row] for part, rows, _ in chosen for row in rows],
        completions=[part.completions[row] for part, rows, _ in chosen for row in rows],
        prompt_indices=[part.prompt_indices[row] for part, rows, _ in chosen for row in rows],
        completion_indices=[part.completion_indices[row] for part, rows, _ in chosen for row in rows],
        rewards=rewards,
        per_function=per_function,
        everyone=module.world.gather_rows(rewards, rollout.group_ids, rollout.lengths, rollout.truncated),
        reward_metrics=_merge_metrics(parts),
    )


def _select(rollout: Rollout, rows: list[int], group_ids: Tensor) -> Rollout:
    device = rollout.group_ids.device
    part = rollout.select(torch.tensor(rows, dtype=torch.long, device=device))
    return replace(part, group_ids=group_ids.to(device))


def _merge_metrics(parts: Sequence[StepRows]) -> dict[str, float]:
    """Over everything drawn: counts are summed, means weighted by rows, times of verdicts the longest of any draw."""
    sizes = [len(part.everyone.rewards) for part in parts]
    merged: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part.reward_metrics):
        values = [part.reward_metrics.get(name, 0.0) for part in parts]
        if "verdict_" in name or "_count_" in name:
            merged[name] = sum(values)
        elif "_ms_" in name:
            merged[name] = max(values)
        else:
            merged[name] = sum(v * size for v, size in zip(values, sizes, strict=True)) / max(sum(sizes), 1)
    return merged
