"""Worker processes that judge what exact algebra can't, and can be killed.

Nothing here uses signals or threads of its own, so it works from any thread of any process: workers are lent
under a lock and awaited with a selector. After a fork the child starts workers of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.rewards.policy import DEFAULT_POLICY, VerifierPolicy
from grpo_lit.rewards.worker import OUT_OF_MEMORY

MEMORY_BYTES = 3 << 30
START_LIMIT_S = 120.0
GRACE_S = 5.0
"""How long after a worker should have ended itself the parent ends it."""
JOBS_PER_WORKER = 5000
"""SymPy's caches grow; a fresh process now and then keeps memory flat."""

_FROM_OUTSIDE = tuple(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
_WORKER = Path(__file__).with_name("worker.py")


class Job(NamedTuple):
    """Two normalised answers to compare, and by which policy."""

    gold: str
    answer: str
    policy: VerifierPolicy = DEFAULT_POLICY


class Reply(NamedTuple):
    """What became of a job; ``unparsable`` also stands for what is too large to evaluate."""

    kind: Literal["correct", "wrong", "unparsable", "timeout", "crashed"]
    reason: str
    seconds: float


class _KilledError(SystemFault):
    """Somebody else ended a worker process while it started."""


class _Worker:
    """One process, started on demand and again after its death."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.jobs = 0
        self.sent = 0.0
        self.deadline = 0.0
        self.timeout_s = 0.0
        self.buffer = b""
        self.killed = False
        """Whether somebody else ended the process during the last job."""

    def launch(self) -> None:
        """Starts the process if there is none, and doesn't wait for it."""
        if self.process is not None and self.process.poll() is None and self.jobs < JOBS_PER_WORKER:
            return
        self.close()
        if not sys.executable:
            raise SystemFault("the verifier needs a Python interpreter to start; sys.executable is empty")
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONIOENCODING": "utf-8",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=environment,
            start_new_session=True,  # Ctrl-C in a terminal goes to the whole foreground group
        )
        self._write({"path": sys.path, "parent": os.getpid(), "memory_bytes": MEMORY_BYTES})

    def wait_until_ready(self) -> None:
        """Waits for the libraries to load; that is no answer's time."""
        if self.ready:
            return
        limit = time.monotonic() + START_LIMIT_S
        while self.read_line(max(0.0, limit - time.monotonic())) is None:
            process = self.process
            if process is None or process.poll() is not None or time.monotonic() >= limit:
                status = None if process is None else process.poll()
                self.kill()
                raise (_KilledError if status in _FROM_OUTSIDE else SystemFault)(
                    f"the verifier's worker process didn't start (exit status {status}): "
                    "is math-verify installed for this interpreter, and is there memory left?"
                )
        self.ready = True

    def send(self, job: Job, timeout_s: float) -> None:
        """Hands over a job; a process found dead is replaced first."""
        self.timeout_s = timeout_s
        request = {"gold": job.gold, "answer": job.answer, "policy": list(job.policy), "timeout_s": timeout_s}
        for attempt in range(3):
            try:
                self.launch()
                self.wait_until_ready()
                self._write(request)
                break
            except _KilledError:
                if attempt == 2:
                    raise
            except OSError:
                self.kill()
                if attempt == 2:
                    raise SystemFault("the verifier's worker process ends as soon as it starts") from None
        self.jobs += 1
        self.sent = time.monotonic()
        self.deadline = self.sent + timeout_s + GRACE_S

    def read_line(self, wait_s: float) -> dict[str, Any] | None:
        """The next answer; None if there is none within the time or the process has ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            limit = time.monotonic() + wait_s
            while b"\n" not in self.buffer:
                if not selector.select(max(0.0, limit - time.monotonic())):
                    return None
                chunk = os.read(self.process.stdout.fileno(), 65536)
                if not chunk:
                    self.process.wait()
                    return None
                self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def reply(self) -> Reply:
        """Reads the answer that has arrived, or says how the process ended."""
        answer = self.read_line(max(0.0, self.deadline - time.monotonic()))
        self.killed = False
        if answer is not None:
            kind: dict[bool | None, Literal["correct", "wrong", "unparsable"]]
            kind = {True: "correct", False: "wrong", None: "unparsable"}
            return Reply(kind[answer["correct"]], answer["reason"], answer["seconds"])
        status = self.process.poll() if self.process is not None else None
        self.killed = status in _FROM_OUTSIDE
        self.kill()
        seconds = time.monotonic() - self.sent
        if status in (None, -signal.SIGALRM, -getattr(signal, "SIGXCPU", 0)):
            return Reply("timeout", f"no verdict within {self.timeout_s:g} s", seconds)
        if status == OUT_OF_MEMORY:
            return Reply("crashed", "the worker process ran out of memory", seconds)
        return Reply("crashed", f"the worker process ended with status {status}", seconds)

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[self.process.stdin.write(data) or 0 :]

    def kill(self) -> None:
        """Ends the process at once."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        self.close()

    def close(self) -> None:
        """Closes the pipes, upon which an idle process ends by itself."""
        if self.process is not None:
            self.forget()
            try:
                self.process.wait(1.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process, self.ready, self.jobs, self.buffer = None, False, 0, b""

    def forget(self) -> None:
        """Closes this process's ends of the pipes and leaves the other process alone."""
        for pipe in (self.process.stdin, self.process.stdout) if self.process is not None else ():
            if pipe is not None:
                pipe.close()


class WorkerPool:
    """Up to ``num_workers`` processes, started when first needed.

    Args:
        num_workers: how many jobs of one call run at once. One is enough for most answers: few get here.
        timeout_s: longest time one job may take, from when its worker has read it.

    Raises:
        UserError: fewer than one worker, or a time that isn't above zero.
    """

    def __init__(self, num_workers: int = 1, timeout_s: float = 5.0) -> None:
        if num_workers < 1:
            raise UserError("num_workers", num_workers, "at least 1")
        check_timeout(timeout_s)
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self._reset()
        _POOLS.add(self)

    def _reset(self) -> None:
        self._free = threading.Condition()
        self._workers = [_Worker() for _ in range(self.num_workers)]
        self._idle = list(self._workers)

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that are running now."""
        return [w.process.pid for w in self._workers if w.process is not None and w.process.poll() is None]

    def judge(self, jobs: Sequence[Job], timeout_s: float | None = None) -> list[Reply]:
        """Judges all jobs, in their order. Other threads wait until a worker is free.

        Raises:
            SystemFault: no worker process can be started.
        """
        if not jobs:
            return []
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        check_timeout(timeout_s)
        workers = self._borrow(len(jobs))
        clean = False
        try:
            replies = _run(workers, jobs, timeout_s)
            clean = True
        finally:
            if not clean:  # interrupted: an answer still under way must not be taken for the next one
                for worker in workers:
                    worker.kill()
            with self._free:
                self._idle.extend(workers)
                self._free.notify_all()
        return replies

    def _borrow(self, wanted: int) -> list[_Worker]:
        with self._free:
            self._free.wait_for(lambda: self._idle)
            taken, self._idle = self._idle[:wanted], self._idle[wanted:]
        return taken

    def close(self) -> None:
        """Ends all processes; the pool starts new ones if it is used again."""
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_timeout(timeout_s: float) -> None:
    """Refuses a time limit that isn't a number above zero."""
    if not 0 < timeout_s < float("inf"):
        raise UserError("timeout_s", timeout_s, "a number of seconds above 0")


def _run(workers: list[_Worker], jobs: Sequence[Job], timeout_s: float) -> list[Reply]:
    for worker in workers:
        with suppress(OSError):  # found dead, and replaced, when it is given its first job
            worker.launch()
    waiting = deque(enumerate(jobs))
    replies: list[Reply | None] = [None] * len(jobs)
    busy: dict[int, tuple[_Worker, int]] = {}  # by file descriptor
    judged_again: set[int] = set()  # once each: the answer may be what had its worker killed

    def give(worker: _Worker) -> None:
        if waiting:
            index, job = waiting.popleft()
            worker.send(job, timeout_s)
            assert worker.process is not None
            assert worker.process.stdout is not None
            busy[worker.process.stdout.fileno()] = (worker, index)

    for worker in workers:
        give(worker)
    while busy:
        with selectors.DefaultSelector() as selector:
            for descriptor in busy:
                selector.register(descriptor, selectors.EVENT_READ)
            nearest = min(worker.deadline for worker, _ in busy.values())
            ready = {key.fd for key, _ in selector.select(max(0.0, nearest - time.monotonic()))}
        for descriptor, (worker, index) in list(busy.items()):
            if descriptor in ready or time.monotonic() >= worker.deadline:
                del busy[descriptor]
                reply = worker.reply()
                if worker.killed and index not in judged_again:
                    judged_again.add(index)
                    waiting.appendleft((index, jobs[index]))
                else:
                    replies[index] = reply
                give(worker)
    return [reply for reply in replies if reply is not None]


_POOLS: weakref.WeakSet[WorkerPool] = weakref.WeakSet()


def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()


def _after_fork() -> None:
    """In a forked child: the parent's workers are the parent's, and its locks may be held for ever."""
    for pool in list(_POOLS):
        for worker in pool._workers:
            worker.forget()
            if worker.process is not None:
                worker.process.returncode = 0  # not this process's child: nothing to wait for
        pool._reset()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
