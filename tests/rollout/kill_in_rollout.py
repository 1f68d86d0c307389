"""Runs commands that are killed or interrupted in the middle of a rollout: `python kill_in_rollout.py fork|spawn`.

Reads one JSON line for each command from standard input: {"arguments": [...], "rollout": n, "signals": [9]}; the
process sends itself the signals in its n-th rollout, counted from 1 (n = 0: never), at the second look that finds ended
rows: then some wait and some are in flight, whatever is sampled, if less than half of all are in flight at once. Writes
the exit status. With fork all commands share one import of the libraries; CUDA wants processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

from grpo_lit.cli import main
from grpo_lit.rollout.graph import GraphEngine


def odd_digits(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that any model gets some of: the share of odd digits and vowels."""
    return [sum(character in "13579aeiou" for character in text) / max(len(text), 1) for text in completions]


def run(arguments: list[str], rollout: int, signals: list[int]) -> int:
    """The command itself, with an end of its own."""
    os.environ["GRPO_LIT_TRACEBACK"] = "1"
    started = looks = 0
    plain = GraphEngine.generate

    def generate(self: GraphEngine, prompts: Any, counts: Any, keys: Any, sampling: Any, progress: Any = None) -> Any:
        nonlocal started
        started += 1

        def signal_myself(rows_done: int, num_tokens: int) -> None:
            nonlocal looks
            if started == rollout and rows_done:
                looks += 1
                if looks == 2:
                    assert rows_done < sum(counts), "the rollout is over already"
                    print(f"{signals} after {rows_done} rows and {num_tokens} tokens", file=sys.stderr, flush=True)
                    for number in signals:
                        os.kill(os.getpid(), number)
            if progress is not None:
                progress(rows_done, num_tokens)

        return plain(self, prompts, counts, keys, sampling, signal_myself)

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
