"""Runs decode steps: as one CUDA graph for each number of slots, or as they stand on the CPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from grpo_lit.kernels.advance_rows import RowState
from grpo_lit.rollout.decode import DecodeStep
from grpo_lit.rollout.pages import CacheShape, KVCache
from grpo_lit.rollout.plan import RolloutPlan

_UNFINISHED: list[object] = []
"""Pools of recordings that broke off; torch aborts the process if such a pool is freed."""


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """One stream for all recordings: cuBLAS keeps a workspace for every stream it has seen."""
    return torch.cuda.Stream(device)


class DecodeBuffers:
    """Everything a rollout holds on the device, at fixed addresses.

    Attributes:
        cache: keys and values in pages.
        state: slots and rows, see `RowState`.
        status: (2, S) int32, the state's positions and counts side by side: all that the host needs to see.
        page_table: (S, P) int32.
        fixed_slots: number of slots that every step runs on, or None where it follows the rows in flight.
    """

    def __init__(
        self, plan: RolloutPlan, shape: CacheShape, device: torch.device, fixed_slots: int | None = None
    ) -> None:
        self.fixed_slots = fixed_slots
        slots = fixed_slots or -(-plan.num_slots // 16) * 16  # whole 64-byte lines, so every view is aligned alike
        rows, width = plan.num_rows + 1, plan.max_new_tokens
        self.plan = plan
        self.cache = KVCache(shape, plan.num_pages, device)
        self.status = torch.zeros(2, slots, dtype=torch.int32, device=device)
        self.status[0] = -1
        self.page_table = torch.zeros(slots, plan.pages_per_row, dtype=torch.int32, device=device)
        self.state = RowState(
            token=torch.zeros(slots, dtype=torch.long, device=device),
            position=self.status[0],
            length=torch.zeros(slots, dtype=torch.int32, device=device),
            num_drawn=self.status[1],
            row=torch.full((slots,), plan.num_rows, dtype=torch.int32, device=device),
            uniform=torch.zeros(slots, dtype=torch.float64, device=device),
            table=torch.zeros(rows, width, dtype=torch.float64, device=device),
            out_ids=torch.zeros(rows, width, dtype=torch.long, device=device),
            out_logprobs=torch.zeros(rows, width, dtype=torch.float32, device=device),
        )

    @property
    def per_slot(self) -> list[Tensor]:
        """Tensors with a row for each slot."""
        return [*self.state[:6], self.page_table]


class GraphRunner:
    """Runs `DecodeStep` on the first slots of the buffers.

    The first step of each size runs as it stands (kernels are compiled and libraries set up by it), later ones replay
    a recording. Memory that recordings use comes from a pool of its own, given back by `close`.

    Args:
        step: the work.
        buffers: what it works on.
        warm: sizes that ran before in this process with the same kernels; added to.
        use_graphs: False runs every step as it stands.
    """

    def __init__(self, step: DecodeStep, buffers: DecodeBuffers, warm: set[object], *, use_graphs: bool) -> None:
        self._step, self._buffers, self._warm = step, buffers, warm
        self.use_graphs = use_graphs
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: torch.cuda.MemPool | None = None

    def run(self, num_slots: int) -> None:
        """One step of the first `num_slots` slots."""
        graph = self._graphs.get(num_slots)
        if graph is not None:
            graph.replay()
        elif not self.use_graphs:
            self._call(num_slots)
        elif (num_slots, self._step.kernels_key) not in self._warm:
            self._call(num_slots)
            self._warm.add((num_slots, self._step.kernels_key))
        else:
            self._graphs[num_slots] = self._record(num_slots)
            self._graphs[num_slots].replay()

    def is_ready(self, num_slots: int) -> bool:
        """Whether a step of this size costs nothing to set up."""
        return not self.use_graphs or num_slots in self._graphs

    def close(self) -> None:
        """Drop recordings and their memory, once the device is done with them."""
        if self._pool is None:
            return
        torch.cuda.synchronize()
        for graph in self._graphs.values():
            graph.reset()  # also where a traceback still holds the object: the pool must be nobody else's to be freed
        self._graphs.clear()
        self._pool = None

    def _call(self, num_slots: int) -> None:
        self._step(self._buffers.state.first(num_slots), self._buffers.page_table[:num_slots])

    def _record(self, num_slots: int) -> torch.cuda.CUDAGraph:
        """Record a step. torch.cuda.graph would also empty the allocator's cache, which training then refills."""
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        graph = torch.cuda.CUDAGraph()
        current, side = torch.cuda.current_stream(), _capture_stream(torch.cuda.current_device())
        side.wait_stream(current)
        with torch.cuda.stream(side):
            graph.capture_begin(pool=self._pool.id, capture_error_mode="relaxed")  # type: ignore[arg-type]
            try:
                self._call(num_slots)
            except BaseException:
                _UNFINISHED.append((self._pool, graph))
                graph.capture_end()
                raise
            graph.capture_end()
        current.wait_stream(side)
        return graph
