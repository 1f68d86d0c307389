"""One rank of tests/test_distributed.py: `python distributed_worker.py RANK RANKS FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_lit.distributed import (
    check_parameter_hash,
    flat_all_reduce,
    gather_rows,
    sum_over_ranks,
    world_size,
)
from grpo_lit.errors import SystemFault
from grpo_lit.toy.distributed import leave_group


def params_with_gradients(rank: int) -> list[torch.nn.Parameter]:
    """Two shapes, two dtypes, one gradient missing on rank 0 and one on every rank."""
    shapes = [((2, 3), torch.float32), ((4,), torch.bfloat16), ((1,), torch.float32), ((5,), torch.float32)]
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape, dtype in shapes]
    params[0].grad = torch.arange(6.0).view(2, 3) * (rank + 1)
    params[1].grad = torch.full((4,), 1.0 + rank, dtype=torch.bfloat16)
    if rank == 1:
        params[2].grad = torch.tensor([7.0])
    return params


def run(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"world_size": world_size()}
    summed = params_with_gradients(rank)
    flat_all_reduce(summed)
    found["summed"] = [param.grad for param in summed]
    found["totals"] = sum_over_ranks(rank + 1, torch.tensor(10 * (rank + 1)), 0.5)
    rows = torch.arange(3 * rank, 3 * rank + 2 * rank).view(-1, 1) * torch.ones(1, 2)  # none on rank 0, two on rank 1
    gathered, mine = gather_rows(rows)
    found["gathered"], found["own"] = gathered, gathered[mine]
    found["ids"], _ = gather_rows(torch.arange(rank + 2))

    same = [torch.arange(5.0), torch.ones(2, dtype=torch.bfloat16)]
    found["hash"] = check_parameter_hash(same, step=1)
    other = [torch.arange(5.0), torch.ones(2, dtype=torch.bfloat16)]
    if rank == 1:
        other[0][3] = torch.nextafter(other[0][3], torch.tensor(9.0))
    try:
        check_parameter_hash(other, step=17)
    except SystemFault as fault:
        found["fault"] = str(fault)
    return found


if __name__ == "__main__":
    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=rank, world_size=num_ranks)
    torch.save(run(rank), folder / f"{rank}.pt")
    leave_group()
