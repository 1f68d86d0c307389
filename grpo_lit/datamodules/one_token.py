"""Eight fixed prompts with one-token answers: a task whose success probability can be computed exactly."""

from __future__ import annotations

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


def one_token_rows(count: int = 8, start: int = 0) -> list[dict[str, str]]:
    """Of the prompts those from number `start`, at most `count`, with their answers, leading space included.

    >>> one_token_rows(1)
    [{'question': 'The capital of France is', 'answer': ' Paris'}]
    >>> [row["answer"] for row in one_token_rows(2, start=4)]
    [' January', ' Jupiter']
    """
    pairs = list(ONE_TOKEN_ANSWERS.items())[start : start + count]
    return [{"question": question, "answer": answer} for question, answer in pairs]
