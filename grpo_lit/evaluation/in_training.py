"""Evaluation of the weights in training: every rank answers its share, all ranks learn the whole result."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_lit.errors import SystemFault
from grpo_lit.evaluation.config import EvaluateConfig
from grpo_lit.evaluation.runner import Cell, cells_of, run_cell
from grpo_lit.evaluation.store import MemoryStore, Record, ResultStore
from grpo_lit.evaluation.summary import Summary, summarise, write_tables
from grpo_lit.evaluation.tasks import Task
from grpo_lit.rollout import RolloutEngine

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule

MODEL = "policy"
"""Name of the weights in training in the results."""
HEARTBEAT_S = 2.0
"""Ranks that wait for a child process meet this often, so that no collective waits long enough to time out."""


def evaluate_here(
    module: GRPOModule, config: EvaluateConfig, tasks: Sequence[Task], engine: RolloutEngine, folder: Path
) -> Summary:
    """Answer with an engine of this process; each rank takes every size-th problem.

    Args:
        module: its world shares the work, its encoder renders the prompts.
        config: protocols, samples, seed.
        tasks: datasets.
        engine: over the live weights.
        folder: where rank 0 writes the results.

    Returns:
        The summary, the same on every rank.

    Raises:
        SystemFault: on every rank, if any of them failed.
    """
    world = module.world
    store = MemoryStore()
    failure: str | None = None
    try:
        for task in tasks:
            share = replace(task, rows=[task.rows[i] for i in world.share(len(task.rows))])
            for cell in cells_of(config, MODEL, [share]):
                run_cell(cell, engine, module.encoder, store, batch_size=config.batch_size, seed=config.seed)
        engine.release()
    except Exception as error:  # told to all ranks below: one that raised alone would leave the others waiting
        failure = f"rank {world.rank}: {type(error).__name__}: {error}"
    own = (failure, store.generations.records, store.verdicts.records, store.timings.records)
    everyone = world.gather(own)
    if failures := [rank[0] for rank in everyone if rank[0] is not None]:
        raise SystemFault(f"the evaluation failed: {'; '.join(failures)}")
    cells = cells_of(config, MODEL, tasks)
    whole = MemoryStore()
    whole.generations.records = _in_order(cells, [record for rank in everyone for record in rank[1]])
    whole.verdicts.records = _in_order(cells, [record for rank in everyone for record in rank[2]])
    whole.timings.records = [record for rank in everyone for record in rank[3]]
    summary = summarise(cells, whole, confidence=config.confidence, seed=config.seed)
    if world.rank == 0:
        write_results(folder, whole, summary)
    return summary


def _in_order(cells: Sequence[Cell], records: list[Record]) -> list[Record]:
    places = {key: place for place, key in enumerate(key for cell in cells for key in cell.sample_keys())}
    names = ("model", "dataset", "protocol", "example", "sample")
    return sorted(records, key=lambda record: places[tuple(record[name] for name in names)])  # type: ignore[index]


def write_results(folder: Path, results: MemoryStore, summary: Summary) -> None:
    """Write generations, verdicts, timings and tables."""
    store = ResultStore(folder)
    with store.opened():
        for lines, own in (
            (store.generations, results.generations),
            (store.verdicts, results.verdicts),
            (store.timings, results.timings),
        ):
            lines.path.unlink(missing_ok=True)  # of an attempt that was cut off
            lines.append(own.records)
        write_tables(summary, folder)


def evaluate_in_child(module: GRPOModule, command: Sequence[str], log: Path, timeout_s: float) -> None:
    """Run a command on rank 0 while the others wait for it without a collective that could time out.

    Raises:
        SystemFault: on every rank, if the command fails or takes too long.
    """
    world = module.world
    process, start = None, time.monotonic()
    if world.rank == 0:
        log.parent.mkdir(parents=True, exist_ok=True)
        root = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_child_environment(path),
                start_new_session=True,  # Ctrl-C in a terminal lets the step be finished, and this is part of it
            )
    status: int | str | None = None
    try:
        while status is None:
            if process is not None:
                status = _poll(process, HEARTBEAT_S if world.size > 1 else timeout_s)
                if status is None and time.monotonic() - start > timeout_s:
                    status = f"took longer than {timeout_s:g} s"
            status = world.gather(status)[0]
    finally:
        if process is not None:
            process.kill()  # nothing where it has ended
            process.wait()
    if status != 0:
        reason = status if isinstance(status, str) else f"exit code {status}"
        raise SystemFault(f"the evaluation's process failed ({reason}): {_last_line(log)}; see {log}")


def _child_environment(path: str) -> dict[str, str]:
    """The environment without what makes a process think it is a rank of the training."""
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    return {name: value for name, value in os.environ.items() if name not in ranks} | {"PYTHONPATH": path}


def _poll(process: subprocess.Popen[bytes], wait_s: float) -> int | None:
    try:
        return process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return None


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return lines[-1][-300:] if lines else "it printed nothing"


def child_command(python: str | None, settings: dict[str, Any]) -> list[str]:
    """``grpo-lit evaluate`` with settings, in this interpreter or another."""
    import json

    options = [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]
    return [python or sys.executable, "-m", "grpo_lit", "evaluate", *options]
