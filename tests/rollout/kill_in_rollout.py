"""Runs grpo-lit commands that die by SIGKILL in the middle of a rollout: `python kill_in_rollout.py fork|spawn`.

Reads one JSON line for each command from standard input: {"arguments": [...], "rollout": n, "tokens": t}; the process
kills itself in its n-th rollout, counted from 1, once t tokens are sampled (n = 0: never). Writes the exit status.
With fork all commands share one import of the libraries; CUDA wants processes of their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import torch

from grpo_lit.cli import main
from grpo_lit.rollout.graph import GraphEngine


def odd_digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that any model gets some of: the share of odd digits and vowels."""
    return [sum(character in "13579aeiou" for character in text) / max(len(text), 1) for text in completions]


def run(arguments: list[str], rollout: int, tokens: int) -> int:
    """The command itself, with an end of its own."""
    os.environ["GRPO_LIT_TRACEBACK"] = "1"
    started = 0
    plain = GraphEngine.generate

    def generate(self: GraphEngine, prompts: Any, counts: Any, keys: Any, sampling: Any, progress: Any = None) -> Any:
        nonlocal started
        started += 1

        def die(rows_done: int, num_tokens: int) -> None:
            if started == rollout and num_tokens >= tokens:
                assert rows_done < sum(counts), "the rollout is over already"
                os.kill(os.getpid(), signal.SIGKILL)
            if progress is not None:
                progress(rows_done, num_tokens)

        return plain(self, prompts, counts, keys, sampling, die)

    GraphEngine.generate = generate  # type: ignore[method-assign]
    return main(arguments)


def child_status(line: str, fork: bool) -> int:
    if not fork:
        return subprocess.run([sys.executable, __file__, "one"], input=line, text=True, stdout=sys.stderr).returncode
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 99
    try:
        os.dup2(2, 1)
        code = run(**json.loads(line))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "one":
        sys.exit(run(**json.loads(sys.stdin.readline())))
    if sys.argv[1] == "fork":
        import grpo_lit.cli.train  # noqa: F401  (with all that a fit needs)
    for line in sys.stdin:
        print(child_status(line, sys.argv[1] == "fork"), flush=True)
