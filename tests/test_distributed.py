"""The one all-reduce, gathered rows and the weight hash, over two real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lit import distributed
from grpo_lit.cli.train import build
from grpo_lit.distributed import (
    bit_hash,
    check_parameter_hash,
    flat_all_reduce,
    gather_rows,
    parameter_hash,
    sum_over_ranks,
    world_size,
)
from grpo_lit.errors import UserError

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    root = WORKER.parents[1]
    command = [sys.executable, str(WORKER)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder)], cwd=root, env=_environment(root), stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def _environment(root: Path) -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}


def test_gradients_are_summed_in_place(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        first, second, third, fourth = found["summed"]
        assert torch.equal(first, 3 * torch.arange(6.0).view(2, 3))
        assert torch.equal(second, torch.full((4,), 3.0, dtype=torch.bfloat16))
        assert torch.equal(third, torch.tensor([7.0]))  # missing on rank 0
        assert torch.equal(fourth, torch.zeros(5))  # missing everywhere


def test_totals_and_world_size(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["totals"] == [3.0, 30.0, 1.0]
        assert found["world_size"] == 2


def test_rows_are_gathered_in_rank_order_with_a_rank_that_has_none(ranks: list[dict[str, Any]]) -> None:
    rows = torch.tensor([[3.0, 3.0], [4.0, 4.0]])
    for found in ranks:
        assert torch.equal(found["gathered"], rows)
        assert found["ids"].tolist() == [0, 1, 0, 1, 2]
    assert ranks[0]["own"].shape == (0, 2)
    assert torch.equal(ranks[1]["own"], rows)


def test_one_differing_bit_stops_every_rank_with_one_line(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["hash"] == ranks[1]["hash"]
    for found in ranks:
        message = found["fault"]
        assert "step 17" in message
        assert "ranks [0]" in message
        assert "ranks [1]" in message
        assert ranks[0]["hash"] in message  # rank 0 holds the unchanged weights
        assert "\n" not in message


def test_one_process_needs_no_group() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([1.0, 2.0])
    flat_all_reduce([param])
    assert param.grad.tolist() == [1.0, 2.0]
    assert world_size() == 1
    assert sum_over_ranks(2, torch.tensor(3)) == [2.0, 3.0]
    rows, mine = gather_rows(torch.arange(3))
    assert rows[mine].tolist() == [0, 1, 2]
    assert check_parameter_hash([param], step=0) == parameter_hash([param])


def test_hash_sees_bits_order_shape_and_dtype() -> None:
    weights = [torch.arange(6.0), torch.ones(2)]
    base = parameter_hash(weights)
    assert base == parameter_hash([weights[0].clone(), weights[1].clone()])
    assert len(base) == 16
    changed = weights[0].clone()
    changed[5] = torch.nextafter(changed[5], torch.tensor(9.0))
    variants = [
        [changed, weights[1]],
        [weights[1], weights[0]],
        [weights[0].view(2, 3), weights[1]],
        [weights[0].double(), weights[1]],
        [weights[0], -weights[1]],
        [weights[0]],
    ]
    assert len({base, *(parameter_hash(variant) for variant in variants)}) == 7
    assert parameter_hash([torch.zeros(1)]) != parameter_hash([-torch.zeros(1)])


def test_hash_of_a_strided_view_is_that_of_its_values() -> None:
    matrix = torch.arange(6.0).view(2, 3)
    assert parameter_hash([matrix.T]) == parameter_hash([matrix.T.contiguous()])


def test_hash_takes_every_dtype() -> None:
    digests = {parameter_hash([torch.ones(4).to(dtype)]) for dtype in (torch.bfloat16, torch.float16, torch.int8)}
    assert len(digests) == 3


def splitmix64(state: int) -> int:
    """The finalizer as published, in Python's integers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % 2**64
    return state ^ (state >> 31)


def test_bit_hash_is_the_sum_that_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(5, 3), torch.randn(7).bfloat16(), torch.tensor([-1, 2**31 - 1, -(2**31)], dtype=torch.int32)]
    words = [int(word) for tensor in tensors[::2] for word in tensor.reshape(-1).view(torch.int32)]
    padded = torch.cat([tensors[1], tensors[1].new_zeros(1)]).view(torch.int32).tolist()
    words[15:15] = padded
    golden = 0x9E3779B97F4A7C15
    expected = sum(splitmix64((word + (place + 1) * golden) % 2**64) for place, word in enumerate(words)) % 2**64
    assert bit_hash(tensors) % 2**64 == expected
    monkeypatch.setattr(distributed, "_CHUNK", 4)
    assert bit_hash(tensors) % 2**64 == expected, "however it is cut into chunks"


def test_bit_hash_sees_every_bit_and_the_order() -> None:
    weights = torch.arange(64.0)
    seen = {bit_hash([weights]), bit_hash([weights.flip(0)]), bit_hash([weights[:63]]), bit_hash([-weights])}
    for place in range(64):
        for bit in (0, 9, 22, 30, 31):
            changed = weights.clone()
            changed.view(torch.int32)[place] ^= -(2**31) if bit == 31 else 1 << bit
            seen.add(bit_hash([changed]))
    assert len(seen) == 4 + 64 * 5
    assert bit_hash([weights[:32], weights[32:]]) == bit_hash([weights])


@pytest.mark.parametrize(
    ("started", "devices", "nodes"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "0"}, 3, 1),
        (
            {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "train", "SLURM_NTASKS_PER_NODE": "2", "SLURM_LOCALID": "0"}
            | {"SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"},
            1,
            2,
        ),
    ],
    ids=["torchrun", "slurm"],
)
def test_other_devices_than_the_launcher_started_are_refused(
    started: dict[str, str], devices: int, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    arguments = [f"--trainer.devices={devices}", f"--trainer.num_nodes={nodes}", "--trainer.accelerator=cpu"]
    with pytest.raises(UserError, match="what the launcher started"):
        build("fit", ["--config=quickstart", "--trainer.strategy=ddp", *arguments])
