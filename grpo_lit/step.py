"""One step's data between rollout and loss: rewards, advantages, weights, and what is logged of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from grpo_lit.loss import LossConfig
from grpo_lit.rollout import Rollout


@dataclass(frozen=True)
class TrainingBatch:
    """The rows of a step with everything the passes need. On one rank these are the rank's own rows."""

    rollout: Rollout
    rewards: Tensor
    """(N,) float32; NaN where every reward function abstained."""
    advantages: Tensor
    """(N,) float32, over the full groups of all ranks."""
    loss_mask: Tensor
    """(N, T) bool, True where the token counts in the loss: truncated and abstained rows may be left out."""
    weights: Tensor
    """(N, T) float32, weight of each token in the loss, over the global batch."""

    @cached_property
    def row_tokens(self) -> list[tuple[int, int]]:
        """Of each row: prompt tokens, and completion tokens up to the last that counts in the loss."""
        positions = torch.arange(1, self.loss_mask.shape[1] + 1, device=self.loss_mask.device)
        ends = (self.loss_mask * positions).amax(dim=1) if len(positions) else self.loss_mask.sum(dim=1)
        columns = torch.stack([self.rollout.prompt_mask.sum(dim=1), ends], dim=1)
        return [(prompt, end) for prompt, end in columns.tolist()]

    def micro_batches(self, size: int, max_tokens: int | None = None) -> list[Tensor]:
        """Row indices (long) of each micro-batch: rows that count, longest first, so that little is padded.

        Args:
            size: most rows in one.
            max_tokens: most tokens in one, padding included; a single row may have more. None: no such bound.
        """
        lengths = self.row_tokens
        rows = sorted((row for row in range(len(lengths)) if lengths[row][1]), key=lambda row: -sum(lengths[row]))
        batches: list[list[int]] = []
        width = (0, 0)
        for row in rows:
            widened = (max(width[0], lengths[row][0]), max(width[1], lengths[row][1]))
            count = len(batches[-1]) + 1 if batches else 1
            if not batches or count > size or (max_tokens is not None and count * sum(widened) > max_tokens):
                batches.append([])
                widened = lengths[row]
            batches[-1].append(row)
            width = widened
        return [torch.tensor(batch, device=self.loss_mask.device) for batch in batches]

    def load(self, rows: Tensor) -> tuple[int, int]:
        """Rows and tokens, padding included, that a forward over these rows holds."""
        lengths = [self.row_tokens[row] for row in rows.tolist()]
        return len(lengths), len(lengths) * (max(p for p, _ in lengths) + max(c for _, c in lengths))

    def part(self, rows: Tensor) -> Rollout:
        """The given rows without padding, and without what comes after the last token that counts."""
        end = max(self.row_tokens[row][1] for row in rows.tolist())
        part = self.rollout.select(rows)
        return replace(
            part,
            completion_ids=part.completion_ids[:, :end],
            completion_mask=part.completion_mask[:, :end],
            logprobs=part.logprobs[:, :end],
        )


def worst_case_batch(
    rows: int, prompt_tokens: int, completion_tokens: int, vocab_size: int, device: torch.device
) -> TrainingBatch:
    """Rows of the given lengths in which every token counts, for a rehearsal; the token ids mean nothing."""
    width = prompt_tokens + completion_tokens
    ids = (torch.arange(rows * width, device=device) % vocab_size).view(rows, width)
    real = torch.ones_like(ids, dtype=torch.bool)
    completion = real[:, prompt_tokens:]
    zeros = torch.zeros(rows, completion_tokens, device=device)
    rollout = Rollout(
        prompt_ids=ids[:, :prompt_tokens],
        prompt_mask=real[:, :prompt_tokens],
        completion_ids=ids[:, prompt_tokens:],
        completion_mask=completion,
        group_ids=torch.zeros(rows, dtype=torch.long, device=device),
        logprobs=zeros,
        truncated=real[:, 0],
    )
    alternating = torch.arange(rows, device=device) % 2 * 2.0 - 1.0
    return TrainingBatch(rollout, alternating, alternating, completion, zeros + 1 / (rows * completion_tokens))


