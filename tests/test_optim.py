from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_lit.optim import allocate_moments


def bitsandbytes_optimizer(name: str) -> Any:
    return getattr(pytest.importorskip("bitsandbytes").optim, name)


OPTIMIZERS = ["torch.Adam", "torch.AdamW", "AdamW", "AdamW8bit", "PagedAdamW8bit"]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    states = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in states if isinstance(value, Tensor))


def steps(name: str, allocate: bool) -> tuple[Tensor, int]:
    kind = getattr(torch.optim, name[6:]) if name.startswith("torch.") else bitsandbytes_optimizer(name)
    torch.manual_seed(0)
    large, small = nn.Parameter(torch.randn(64, 256)), nn.Parameter(torch.randn(10))
    optimizer = kind([large, small], lr=1e-2, weight_decay=0.1)
    size = 0
    if allocate:
        before = large.detach().clone()
        assert allocate_moments(optimizer)
        assert torch.equal(large, before)
        assert large.grad is None
        assert optimizer.param_groups[0]["lr"] == 1e-2
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
        size = state_bytes(optimizer)
    for _ in range(3):
        for parameter in (large, small):
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    if allocate:
        assert state_bytes(optimizer) == size  # the first step allocated nothing
    return torch.cat([large.detach().flatten(), small.detach()]), size


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_made_up_front_change_no_step(name: str) -> None:
    expected, _ = steps(name, allocate=False)
    found, size = steps(name, allocate=True)
    assert torch.equal(found, expected)
    weights = 64 * 256 + 10
    assert size >= (2 if "8bit" in name else 8) * weights
    assert size <= (2.3 if "8bit" in name else 8.1) * weights


def test_other_optimizers_stay_as_they_are() -> None:
    parameter = nn.Parameter(torch.ones(3))
    momentum = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    assert not allocate_moments(momentum)
    assert not momentum.state
    adam = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    adam.step()
    assert not allocate_moments(adam)  # it has begun
    assert int(adam.state[parameter]["step"]) == 1
