"""Verdicts on the samples of one problem, and the equivalence classes in which their answers vote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_lit.datamodules.readers import Row
from grpo_lit.rewards import compute_rewards, default_pool, resolve_reward
from grpo_lit.rewards.functions import gold_text

RIGHT_CLASS = 0
"""Class of the answers that equal the gold answer."""


@dataclass(frozen=True)
class SampleVerdict:
    """What became of one sample."""

    correct: bool
    kind: str
    """correct, wrong, unparsable, timeout or crashed."""
    extracted: str | None
    answer_class: int | None
    """0 for the right answer, 1, 2, ... for wrong ones as they come; None where it does not vote."""
    formatted: bool | None
    """Whether the format is kept; None where none is asked for."""


def judge_samples(
    completions: Sequence[str],
    prompt: str,
    row: Row,
    *,
    judge: str,
    format_judge: str | None,
    timeout_s: float | None = None,
) -> list[SampleVerdict]:
    """Judge all samples of a problem.

    Args:
        completions: (n) texts, with the tail that the template prefilled.
        prompt: rendered prompt.
        row: the dataset's row; ``answer`` is the gold answer.
        judge: reward function; above 0.5 is right.
        format_judge: reward function of the format, or None.
        timeout_s: longest time for one of them, if it isn't built in.

    Raises:
        RewardError: one of them failed or took longer.
    """
    if judge == "math_accuracy":
        verdicts = default_pool().verify_many(list(completions), [gold_text(row["answer"]) or ""] * len(completions))
        kinds, answers = [v.kind for v in verdicts], [v.extracted for v in verdicts]
        same: Callable[[str, str], bool] = default_pool().same
    else:
        rewards = _rewards(judge, completions, prompt, row, timeout_s)
        kinds = ["correct" if reward > 0.5 else "wrong" for reward in rewards]
        answers, same = [text.strip() for text in completions], _equal_text
    classes = answer_classes(kinds, answers, same)
    formats: list[bool | None] = [None] * len(completions)
    if format_judge is not None:
        formats = [reward > 0.5 for reward in _rewards(format_judge, completions, prompt, row, timeout_s)]
    return [
        SampleVerdict(kind == "correct", kind, answer, group, kept)
        for kind, answer, group, kept in zip(kinds, answers, classes, formats, strict=True)
    ]


def answer_classes(
    kinds: Sequence[str], answers: Sequence[str | None], same: Callable[[str, str], bool]
) -> list[int | None]:
    """The class in which each sample votes.

    >>> answer_classes(["wrong", "correct", "unparsable", "wrong"], ["1/2", "3", None, "0.5"], lambda a, b: True)
    [1, 0, None, 1]
    """
    firsts: list[str] = []
    known: dict[str, int] = {}
    classes: list[int | None] = []
    for kind, answer in zip(kinds, answers, strict=True):
        if kind == "correct":
            classes.append(RIGHT_CLASS)
        elif kind != "wrong" or answer is None:
            classes.append(None)
        else:
            if answer not in known:
                found = next((i for i, first in enumerate(firsts) if same(first, answer)), len(firsts))
                if found == len(firsts):
                    firsts.append(answer)
                known[answer] = found + 1
            classes.append(known[answer])
    return classes


def _equal_text(first: str, second: str) -> bool:
    return first == second


def _rewards(name: str, completions: Sequence[str], prompt: str, row: Row, timeout_s: float | None) -> list[float]:
    columns: dict[str, Any] = {key: [value] * len(completions) for key, value in row.items() if key != "index"}
    prompts = [prompt] * len(completions)
    output = compute_rewards([resolve_reward(name)], prompts, list(completions), columns, timeout_s=timeout_s)
    return [float(value) for value in output.rewards.nan_to_num(0.0)]
