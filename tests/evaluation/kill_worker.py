"""Kill an evaluation at random points, then let it end: `python kill_worker.py RUN OUTPUT NUMBER`.

The libraries are imported once; each attempt is a forked child that runs the real command and is killed with SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from grpo_lit.cli import main
from grpo_lit.cli.evaluate import main as _preload  # noqa: F401


def size_of(file: Path) -> int:
    """Bytes written so far."""
    return file.stat().st_size if file.exists() else 0


def attempt(run: str, output: str, kill: tuple[Path, int, float] | None) -> int:
    """One run of the command in a child; its exit status, negative where it was killed.

    A kill comes so many seconds after a file has got longer by so many bytes: by the work done, not by the clock, which
    says little where other programs run too.
    """
    before = size_of(kill[0]) if kill else 0
    child = os.fork()
    if child == 0:
        common = ["--samples=3", "--limit=7", "--batch_size=6", "--temperature=1.0", "--top_p=1.0", "--device=cpu"]
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os._exit(main(["evaluate", f"--run={run}", f"--output={output}", "--cpu_threads=1", *common]))
    if kill is not None:
        file, growth, delay = kill
        while size_of(file) - before < growth:
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.001)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    run, output, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    file = Path(output) / "verdicts.jsonl"
    generator = random.Random(7)
    kills: list[int] = []
    finished = 0
    while len(kills) < wanted:
        status = attempt(run, output, (file, generator.randrange(900), generator.uniform(0, 0.05)))
        if status == 0:  # complete already: a result to compare as well, and the next kills hit a new one
            finished += 1
            Path(output).rename(f"{output}.{finished}")
            continue
        kills.append(size_of(file))
    assert attempt(run, output, None) == 0
    print(json.dumps(kills))
