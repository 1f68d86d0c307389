"""An engine's processes and this one: neither may outlive the other unnoticed."""

from __future__ import annotations

import os
import queue
import select
import subprocess
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_POLL_MS = 500
_SCRIPT = 'read -r _; kill -TERM "$@" 2>/dev/null; sleep 3; kill -KILL "$@" 2>/dev/null'


class ChildGuard:
    """Ends processes when this one is gone, also after a SIGKILL, of which nobody is told.

    A shell waits on a pipe whose other end only this process holds: the system closes it with the process. An engine of
    vLLM's does not notice its parent's death by itself and would keep the GPU's memory.

    Args:
        pids: the processes.
    """

    def __init__(self, pids: list[int]) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "sh", *map(str, pids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is not for it
        )
        self._release = weakref.finalize(self, _stand_down, self._shell, os.getpid())

    def release(self) -> None:
        """Stand down: the processes have ended."""
        self._release()


def _stand_down(shell: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # a forked child must not stand it down
        shell.kill()
        shell.communicate()


class DeathWatch:
    """Fails whatever waits on a vLLM engine as soon as one of its processes is gone.

    vLLM's own client notes a death but does not wake a caller that waits for the next output: an engine killed for want
    of memory, say, would hang the training for good.

    Args:
        pids: the engine's processes.
        client: vLLM's client of the engine (``LLMEngine.engine_core``).
    """

    def __init__(self, pids: list[int], client: Any) -> None:
        self._stop = threading.Event()
        arguments = (list(pids), weakref.ref(client), self._stop)
        threading.Thread(target=_watch, args=arguments, daemon=True, name="vllm-death-watch").start()

    def stop(self) -> None:
        """The engine is about to end as it should."""
        self._stop.set()


def _watch(pids: list[int], client: weakref.ref[Any], stop: threading.Event) -> None:
    poller, descriptors = select.poll(), []
    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                descriptors.append(os.pidfd_open(pid))
                poller.register(descriptors[-1], select.POLLIN)
        while not poller.poll(_POLL_MS) and not stop.is_set():
            if client() is None:
                return
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    while not stop.wait(_POLL_MS / 1000):  # again and again: a call may begin after its engine has died
        if (alive := client()) is None:
            return
        _fail_waiting(alive)
        del alive


def _fail_waiting(client: Any) -> None:
    error = RuntimeError("an engine process ended; was it killed, or is memory short?")
    outputs: queue.Queue[Any] | None = getattr(client, "outputs_queue", None)
    if outputs is not None and outputs.empty():
        outputs.put_nowait(error)
    for future in list(getattr(client, "utility_results", {}).values()):
        if not future.done():
            with suppress(Exception):  # answered in this moment
                future.set_exception(error)


@contextmanager
def new_children() -> Iterator[list[int]]:
    """Collects the processes that are started inside and still run at its end, children of children included."""
    before = set(_descendants(os.getpid()))
    found: list[int] = []
    yield found
    # The tracker ends by itself and cleans up shared memory that the others leave.
    found += [pid for pid in _descendants(os.getpid()) if pid not in before and not _is_tracker(pid)]


def _descendants(pid: int) -> list[int]:
    """All processes under one, by Linux's process table, which is where vLLM runs."""
    found: list[int] = []
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            found += map(int, listing.read_text().split())
    return found + [below for child in found for below in _descendants(child)]


def _is_tracker(pid: int) -> bool:
    try:
        return b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True  # gone
