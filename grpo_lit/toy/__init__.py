"""Policies small enough to know the truth about: every completion can be enumerated.

They train through the same `grpo_lit.loss` functions as a language model does.
"""

from __future__ import annotations

from grpo_lit.toy.echo import EchoPolicy, EchoRollout
from grpo_lit.toy.length import LengthPolicy, LengthRow, length_tradeoff
from grpo_lit.toy.train import ToyRun, train_toy

__all__ = [
    "EchoPolicy",
    "EchoRollout",
    "LengthPolicy",
    "LengthRow",
    "ToyRun",
    "length_tradeoff",
    "train_toy",
]
