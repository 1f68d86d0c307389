"""Runs grpo-lit commands in forks of a process that has imported everything: a start costs no seconds.

Reads a JSON line {"arguments": [...], "log": path} from standard input, writes the child's pid, and its wait status
once it has ended.
"""

from __future__ import annotations

import json
import os
import sys

import torch

import grpo_lit.cli.sent  # noqa: F401  (with all that the commands need)
from grpo_lit.cli import main


def child(arguments: list[str], log: str) -> None:
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["GRPO_LIT_TRACEBACK"] = "1"
    code = 99
    try:
        code = main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(request["arguments"], request["log"])
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)
