"""One rollout in flight: admits rows to slots, runs steps, reads how far they are, compacts what is left.

The host never waits for a step. It queues a few, then a copy of the slots' status, and looks at that copy only when
the next few are queued; so it acts on rows that ended a few steps ago, and those steps did nothing for them. Nothing
a row draws depends on any of this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_lit.policy import Policy
from grpo_lit.rollout.base import Progress
from grpo_lit.rollout.graph_runner import DecodeBuffers, GraphRunner
from grpo_lit.rollout.pages import GroupPages, PagePool
from grpo_lit.rollout.prefill import prefill
from grpo_lit.rollout.stops import AnswerStop

_WORTH_RECORDING = 64
"""Steps that a smaller bucket must save on before it is recorded, which takes the host as long as some 20 steps."""


@dataclass
class _Row:
    """Host's view of a row."""

    group: int
    pages: list[int] = field(default_factory=list)
    num_issued: int = 0
    length: int = 0
    done: bool = False
    stopped: bool = False
    thinking: bool = False


@dataclass
class _Snapshot:
    """Status of the slots at some step, on its way to the host."""

    status: Tensor
    ids: Tensor | None
    rows: list[int | None]
    event: torch.cuda.Event | None


class Flight:
    """Runs one rollout to its end.

    Args:
        policy: prefills.
        buffers: sized for this rollout, uniform numbers filled in.
        runner: runs steps on them.
        prompts: token ids of each prompt.
        counts: completions of each prompt.
        stop: ends rows at their answer, or None.
        check_every: steps between two looks at the status.
        depth: status copies that may be on their way while more steps are queued.
        progress: told about finished rows and sampled tokens.
        claim: gives the next prompt to take, None after the last; rows of prompts that it never gave stay empty. None
            takes all prompts.
    """

    def __init__(
        self,
        policy: Policy,
        buffers: DecodeBuffers,
        runner: GraphRunner,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        *,
        stop: AnswerStop | None = None,
        check_every: int = 8,
        depth: int = 1,
        progress: Progress | None = None,
        claim: Callable[[], int | None] | None = None,
    ) -> None:
        self._policy, self._buffers, self._runner, self._prompts = policy, buffers, runner, prompts
        self._stop, self._check_every, self._depth, self._progress = stop, check_every, depth, progress
        self._pool = PagePool(buffers.plan.num_pages)
        self._groups = [GroupPages(len(prompt), n, n) for prompt, n in zip(prompts, counts, strict=True)]
        self.rows = [_Row(group) for group, count in enumerate(counts) for _ in range(count)]
        self._claim, self._more = claim, claim is not None
        self._taken = [] if self._more else list(range(len(self.rows)))
        self._waiting = deque(self._taken)
        self._slots: list[int | None] = []
        self._pending: deque[_Snapshot] = deque()
        self.num_steps = 0

    def run(self) -> None:
        """Until every row is done."""
        if self._stop is not None:
            inside = [self._stop.thinking(prompt) for prompt in self._prompts]
            for row in self.rows:
                row.thinking = inside[row.group]
        while True:
            self._admit()
            if all(self.rows[index].done for index in self._taken):
                return
            issued = self._issue()
            assert issued or self._pending, "a row that was given all its steps has ended"
            while len(self._pending) > (self._depth if issued else 0):
                self._observe(self._pending.popleft())
            self._compact()

    # ---- slots --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give free slots to waiting rows: prefill their prompts, set pages aside, load the slots."""
        plan = self._buffers.plan
        free = [slot for slot, row in enumerate(self._slots) if row is None]
        free += range(len(self._slots), plan.num_slots)
        while self._claim is not None and self._more and len(self._waiting) < len(free):
            group = self._claim()
            self._more = group is not None
            rows = [index for index, row in enumerate(self.rows) if row.group == group]
            self._taken += rows
            self._waiting += rows
        chosen = [(slot, self._waiting.popleft()) for slot in free[: len(self._waiting)]]
        if not chosen:
            return
        self._slots += [None] * (max(slot for slot, _ in chosen) + 1 - len(self._slots))
        wanted = dict.fromkeys(self.rows[index].group for _, index in chosen)
        if plan.prefill_all and self._claim is None:
            wanted = dict.fromkeys(number for number, group in enumerate(self._groups) if group.not_done)
        fresh = [group for group in wanted if not self._groups[group].ready]
        prefill(
            self._policy,
            self._buffers.cache,
            self._pool,
            [(self._prompts[group], self._groups[group]) for group in fresh],
            one_by_one=self._buffers.fixed_slots is not None,
        )
        copies = [copy for _, index in chosen if (copy := self._take_pages(index)) is not None]
        device = self._buffers.page_table.device
        if copies:
            source, target = torch.tensor(copies, device=device).unbind(dim=1)
            self._buffers.cache.copy_pages(source, target)
        for slot, index in chosen:
            self._slots[slot] = index
        self._load(chosen)

    def _take_pages(self, index: int) -> tuple[int, int] | None:
        """Pages for a row's completion; returns (template, copy) if the prompt's last page has to be copied."""
        row, plan = self.rows[index], self._buffers.plan
        group = self._groups[row.group]
        group.not_admitted -= 1
        count = group.num_private(plan.max_new_tokens)
        if group.template is None:
            row.pages = self._pool.take(count)
            return None
        if group.not_admitted == 0:  # nobody needs the template after this row
            row.pages = [group.template, *self._pool.take(count - 1)]
            group.template = None
            return None
        row.pages = self._pool.take(count)
        return group.template, row.pages[0]

    def _load(self, chosen: Sequence[tuple[int, int]]) -> None:
        """Write rows into their slots on the device."""
        state, device = self._buffers.state, self._buffers.page_table.device
        tables, ints = [], []
        for slot, index in chosen:
            row = self.rows[index]
            group, prompt = self._groups[row.group], self._prompts[row.group]
            pages = group.full + row.pages
            tables.append(pages + [0] * (self._buffers.plan.pages_per_row - len(pages)))
            ints.append((slot, prompt[-1], len(prompt) - 1, index))
        slots, tokens, positions, rows = torch.tensor(ints, device=device).unbind(dim=1)
        zero = torch.zeros_like(slots)
        for target, values in (
            (state.token, tokens),
            (state.position, positions),
            (state.length, positions + 1),
            (state.num_drawn, zero),
            (state.row, rows),
            (state.uniform, state.table[rows, 0]),
            (self._buffers.page_table, torch.tensor(tables, device=device)),
        ):
            target.index_copy_(0, slots, values.to(target.dtype))

    def _compact(self) -> None:
        """Move running rows to the front once they fit a smaller bucket; nothing to do while rows wait."""
        kept = [slot for slot, row in enumerate(self._slots) if row is not None]
        if self._waiting or self._more or not kept or self._bucket(len(kept)) >= self._bucket(len(self._slots)):
            return
        if not self._runner.is_ready(self._bucket(len(kept))) and self._max_steps_left() < _WORTH_RECORDING:
            return
        order = torch.tensor(kept, device=self._buffers.page_table.device)
        for tensor in self._buffers.per_slot:
            tensor[: len(kept)] = tensor[order]
        self._buffers.state.position[len(kept) :] = -1
        self._buffers.state.length[len(kept) :] = 0
        self._slots = [self._slots[slot] for slot in kept]

    def _bucket(self, num_slots: int) -> int:
        """Slots that a step runs on: any number where nothing is recorded."""
        if self._buffers.fixed_slots is not None:
            return self._buffers.fixed_slots
        return self._buffers.plan.bucket(num_slots) if self._runner.use_graphs else num_slots

    # ---- steps --------------------------------------------------------------------------------------------------

    def _issue(self) -> int:
        """Queue steps, at most as many as any row in a slot may still need, then a copy of the status."""
        running = [self.rows[index] for index in self._slots if index is not None]
        steps = min(self._check_every, self._max_steps_left())
        if steps == 0:
            return 0
        bucket = self._bucket(len(self._slots))
        for _ in range(steps):
            self._runner.run(bucket)
        for row in running:
            row.num_issued += steps
        self.num_steps += steps
        self._pending.append(self._snapshot())
        return steps

    def _max_steps_left(self) -> int:
        """Steps that rows in slots may still need at most."""
        limit = self._buffers.plan.max_new_tokens
        return max((limit - self.rows[index].num_issued for index in self._slots if index is not None), default=0)

    def _snapshot(self) -> _Snapshot:
        width = len(self._slots)
        status, ids = self._buffers.status[:, :width], None
        if self._stop is not None:
            ids = self._buffers.state.out_ids[self._buffers.state.row[:width].long()]
        if not status.is_cuda:
            return _Snapshot(status.clone(), ids, list(self._slots), None)
        # Into pinned memory: then the copy waits for the steps, and the host for neither.
        pinned = torch.empty(status.shape, dtype=status.dtype, pin_memory=True).copy_(status, non_blocking=True)
        if ids is not None:
            ids = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True).copy_(ids, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Snapshot(pinned, ids, list(self._slots), event)

    def _observe(self, snapshot: _Snapshot) -> None:
        """Learn which rows ended, free their slots and pages."""
        if snapshot.event is not None:
            snapshot.event.synchronize()
        positions, counts = snapshot.status.tolist()
        for slot, index in enumerate(snapshot.rows):
            if index is None or self.rows[index].done:
                continue
            row, seen = self.rows[index], self.rows[index].length
            row.length = counts[slot]
            if snapshot.ids is not None and self._stop is not None:
                ids = snapshot.ids[slot, : row.length].tolist()
                length = self._stop.length(ids, seen, thinking=row.thinking)
                if length is not None:
                    row.length, row.stopped = length, True
            if positions[slot] < 0 or row.stopped:
                self._finish(index)
        if self._progress is not None:
            self._progress(sum(row.done for row in self.rows), sum(row.length for row in self.rows))

    def _finish(self, index: int) -> None:
        row = self.rows[index]
        row.done = True
        slot = self._slots.index(index)
        self._slots[slot] = None
        if row.stopped:  # the device does not know yet
            self._buffers.state.position[slot] = -1
        self._pool.give(row.pages)
        group = self._groups[row.group]
        group.not_done -= 1
        if group.not_done == 0:
            group.release_shared(self._pool)
