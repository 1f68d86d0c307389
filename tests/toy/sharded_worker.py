"""One rank of tests/toy/test_distributed.py: `python sharded_worker.py RANK RANKS FOLDER`.

Makes the first update of every case on this rank's share of the rows, and saves the rows and the weights.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_lit.distributed import parameter_hash
from grpo_lit.loss import LossConfig
from grpo_lit.toy.distributed import leave_group, local_counts, sharded_update
from grpo_lit.toy.echo import EchoPolicy
from grpo_lit.toy.generators import MersenneTwister

REDUCTIONS: dict[str, dict[str, Any]] = {
    "sequence_mean": {},
    "token_mean": {},
    "alpha": {"alpha": 0.5},
    "fixed_length": {},
}
COUNTS = {"even": [8, 8, 8], "ragged": [9, 2, 14]}
CASES = list(itertools.product(REDUCTIONS, ("split", "whole"), COUNTS))


def start_policy() -> EchoPolicy:
    policy = EchoPolicy()
    with torch.no_grad():
        policy.logits += 0.3 * torch.randn(6, 4, generator=torch.Generator().manual_seed(4))
        # often right, so that every group has rewards of both kinds
        for prompt in range(3):
            policy.logits[prompt, prompt] += 1
            policy.logits[3 + prompt, 3] += 1
    return policy


def config_of(reduction: str) -> LossConfig:
    return LossConfig(beta=0.05, reduction=reduction, **REDUCTIONS[reduction])


def run(rank: int, num_ranks: int) -> dict[Any, Any]:
    found = {}
    for reduction, layout, counts in CASES:
        policy = start_policy()
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
        share = local_counts(COUNTS[counts], layout, rank, num_ranks)
        rollout = policy.sample(MersenneTwister(10 + rank), share)
        # 2 rows at a time on rank 0 and 5 on rank 1: different numbers of micro-batches
        sharded_update(policy, optimizer, rollout, passes=3, micro_batch_rows=(2, 5)[rank], config=config_of(reduction))
        weights = policy.logits.detach()
        found[reduction, layout, counts] = (tuple(rollout), weights, parameter_hash([weights]))
    return found


if __name__ == "__main__":
    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=num_ranks)
    torch.save(run(rank, num_ranks), folder / f"{rank}.pt")
    leave_group()
