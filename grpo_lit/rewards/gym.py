"""Verdicts of reasoning-gym's own scorers; see `grpo_lit.datamodules.gym`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from grpo_lit.errors import SystemFault
from grpo_lit.rewards.extract import final_answer

Scorer = Callable[[str | None, dict[str, Any]], float]


@lru_cache(maxsize=256)
def _scorer(task: str) -> Scorer:
    try:
        from reasoning_gym import get_score_answer_fn
    except ImportError as error:
        raise SystemFault("the reward gym_score needs the package: pip install 'grpo-lit[gym]'") from error
    scorer: Scorer = get_score_answer_fn(task)
    return scorer


def gym_score(
    prompts: Sequence[str], completions: Sequence[str], task: Sequence[str], entry: Sequence[dict[str, Any]]
) -> list[float]:
    """The task's own score of the final answer, from 0 to 1: some tasks give part of a point.

    The final answer is found as for `verify_math`; where there is none the score is 0. Columns ``task`` and ``entry``,
    as the dataset ``reasoning_gym`` has them.
    """
    scores = []
    for text, name, row in zip(completions, task, entry, strict=True):
        answer = final_answer(text).text
        scores.append(0.0 if answer is None else float(_scorer(name)(answer, row)))
    return scores
