"""Learning-rate schedules, as a factor of the base rate, and the optimizer's memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from grpo_lit.errors import UserError


@dataclass
class LRScheduleConfig:
    """How the learning rate moves over the optimizer steps."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine fall to the floor, which they reach after the last optimizer step."""
    warmup_steps: int = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    floor: float = 0.0
    """Smallest factor of the base rate, in [0, 1]."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise UserError("model.lr_schedule.warmup_steps", self.warmup_steps, "0 or more optimizer steps")
        if not 0 <= self.floor <= 1:
            raise UserError("model.lr_schedule.floor", self.floor, "a number in [0, 1]")


def lr_factor(config: LRScheduleConfig, step: int, total_steps: int) -> float:
    """Factor of the base learning rate for the optimizer step numbered `step` from 0.

    Args:
        config: the shape.
        step: optimizer steps done before.
        total_steps: optimizer steps of the whole run.

    >>> lr_factor(LRScheduleConfig("linear", warmup_steps=2), 0, 10), lr_factor(LRScheduleConfig("linear"), 5, 10)
    (0.5, 0.5)
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.name == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    shape = 1 - progress if config.name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.floor + (1 - config.floor) * shape


def build_scheduler(optimizer: Optimizer, config: LRScheduleConfig, total_steps: int) -> LambdaLR:
    """The schedule over an optimizer; step it once after every optimizer step."""
    return LambdaLR(optimizer, lambda step: lr_factor(config, step, total_steps))


def allocate_moments(optimizer: Optimizer) -> bool:
    """Allocate Adam's moments now, so that the first step can't be the one that runs out of memory.

    A step with zero gradients at rate 0 leaves every weight as it is and makes the state, which is then set back to
    step 0: what the first real step would have made. It works for torch's Adam and AdamW and for bitsandbytes'
    8-bit and paged ones, whose state has other names.

    Args:
        optimizer: fresh, with no state yet.

    Returns:
        Whether it was done; other optimizers, such as SGD with momentum, start differently and stay as they are.
    """
    if optimizer.state or not _is_adam(optimizer):
        return False
    before = [{name: group[name] for name in ("lr", "weight_decay")} for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        group["weight_decay"] = 0.0  # Adam adds it to the gradient, which has to be 0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
        step = optimizer.state[parameter].get("step")
        if isinstance(step, torch.Tensor):
            step.zero_()
        elif step is not None:
            optimizer.state[parameter]["step"] = 0
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update(values)
    return True


def _is_adam(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return True
    kind = type(optimizer)
    return kind.__module__.startswith("bitsandbytes.") and "Adam" in kind.__name__
