"""Runs commands of grpo-lit as forks of a process that has imported all that they need: a start takes no seconds.

A fork is a process of its own, with its own folder, environment and streams, that a test may signal and kill; it ends
as `python -m grpo_lit` does. What it shares with the others is the state of imported modules, so a test about imports
or about environment variables read on import starts a new interpreter instead.

Reads JSON lines from standard input. {"arguments", "cwd", "environment", "output"} starts a command and is answered by
its process id; "output" is the stem of two files. {"ask": pid} is answered by its wait status, or null while it runs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def become(request: dict[str, Any]) -> None:
    """Turn a fork into the process that the command would have had."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    for number, path, how in (
        (0, os.devnull, os.O_RDONLY),
        (1, f"{request['output']}.out", flags),
        (2, f"{request['output']}.err", flags),
    ):
        opened = os.open(path, how, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    sys.path[0] = request["cwd"]  # as `python -m` has it
    sys.argv = ["grpo-lit", *request["arguments"]]


def serve() -> list[str] | None:
    """Fork as asked; in a fork, return the arguments of its command."""
    for line in sys.stdin:
        request = json.loads(line)
        if "ask" in request:
            pid, status = os.waitpid(request["ask"], os.WNOHANG)
            answer = status if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                become(request)
                arguments: list[str] = request["arguments"]
                return arguments
        print(json.dumps(answer), flush=True)
    return None


if __name__ == "__main__":
    # Not at the top: processes that a command spawns import this file again.
    for name in (
        *(
            "torch.utils.tensorboard",
            "transformers.models.llama.modeling_llama",
            "transformers.models.gpt2.modeling_gpt2",
        ),
        *(
            f"grpo_lit.cli.{command}"
            for command in ("check", "compare", "evaluate", "export", "generate", "sent", "train", "tune")
        ),
    ):
        importlib.import_module(name)
    from grpo_lit.cli import main

    threads = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ["this one"]
    if len(threads) > 1:
        sys.exit("a fork of a process with several threads may hang")
    wanted = serve()
    sys.exit(0 if wanted is None else main(wanted))
