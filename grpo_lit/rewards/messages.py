"""Reward functions that were written for chat completions, as TRL hands them over."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from grpo_lit.rewards.functions import RewardFunction


def from_messages(function: Callable[..., Any]) -> RewardFunction:
    """A reward function that reads ``completion[0]["content"]``, for texts.

    TRL gives a reward function texts where the prompts of a dataset are texts, and lists of messages where they are
    chats. Here both are texts, prompts rendered; this wraps them the way the second kind expects.

    Args:
        function: takes ``completions`` as lists of one assistant message, ``prompts`` as lists of one user message,
            and columns by name.

    >>> def length(completions, **kwargs):
    ...     return [len(completion[0]["content"]) for completion in completions]
    >>> from_messages(length)(prompts=["1+1"], completions=["two"])
    [3]
    """

    @functools.wraps(function)
    def of_texts(**arguments: Any) -> Any:
        for name, role in (("prompts", "user"), ("completions", "assistant")):
            if name in arguments:
                arguments[name] = _messages(arguments[name], role)
        return function(**arguments)

    return of_texts


def _messages(texts: Sequence[str], role: str) -> list[list[dict[str, str]]]:
    return [[{"role": role, "content": text}] for text in texts]
