"""Arithmetic rows: all of them, each once, in a fixed order, with the right answer."""

from __future__ import annotations

import pytest

from grpo_lit.datamodules.arithmetic import arithmetic_rows
from grpo_lit.errors import UserError


def test_two_terms_are_the_hundred_sums_in_order() -> None:
    rows = arithmetic_rows()
    assert [row["question"] for row in rows] == [f"{a}+{b}" for a in range(10) for b in range(10)]
    assert [row["answer"] for row in rows] == [str(a + b) for a in range(10) for b in range(10)]


def test_three_terms_are_the_thousand_sums_of_the_quick_start() -> None:
    rows = arithmetic_rows(terms=3)
    expected = [
        {"question": f"{a}+{b}+{c}", "answer": str(a + b + c)} for a in range(10) for b in range(10) for c in range(10)
    ]
    assert rows == expected


@pytest.mark.parametrize("operators", ["+", "-", "*", "+-", "+-*", "*+"])
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_answers_are_what_python_computes_and_questions_are_distinct(terms: int, operators: str) -> None:
    rows = arithmetic_rows(terms, operators, low=0, high=4)
    assert len(rows) == 5**terms * len(operators) ** (terms - 1)
    assert len({row["question"] for row in rows}) == len(rows)
    for row in rows:
        assert row["answer"] == str(eval(row["question"]))


def test_range_is_inclusive_and_may_have_several_digits() -> None:
    rows = arithmetic_rows(2, "-", low=98, high=101)
    assert len(rows) == 16
    assert rows[3] == {"question": "98-101", "answer": "-3"}


def test_every_call_gives_rows_of_its_own() -> None:
    rows = arithmetic_rows()
    rows[0]["answer"] = "changed"
    assert arithmetic_rows()[0] == {"question": "0+0", "answer": "0"}


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"terms": 0}, "terms"),
        ({"terms": -1}, "terms"),
        ({"operators": ""}, "operators"),
        ({"operators": "/"}, "operators"),
        ({"operators": "++"}, "operators"),
        ({"low": -1}, "low"),
        ({"low": 5, "high": 4}, "high"),
        ({"terms": 7}, "terms"),
        ({"terms": 10**9}, "terms"),
    ],
)
def test_bad_options_name_the_argument_and_the_value(options: dict[str, object], argument: str) -> None:
    with pytest.raises(UserError) as caught:
        arithmetic_rows(**options)  # type: ignore[arg-type]
    assert caught.value.argument == f"data.dataset_options.{argument}"
    assert caught.value.value == options[argument]
