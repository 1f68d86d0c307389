"""Eight fixed prompts with one-token answers: a task whose success probability can be computed exactly."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_lit.errors import UserError

# The prompts of KartikVashishta/grpo.cpp, apps/04_gpt2_grpo.cu, with their answers as GPT-2 spells them.
ONE_TOKEN_ANSWERS = {
    "The capital of France is": " Paris",
    "The color of the sky is": " blue",
    "The opposite of hot is": " cold",
    "Two plus two is": " four",
    "The first month is": " January",
    "The largest planet is": " Jupiter",
    "The day after Monday is": " Tuesday",
    "Water freezes at": " zero",
}


def one_token_rows(count: int = 8, numbers: Sequence[int] | None = None) -> list[dict[str, str]]:
    """Prompts with their answers, leading space included.

    Args:
        count: that many of the first.
        numbers: these instead, counted from 0.

    Raises:
        UserError: there is no such prompt.

    >>> one_token_rows(1)
    [{'question': 'The capital of France is', 'answer': ' Paris'}]
    >>> [row["answer"] for row in one_token_rows(numbers=[4, 7])]
    [' January', ' zero']
    """
    pairs = list(ONE_TOKEN_ANSWERS.items())
    if numbers is not None and not set(numbers) <= set(range(len(pairs))):
        raise UserError("data.dataset_options.numbers", list(numbers), f"numbers from 0 to {len(pairs) - 1}")
    chosen = pairs[:count] if numbers is None else [pairs[number] for number in numbers]
    return [{"question": question, "answer": answer} for question, answer in chosen]
