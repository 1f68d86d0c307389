"""Two processes make the update of one, however the groups and the micro-batches lie."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lit.cli import main
from grpo_lit.toy.cli import toy_sharded
from grpo_lit.toy.distributed import local_counts
from grpo_lit.toy.echo import EchoRollout
from grpo_lit.toy.train import update

WORKER = Path(__file__).with_name("sharded_worker.py")
_spec = importlib.util.spec_from_file_location("sharded_worker", WORKER)
assert _spec is not None
assert _spec.loader is not None
worker = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(worker)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    root = WORKER.parents[2]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), "2", str(folder)],
            cwd=root,
            env=environment,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", worker.CASES, ids=lambda case: "-".join(case))
def test_two_processes_equal_one(case: tuple[str, str, str], ranks: list[dict[Any, Any]]) -> None:
    reduction, layout, counts = case
    (rows_0, weights_0, hash_0), (rows_1, weights_1, hash_1) = (found[case] for found in ranks)
    assert hash_0 == hash_1
    assert torch.equal(weights_0, weights_1)
    whole = EchoRollout(*(torch.cat([first, second]) for first, second in zip(rows_0, rows_1, strict=True)))
    assert whole.group_ids.bincount().tolist() == worker.COUNTS[counts]
    if layout == "split":
        assert set(rows_0[3].tolist()) & set(rows_1[3].tolist()) == {0, 1, 2}
    else:
        assert not set(rows_0[3].tolist()) & set(rows_1[3].tolist())
    assert len(rows_0[0]) / 2 != len(rows_1[0]) / 5  # uneven numbers of micro-batches
    policy = worker.start_policy()
    start = policy.logits.detach().clone()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    update(policy, optimizer, whole, passes=3, config=worker.config_of(reduction))
    assert (policy.logits.detach() - weights_0).abs().max() < 1e-6
    assert (weights_0 - start).abs().max() > 1e-2


def test_shares_add_up() -> None:
    for layout in ("split", "whole"):
        for num_ranks in (1, 2, 3):
            shares = [local_counts([7, 4, 1], layout, rank, num_ranks) for rank in range(num_ranks)]
            assert [sum(column) for column in zip(*shares, strict=True)] == [7, 4, 1]
    assert local_counts([7, 4, 1], "split", 0, 2) == [4, 2, 1]
    assert local_counts([7, 4, 1], "whole", 1, 2) == [0, 4, 0]


def test_training_in_two_processes_learns(capsys: pytest.CaptureFixture[str]) -> None:
    (success,) = toy_sharded(seeds=(0,))
    assert success > 0.95
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if f"{success:.6f}" in line)
    assert line.count("yes") == 2  # greedy right, same on all ranks


def test_sharded_command_refuses_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["toy", "sharded", "--processes", "0"]) == 2
    assert "processes=0" in capsys.readouterr().err
