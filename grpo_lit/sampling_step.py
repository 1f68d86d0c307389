"""The first half of a training step: rounds of sampling and judging until the allocator is satisfied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_lit.datamodules.loader import PromptBatch
from grpo_lit.datamodules.vigor import UniformAllocator, VigorAllocator
from grpo_lit.loss import length_penalty, soft_overlong_penalty
from grpo_lit.prompt_queue import JudgedRows, PromptQueue, generate_from_queue, longest_first
from grpo_lit.prompts import prefilled_tail
from grpo_lit.rewards import VERDICT_KINDS, RewardOutput, compute_rewards, latency_histogram
from grpo_lit.rollout import Rollout, RolloutConfig, row_keys
from grpo_lit.step import GlobalRows

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule


@dataclass(frozen=True)
class StepRows:
    """This rank's rows of a step, sampled and judged, groups together."""

    rollout: Rollout
    prompts: list[str]
    """(N) rendered prompt of each row."""
    completions: list[str]
    """(N) text of each row, prefilled tail included: what the reward functions saw."""
    prompt_indices: list[int]
    """(N) row number of each row's prompt in the dataset."""
    completion_indices: list[int]
    """(N) number of each row within its group."""
    rewards: Tensor
    """(N,) float32, penalties included; NaN where every function abstained."""
    per_function: dict[str, Tensor]
    """Reward of each function, (N,) each."""
    everyone: GlobalRows
    reward_metrics: dict[str, float]


def build_allocator(config: RolloutConfig, num_prompts: int, step: int) -> VigorAllocator | UniformAllocator:
    """The allocator that the rollout section names, for one rollout step."""
    if config.allocator == "vigor":
        seed = None if config.vigor_seed is None else config.vigor_seed + step
        return VigorAllocator(num_prompts, config.vigor_initial_count, config.vigor_rounds, seed=seed)
    return UniformAllocator(num_prompts, num_prompts * config.group_size)


def sample_rows(module: GRPOModule, batch: PromptBatch) -> StepRows:
    """Sample and judge every round, then put this rank's rows in order and learn of all others."""
    config, world = module.rollout_config, module.world
    allocator = build_allocator(config, len(batch), module.rollout_step)
    drawn = [0] * len(batch)
    rounds: list[tuple[JudgedRows, RewardOutput]] = []
    while (counts := allocator.next_counts()) is not None:
        wanted = [int(count) for count in counts]
        if takes_from_queue(module):
            wanted_here = [range(start, start + count) for start, count in zip(drawn, wanted, strict=True)]
        else:
            wanted_here = _first_of_rank(config, world.rank, world.size, drawn, wanted)
        with module.phase("rollout"):
            rollout, numbers = module.phase.attempt(partial(_generate, module, batch, wanted_here))
            module.engine.release()
        rounds.append(_judge_round(module, batch, rollout, numbers))
        rewards = rounds[-1][0].rewards.tolist()
        ranks = world.gather((rollout.group_ids.tolist(), rewards, rollout.lengths.tolist()))
        _tell(allocator, [rank[:2] for rank in ranks])
        if world.size > 1:
            sampled = [batch.indices[group] for rank in ranks for group in rank[0]]
            module.prompt_lengths.observe(sampled, [length for rank in ranks for length in rank[2]])
        drawn = [before + count for before, count in zip(drawn, wanted, strict=True)]
    return _assemble(module, batch, rounds)


def takes_from_queue(module: GRPOModule) -> bool:
    """Whether ranks share one queue of prompts; an engine that cannot (vLLM) samples whole groups per rank."""
    return module.rollout_config.layout == "queue" and module.world.size > 1 and hasattr(module.engine, "claim")


