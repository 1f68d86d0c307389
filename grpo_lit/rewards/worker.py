"""The worker process: reads one request a line, answers one line, and never outlives its parent.

Started as a script by `grpo_lit.rewards.pool`, so that neither the package's ``__init__`` nor torch nor the
user's main module is imported. The clock of a request starts here, once it has been read; when it runs out
the kernel ends the process (SIGALRM with its default action), even from within a C loop that no Python
handler could interrupt. Limits on CPU time and memory stand behind it.

Requests: ``{"gold": str, "answer": str, "policy": [str], "timeout_s": float}``. Answers: ``{"correct": bool | null,
"reason": str, "seconds": float}``; null means that the answer couldn't be read.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
import time
import types
from typing import Any

OUT_OF_MEMORY = 77
"""Exit status of a worker that met its memory limit."""


def _limit(name: str, amount: int) -> None:
    """Sets a soft resource limit, where the system has such a thing."""
    try:
        import resource

        kind = getattr(resource, name)
        highest = resource.getrlimit(kind)[1]
        if highest != resource.RLIM_INFINITY:
            amount = min(amount, highest)
        resource.setrlimit(kind, (amount, highest))
    except (ImportError, AttributeError, ValueError, OSError):
        pass  # the parent's clock still stands


def _leave_with_parent(parent: int) -> None:
    """A fork of the parent may hold the pipe open for ever, so its end alone isn't enough."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _set_clock(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        if seconds:
            _limit("RLIMIT_CPU", int(time.process_time() + seconds) + 2)


def _load_judge(folder: str) -> Any:
    package = types.ModuleType("grpo_lit_answers")
    package.__path__ = [folder]
    sys.modules[package.__name__] = package
    module = importlib.import_module(f"{package.__name__}.symbolic")
    algebra = importlib.import_module(f"{package.__name__}.algebra")
    return module.judge, module.VerifierPolicy, algebra.TooLarge


def main() -> None:
    """Answers requests until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints must not mix with the answers
    setup = json.loads(requests.readline())
    threading.Thread(target=_leave_with_parent, args=(setup["parent"],), daemon=True).start()
    sys.path[:] = setup["path"]  # the parent's, and no longer this file's own folder first
    judge, make_policy, too_large = _load_judge(os.path.dirname(os.path.abspath(__file__)))
    judge("\\sin(x)^2+\\cos(x)^2", "1")  # loads the parser's tables: start-up isn't an answer's time
    _limit("RLIMIT_CORE", 0)
    _limit("RLIMIT_AS", setup["memory_bytes"])
    answers.write(b'{"ready": true}\n')
    for line in requests:
        request = json.loads(line)
        _set_clock(request["timeout_s"])
        start = time.perf_counter()
        try:
            correct, reason = judge(request["gold"], request["answer"], make_policy(*request["policy"]))
        except too_large as error:
            correct, reason = None, f"refused to evaluate {error}"
        except RecursionError:
            correct, reason = None, "nested too deeply"
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # what is left may be in no state to go on
        except Exception as error:  # SymPy on an odd expression: no reading of it, and no fault of the run's
            correct, reason = None, f"SymPy raised {type(error).__name__}"
        seconds = time.perf_counter() - start
        _set_clock(0.0)
        answers.write(json.dumps({"correct": correct, "reason": reason, "seconds": seconds}).encode() + b"\n")


if __name__ == "__main__":
    main()
