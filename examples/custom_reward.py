"""A reward function takes lists and returns a number for each completion, or None to abstain.

Columns of the dataset arrive by name: ask for those you need.
"""

from __future__ import annotations

from typing import Any

from grpo_lit.rewards import verify_math


def right_and_short(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    """1 for a right answer, less 0.01 for each character after the tenth."""
    return [
        float(verify_math(text, gold).correct) - 0.01 * max(len(text) - 10, 0)
        for text, gold in zip(completions, answer, strict=True)
    ]
