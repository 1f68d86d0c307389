"""Arithmetic problems with exact answers: every one there is, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from grpo_lit.errors import UserError

OPERATORS = "+-*"
MAX_TERMS = 20
MAX_ROWS = 1_000_000


def arithmetic_rows(terms: int = 2, operators: str = "+", low: int = 0, high: int = 9) -> list[dict[str, str]]:
    """Every arithmetic problem with the given number of terms, each with its right answer.

    The question is the bare expression; a prompt template adds the rest, such as ``{question}=``. Nothing is
    drawn at random: the numbers count up like an odometer, and for each the operators do.

    >>> rows = arithmetic_rows(terms=3)
    >>> len(rows), rows[345]
    (1000, {'question': '3+4+5', 'answer': '12'})

    Args:
        terms: numbers in a problem, 1 to 20.
        operators: characters out of ``+-*``; every gap between two numbers takes each of them. Multiplication
            binds first, the rest goes from left to right.
        low: smallest number, at least 0, so that no sign meets an operator.
        high: largest number.

    Returns:
        One row per distinct problem: ``question`` ("3+4+5") and ``answer`` ("12").

    Raises:
        UserError: an argument is out of range, or there would be more than a million problems.
    """
    _check(terms, operators, low, high)
    rows = []
    for numbers in product(range(low, high + 1), repeat=terms):
        for gaps in product(operators, repeat=terms - 1):
            tail = "".join(f"{operator}{number}" for operator, number in zip(gaps, numbers[1:], strict=True))
            rows.append({"question": f"{numbers[0]}{tail}", "answer": str(_value(numbers, gaps))})
    return rows


def _value(numbers: Sequence[int], gaps: Sequence[str]) -> int:
    """The value of an expression, as a sum of signed products."""
    products: list[list[int]] = [[numbers[0]]]
    for operator, number in zip(gaps, numbers[1:], strict=True):
        if operator == "*":
            products[-1].append(number)
        else:
            products.append([number if operator == "+" else -number])
    return sum(prod(factors) for factors in products)


def _check(terms: int, operators: str, low: int, high: int) -> None:
    if not 1 <= terms <= MAX_TERMS:
        raise UserError("data.dataset_options.terms", terms, f"a whole number from 1 to {MAX_TERMS}")
    if not operators or set(operators) - set(OPERATORS) or len(set(operators)) < len(operators):
        accepted = f"different characters out of {OPERATORS}"
        raise UserError("data.dataset_options.operators", operators, accepted)
    if low < 0:
        raise UserError("data.dataset_options.low", low, "a whole number of at least 0")
    if high < low:
        raise UserError("data.dataset_options.high", high, f"a whole number of at least low={low}")
    num_rows = (high - low + 1) ** terms * len(operators) ** (terms - 1)
    if num_rows > MAX_ROWS:
        raise UserError("data.dataset_options.terms", terms, f"at most {MAX_ROWS} rows, not {num_rows}")