def _generate(module: GRPOModule, batch: PromptBatch, wanted: Sequence[range]) -> tuple[Rollout, list[int]]:
    """Rows of the wanted completion numbers of each prompt, and the number of each; from a queue, this rank's part."""
    engine, shared = module.engine, takes_from_queue(module)
    parts, share = list(enumerate(wanted)), sum(map(len, wanted))
    if shared:
        size, expected = module.world.size, module.prompt_lengths.expected(batch.indices)
        share = -(-share // size)
        # as configured: what replays leave of the engine's own batch size differs between ranks, and the order must not
        parts = longest_first(wanted, expected, size, min(module.rollout_config.batch_size or share, share))
    module.phase.hold(min(engine.batch_size or share, share), 0)
    numbers = [number for _, of_part in parts for number in of_part]
    indices = [batch.indices[prompt] for prompt, of_part in parts for _ in of_part]
    keys = row_keys(module.seed, module.rollout_step, indices, numbers)

    def progress(rows_done: int, num_tokens: int) -> None:
        for listener in module.phase.listeners:
            listener.on_rollout_progress(module.trainer, module, rows_done, len(keys), num_tokens)

    def generate() -> Rollout:
        prompts, counts = [batch.prompt_ids[prompt] for prompt, _ in parts], [len(of_part) for _, of_part in parts]
        return engine.generate(prompts, counts, keys, module.rollout_config.sampling, progress)

    if not shared:
        return generate(), numbers
    queue = PromptQueue(range(len(parts)), module.phase.attempt_number)
    rollout, own = generate_from_queue(engine, queue, share, generate)
    prompt_of = torch.tensor([prompt for prompt, _ in parts], device=rollout.group_ids.device)
    return replace(rollout, group_ids=prompt_of[rollout.group_ids]), [numbers[row] for row in own]


def _first_of_rank(
    config: RolloutConfig, rank: int, size: int, drawn: Sequence[int], wanted: Sequence[int]
) -> list[range]:
    """Completion numbers that this rank draws of each prompt in this round."""
    if config.layout == "split":
        return [range(start + rank, start + count, size) for start, count in zip(drawn, wanted, strict=True)]
    return [
        range(start, start + count) if prompt % size == rank else range(0)
        for prompt, (start, count) in enumerate(zip(drawn, wanted, strict=True))
    ]


def _tell(allocator: VigorAllocator | UniformAllocator, ranks: list[tuple[list[int], list[float]]]) -> None:
    by_prompt: dict[int, list[float]] = {}
    for groups, rewards in ranks:
        for group, reward in zip(groups, rewards, strict=True):
            by_prompt.setdefault(group, []).append(reward)
    for prompt in sorted(by_prompt):
        allocator.observe(prompt, by_prompt[prompt])


def _judge_round(
    module: GRPOModule, batch: PromptBatch, rollout: Rollout, numbers: list[int]
) -> tuple[JudgedRows, RewardOutput]:
    def work() -> tuple[JudgedRows, RewardOutput]:
        completions = decode(module, batch, rollout)
        output = judge(module, batch, rollout, completions, module.reward_functions, module.reward_weights)
        return JudgedRows(rollout, numbers, completions, output.rewards, output.per_function), output

    with module.phase("reward"):
        return module.phase.attempt(work)


def decode(module: GRPOModule, batch: PromptBatch, rollout: Rollout) -> list[str]:
    """Text of each row, with the tail that the template prefilled in front."""
    ids, lengths, groups = rollout.completion_ids.tolist(), rollout.lengths.tolist(), rollout.group_ids.tolist()
    tails = [prefilled_tail(prompt) for prompt in batch.prompts]
    return [
        tails[group] + module.encoder.decode(row[:length])
        for row, length, group in zip(ids, lengths, groups, strict=True)
    ]


def judge(
    module: GRPOModule,
    batch: PromptBatch,
    rollout: Rollout,
    completions: list[str],
    functions: Sequence[Any],
    weights: Sequence[float] | None,
) -> RewardOutput:
    """Rewards of decoded rows; ``group_ids`` of the rollout point into the batch."""
    groups = rollout.group_ids.tolist()
    columns = {name: [values[group] for group in groups] for name, values in batch.columns.items()}
    prompts, limit = [batch.prompts[g] for g in groups], module.reward_timeout_s
    return compute_rewards(functions, prompts, completions, columns, weights=weights, timeout_s=limit)


def _assemble(module: GRPOModule, batch: PromptBatch, rounds: Sequence[tuple[JudgedRows, RewardOutput]]) -> StepRows:
    rows = JudgedRows.concat([rows for rows, _ in rounds])
    if module.rollout_config.layout == "queue" and module.world.size > 1:
        rows = rows.dealt(module.world)
    rows = rows.in_order()
    rewards = shape_rewards(module, rows.rewards, rows.rollout)
    groups = rows.rollout.group_ids.tolist()
    everyone = module.world.gather_rows(rewards, rows.rollout.group_ids, rows.rollout.lengths, rows.rollout.truncated)
    return StepRows(
        rollout=rows.rollout,
        prompts=[batch.prompts[group] for group in groups],
        completions=rows.completions,
        prompt_indices=[batch.indices[group] for group in groups],
        completion_indices=rows.numbers,
        rewards=rewards,
        per_function=rows.per_function,
        everyone=everyone,
        reward_metrics=_reward_metrics(module, rows.per_function, [output for _, output in rounds]),
    )


def shape_rewards(module: GRPOModule, rewards: Tensor, rollout: Rollout) -> Tensor:
    """Rewards minus the penalties on length, before any centring."""
    lengths = rollout.lengths.cpu()
    if module.length_penalty:
        rewards = length_penalty(rewards, lengths, module.length_penalty)
    if module.overlong_cache is not None:
        limit = module.rollout_config.sampling.max_completion_length
        rewards = rewards + soft_overlong_penalty(lengths, limit, module.overlong_cache)
    return rewards


def _reward_metrics(
    module: GRPOModule, per_function: dict[str, Tensor], outputs: Sequence[RewardOutput]
) -> dict[str, float]:
    """Mean of each reward function, verdict counts and how long verdicts took, over all ranks."""
    sums = {
        name: (float(values[~values.isnan()].double().sum()), int((~values.isnan()).sum()))
        for name, values in per_function.items()
    }
    verdicts: dict[str, int] = {}
    for output in outputs:
        for kind, count in output.verdict_counts.items():
            verdicts[kind] = verdicts.get(kind, 0) + count
    latencies = [latency for output in outputs for latency in output.latencies_s]
    ranks = module.world.gather((sums, verdicts, latencies))
    everyones = [latency for rank in ranks for latency in rank[2]]
    metrics = {f"perf/{name}": value for name, value in latency_histogram(everyones).items()}
    for name in sums:
        total, count = (sum(rank[0][name][i] for rank in ranks) for i in (0, 1))
        metrics[f"reward_{name}"] = total / count if count else 0.0
    if any(rank_verdicts for _, rank_verdicts, _ in ranks):
        for kind in VERDICT_KINDS:
            metrics[f"verdict_{kind}"] = float(sum(rank_verdicts.get(kind, 0) for _, rank_verdicts, _ in ranks))
    return metrics
