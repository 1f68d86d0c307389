"""The echo policy trained by several processes, each with its own share of the rollout.

```
rank 0: rows of group 0 1 2 --+-- rewards gathered -> advantages over whole groups --+-> micro-batches -> gradient
rank 1: rows of group 0 1 2 --+-- rows and tokens counted over all ranks -> weights -+-> micro-batches -> gradient
                                    one flat all-reduce per pass, then the same step on all ranks
```
Each rank draws a part of every group ("split") or whole groups ("whole"). Either way the update is that of
one process with all the rows.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from grpo_lit.distributed import check_parameter_hash, flat_all_reduce, gather_rows, sum_over_ranks
from grpo_lit.loss import LossConfig, grpo_loss
from grpo_lit.toy.echo import MAX_TOKENS, NUM_PROMPTS, EchoPolicy, EchoRollout
from grpo_lit.toy.generators import MersenneTwister
from grpo_lit.toy.train import TOY_LOSS

Layout = Literal["split", "whole"]


def local_counts(counts: list[int], layout: Layout, rank: int, num_ranks: int) -> list[int]:
    """How many completions of each prompt this rank draws.

    Args:
        counts: completions of each prompt over all ranks.
        layout: "split" shares every group out, the lower ranks take what is left over; "whole" deals prompts round
            the ranks.
        rank: this one.
        num_ranks: of so many.
    """
    if layout == "split":
        return [count // num_ranks + (rank < count % num_ranks) for count in counts]
    return [count if prompt % num_ranks == rank else 0 for prompt, count in enumerate(counts)]


def sharded_update(
    policy: EchoPolicy,
    optimizer: torch.optim.Optimizer,
    rollout: EchoRollout,
    *,
    passes: int,
    micro_batch_rows: int,
    config: LossConfig = TOY_LOSS,
    step: int = 0,
) -> None:
    """`passes` optimizer steps on the rows of all ranks together.

    Args:
        policy: with the same weights on every rank.
        optimizer: likewise.
        rollout: the rows of this rank, possibly none.
        passes: gradient steps.
        micro_batch_rows: rows a micro-batch; ranks may run different numbers of micro-batches.
        config: the loss.
        step: for the message if the weights of the ranks part.

    Raises:
        SystemFault: if they do.
    """
    rewards, mine = gather_rows(rollout.rewards)
    group_ids, _ = gather_rows(rollout.group_ids)
    advantages = config.group_advantages(rewards, group_ids)[mine]
    rows, tokens = sum_over_ranks(rollout.mask.any(dim=1).sum(), rollout.mask.sum())
    weights = config.token_weights(
        rollout.mask,
        rollout.group_ids,
        max_completion_length=MAX_TOKENS,
        num_rows=int(rows),
        num_tokens=int(tokens),
    )
    states, actions, mask = rollout.states, rollout.actions, rollout.mask
    old_logprobs = policy.logprobs(states, actions).detach()
    ref_logprobs = EchoPolicy(policy.logits.dtype).logprobs(states, actions).detach()
    for _ in range(passes):
        optimizer.zero_grad()
        for start in range(0, len(mask), micro_batch_rows):
            part = slice(start, start + micro_batch_rows)
            output = grpo_loss(
                policy.logprobs(states[part], actions[part]),
                old_logprobs[part],
                advantages[part],
                weights[part],
                mask[part],
                ref_logprobs=ref_logprobs[part],
                config=config,
            )
            output.loss.backward()
        flat_all_reduce(policy.parameters())
        optimizer.step()
        check_parameter_hash(policy.parameters(), step=step)


def train_sharded(
    rank: int,
    num_ranks: int,
    seed: int,
    layout: Layout,
    updates: int,
    *,
    passes: int = 4,
    group_size: int = 16,
    micro_batch_rows: int = 8,
    learning_rate: float = 0.5,
) -> tuple[float, bool]:
    """Trains in this process, one of several; the sampler of rank r has seed num_ranks x seed + r.

    Returns:
        Exact probability of the right answer, and whether the greedy answers are right.
    """
    policy = EchoPolicy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=learning_rate)
    uniforms = MersenneTwister(num_ranks * seed + rank)
    counts = local_counts([group_size] * NUM_PROMPTS, layout, rank, num_ranks)
    for step in range(updates):
        rollout = policy.sample(uniforms, counts)
        sharded_update(policy, optimizer, rollout, passes=passes, micro_batch_rows=micro_batch_rows, step=step)
    return policy.success(), policy.is_greedy_right()


def run_processes(work: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Runs work(rank, num_ranks, *args) in that many processes of one gloo group on the CPU.

    Args:
        work: a function that can be pickled.
        num_ranks: processes.
        args: further arguments.

    Returns:
        What each rank returned, in rank order.
    """
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_process, (work, num_ranks, folder, args), nprocs=num_ranks)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _process(rank: int, work: Callable[..., Any], num_ranks: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    meeting = (Path(folder) / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
    torch.save(work(rank, num_ranks, *args), Path(folder) / f"{rank}.pt")
    leave_group()


def leave_group() -> None:
    """End this process of a gloo group, once all ranks are done.

    The ranks wait for each other, so that none closes a connection that another still reads. And the process ends
    without the interpreter's clean-up: gloo's threads may outlive the group, and destroying one that still runs aborts
    the process.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
