"""A rank that dies ends the run on all others within a minute, with a message that names it."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from grpo_lit.errors import UserError

_FAILED = "failed: "


class RankWatch(Callback):
    """Ends this process when another rank of the run is gone; does nothing on one rank.

    A collective that waits for a dead rank waits until the back end's own timeout, half an hour by default, and then
    does not say for whom. Here a thread of every rank counts up a number in the store that torch's process group
    keeps anyway, and reads those of the others. The clocks of the hosts are never compared.

    Args:
        interval_s: seconds between two beats.
        timeout_s: a rank whose number stands still for longer is taken for dead.
    """

    def __init__(self, interval_s: float = 1.0, timeout_s: float = 30.0) -> None:
        if not 0 < interval_s <= timeout_s / 3:
            raise UserError("RankWatch.interval_s", interval_s, f"above 0 and at most timeout_s / 3 = {timeout_s / 3}")
        self.interval_s, self.timeout_s = interval_s, timeout_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: dist.Store | None = None
        self._rank = 0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start to beat, before the model is loaded."""
        if trainer.world_size == 1 or not dist.is_initialized() or self._thread is not None:
            return
        # a connection of its own: the main thread's may be blocked for long
        store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._store = dist.PrefixStore(f"rank_watch/{stage}", store)
        self._rank = trainer.global_rank
        self._store.set(f"who/{self._rank}", f"host {socket.gethostname()}, process {os.getpid()}")
        self._stop.clear()
        self._thread = threading.Thread(
            target=self._watch, args=(self._store, trainer.world_size), name="rank-watch", daemon=True
        )
        self._thread.start()

    def _watch(self, store: dist.Store, size: int) -> None:
        others = [rank for rank in range(size) if rank != self._rank]
        last = {rank: ("", time.monotonic()) for rank in others}
        beat = 0
        while not self._stop.wait(self.interval_s):
            beat += 1
            try:
                store.set(f"beat/{self._rank}", str(beat))
                for rank in others:
                    word = store.get(f"beat/{rank}").decode() if store.check([f"beat/{rank}"]) else ""
                    if word.startswith(_FAILED):
                        return self._end(f"rank {rank} {word}")
                    if word != last[rank][0]:
                        last[rank] = (word, time.monotonic())
                    elif time.monotonic() - last[rank][1] > self.timeout_s:
                        who = store.get(f"who/{rank}").decode() if store.check([f"who/{rank}"]) else "never seen"
                        return self._end(f"rank {rank} ({who}) has given no sign for {self.timeout_s:.0f} s")
            except RuntimeError:  # torch's store errors: the server is in rank 0, or in the launcher
                if self._stop.is_set():
                    return None
                return self._end("rank 0, which keeps the connection of all ranks, is gone")
        return None

    def _end(self, message: str) -> None:
        print(
            f"\ngrpo-lit: error: [rank {self._rank}] {message}; this rank stops too. The last checkpoint is whole: "
            "resume with --ckpt_path last",
            file=sys.stderr,
            flush=True,
        )
        # The main thread may hang in a collective, where no exception reaches it.
        os._exit(1)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the others why this rank fails, so that they need not wait.

        Where it fails because a collective lost its other end, the watch gets time to find out which rank is gone;
        it then ends the process itself, with that rank's name.
        """
        if self._thread is not None and _lost_connection(exception):
            self._thread.join(timeout=self.timeout_s + 3 * self.interval_s)
        self._leave(f"{_FAILED}{type(exception).__name__}: {' '.join(str(exception).split())[:200]}")

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave together: rank 0 takes the store with it."""
        if self._thread is not None:
            trainer.strategy.barrier("rank_watch")
            self._leave()

    def _leave(self, word: str | None = None) -> None:
        if self._thread is None or self._store is None:
            return
        self._stop.set()
        self._thread.join(timeout=5)
        self._thread = None
        if word is not None:
            with contextlib.suppress(RuntimeError):  # the store may be gone, and with it whoever would read this
                self._store.set(f"beat/{self._rank}", word)


def _lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because of another rank."""
    text = str(error)
    return isinstance(error, dist.DistError) or any(
        words in text for words in ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL")
    )
