"""This process among all of a run: what a rank owns, and the few things that ranks exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from grpo_lit.distributed import FlatGradients, check_digest, flatten_gradients
from grpo_lit.loss import merge_totals
from grpo_lit.step import GlobalRows


class WorldView(NamedTuple):
    """Rank and number of processes; with one process every method is a no-op."""

    rank: int
    size: int

    def share(self, count: int) -> list[int]:
        """Which of `count` items this rank takes: every size-th, so that long items spread."""
        return list(range(self.rank, count, self.size))

    @contextmanager
    def no_sync(self, trainer: Trainer) -> Iterator[None]:
        """Keep DDP from reducing inside a backward: ranks may run different numbers of micro-batches."""
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            with model.no_sync():
                yield
        else:
            yield

    def flatten_gradients(self, parameters: Sequence[nn.Parameter]) -> list[FlatGradients]:
        """Gradients ready for `reduce_gradients`; the part of it that takes memory. Empty for one rank."""
        return flatten_gradients(parameters) if self.size > 1 else []

    def reduce_gradients(self, flat: Sequence[FlatGradients]) -> None:
        """Sum the gradients over ranks in one flat all-reduce; the weights of the loss are global already."""
        for group in flat:
            group.all_reduce()

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether the flag is set on any rank: one all-reduce of one number."""
        if self.size == 1:
            return flag
        votes = torch.tensor([int(flag)], device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        return bool(votes)

    def merge_totals(self, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`grpo_lit.loss.merge_totals` over all ranks."""
        if self.size == 1:
            return dict(totals)
        return merge_totals(self.gather({name: pair.cpu() for name, pair in totals.items()}))

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gather_rows(self, rewards: Tensor, group_ids: Tensor, lengths: Tensor, truncated: Tensor) -> GlobalRows:
        """All ranks' rows, on the CPU."""
        own = tuple(tensor.detach().cpu() for tensor in (rewards, group_ids, lengths, truncated))
        ranks = self.gather(own)
        start = sum(len(rank[0]) for rank in ranks[: self.rank])
        columns = [torch.cat(column) for column in zip(*ranks, strict=True)]
        return GlobalRows(columns[0], columns[1], columns[2], columns[3], slice(start, start + len(own[0])))

    def check_replicas(self, digest: str, step: int, device: torch.device) -> None:
        """Stop the run if the digests of the trainable weights differ between ranks."""
        if self.size > 1:
            check_digest(digest, step=step, device=device)
