"""Several runs one after the other in the same processes: a test pays for starting two ranks once.

``python -m grpo_lit.testing.ranks FILE`` is one rank; `run_on_ranks` starts them all.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class RankResult(NamedTuple):
    """What a rank left behind."""

    codes: list[int]
    """Exit code of each run that it came to."""
    stderr: str
    """All of its error stream."""


def run_on_ranks(
    runs: Sequence[Sequence[str]], num_ranks: int, folder: Path, *, timeout: float = 120, as_nodes: bool = False
) -> list[RankResult]:
    """Run commands of ``grpo-lit`` in turn on every rank.

    Args:
        runs: arguments of each command, such as ``["fit", "--trainer.devices=2", "--trainer.strategy=ddp"]``.
        num_ranks: processes; with 1 there is no process group.
        folder: current folder of the processes; a module in it can be imported.
        timeout: seconds for everything; processes that still run are killed then.
        as_nodes: every rank is a node of one device (``trainer.num_nodes``); all of them take the first device.

    Returns:
        By rank. A rank ends after a run that failed, since the others may wait for it.
    """
    plan = folder / f"runs_on_{num_ranks}_ranks.json"
    plan.write_text(json.dumps([list(arguments) for arguments in runs]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(num_ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if num_ranks > 1:  # as Lightning's own launcher sets them for its children
            node, local = (rank, 0) if as_nodes else (0, rank)
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
            environment |= {"NODE_RANK": str(node), "LOCAL_RANK": str(local)}
        with (folder / f"rank_{rank}_of_{num_ranks}.txt").open("w") as errors:
            command = [sys.executable, "-m", "grpo_lit.testing.ranks", str(plan)]
            processes.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=errors)
            )
    try:
        for process in processes:
            process.wait(timeout=timeout)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_result(folder, rank, num_ranks, process.returncode) for rank, process in enumerate(processes)]


def _result(folder: Path, rank: int, num_ranks: int, last: int) -> RankResult:
    stderr = (folder / f"rank_{rank}_of_{num_ranks}.txt").read_text()
    done = [int(line.rpartition(" ")[2]) for line in stderr.splitlines() if line.startswith("ended with ")]
    return RankResult([*done, *([last] if last else [])], stderr)


def main(plan: str) -> int:
    """Run the commands of a plan; stop after one that fails, with its code."""
    from grpo_lit.cli import main as grpo_lit

    for arguments in json.loads(Path(plan).read_text()):
        try:
            code = grpo_lit(arguments)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        if code:
            return code
        print("ended with 0", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