@dataclass(frozen=True)
class GlobalRows:
    """What every rank knows of all rows of the step: the global batch without its tokens."""

    rewards: Tensor
    """(M,) float32."""
    group_ids: Tensor
    """(M,) long."""
    lengths: Tensor
    """(M,) long, tokens of each completion."""
    truncated: Tensor
    """(M,) bool."""
    own: slice
    """Which of them are this rank's."""


def make_training_batch(
    rollout: Rollout, rewards: Tensor, everyone: GlobalRows, config: LossConfig, max_completion_length: int
) -> TrainingBatch:
    """Advantages over full groups and weights over the global batch, for this rank's rows.

    Rows without a reward (abstained) never count; truncated ones do not with ``mask_truncated``. A row that does not
    count is out of its group's mean, of the loss and of the loss's denominator.
    """
    device = rollout.completion_ids.device
    out = everyone.rewards.isnan()
    if config.mask_truncated:
        out = out | everyone.truncated
    counted = torch.where(out, torch.nan, everyone.rewards)
    advantages = config.group_advantages(counted, everyone.group_ids)
    kept = ~out[everyone.own].to(device)
    loss_mask = rollout.completion_mask & kept.unsqueeze(-1)
    weights = config.token_weights(
        loss_mask,
        rollout.group_ids,
        max_completion_length=max_completion_length,
        num_rows=int((~out).sum()),
        num_tokens=int(everyone.lengths[~out].sum()),
    )
    return TrainingBatch(rollout, rewards, advantages[everyone.own].to(device), loss_mask, weights)


def rollout_metrics(everyone: GlobalRows, *, mask_truncated: bool = False) -> dict[str, float]:
    """Figures of the step's rewards, lengths and groups, over all ranks.

    Args:
        everyone: all rows of the step.
        mask_truncated: see `flat_kinds`.
    """
    rewards, lengths, has_reward = everyone.rewards.double(), everyone.lengths.double(), ~everyone.rewards.isnan()
    known = rewards[has_reward]
    groups = [rewards[(everyone.group_ids == group) & has_reward] for group in everyone.group_ids.unique()]
    kinds = list(flat_kinds(everyone, mask_truncated=mask_truncated).values())
    spreads = [group.std(correction=0) for group in groups if len(group)]
    ended = lengths[~everyone.truncated]
    metrics = {
        "reward_mean": _mean(known),
        "reward_std": _mean(torch.stack(spreads)) if spreads else 0.0,
        "reward_std_batch": float(known.std(correction=0)) if len(known) else 0.0,
        "completion_length": _mean(lengths),
        "completion_length_min": float(lengths.min()),
        "completion_length_max": float(lengths.max()),
        "completion_length_ended": _mean(ended),
        "truncated_fraction": _mean(everyone.truncated.double()),
        "abstained_fraction": _mean(rewards.isnan().double()),
        "zero_variance_groups": sum(kind is not None for kind in kinds) / len(kinds),
    }
    for name in ("right", "wrong", "truncated", "abstained"):
        metrics[f"zero_variance_groups_all_{name}"] = kinds.count(name) / len(kinds)
    return metrics


def flat_kinds(everyone: GlobalRows, *, mask_truncated: bool = False) -> dict[int, str | None]:
    """Which groups are flat (zero variance, no policy gradient), by group id, ascending; None for those that are not.

    A group is flat when the rewards of its rows that count are all exactly equal, or none counts: all truncated, all
    abstained, all right (the common reward is above 0) or all wrong.

    Args:
        everyone: all rows of the step.
        mask_truncated: truncated rows do not count, as in `make_training_batch`.
    """
    own = {int(group): everyone.group_ids == group for group in everyone.group_ids.unique()}
    return {
        group: _flat_kind(everyone.rewards[rows], everyone.truncated[rows], mask_truncated)
        for group, rows in own.items()
    }


def _flat_kind(rewards: Tensor, truncated: Tensor, mask_truncated: bool) -> str | None:
    if bool(rewards.isnan().all()):
        return "abstained"
    if bool(truncated.all()) and mask_truncated:
        return "truncated"
    known = rewards[~rewards.isnan() & ~(truncated & mask_truncated)]
    if not len(known):
        return "truncated"
    if not bool((known == known[0]).all()):
        return None
    if bool(truncated.all()):
        return "truncated"
    return "right" if float(known[0]) > 0 else "wrong"


def _mean(values: Tensor) -> float:
    return float(values.mean()) if len(values) else 0.0
