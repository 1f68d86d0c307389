"""Child processes that must not outlive this one, however it ends."""

from __future__ import annotations

import os
import subprocess
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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
