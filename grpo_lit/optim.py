"""Learning-rate schedules, as a factor of the base rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from grpo_lit.errors import UserError


@dataclass
class LRScheduleConfig:
    """How the learning rate moves over the optimizer steps."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine fall to the floor at the last optimizer step."""
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
