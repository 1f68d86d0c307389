"""What SymPy decides, in this process: the worker runs the same code where it can be killed."""

from __future__ import annotations

import pytest

from grpo_lit.rewards.algebra import TooLarge
from grpo_lit.rewards.symbolic import SymbolicOracle, Unreadable, judge, parse

ORACLE = SymbolicOracle()


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        (r"\sin(x)^2+\cos(x)^2", "1", True),
        (r"\sin(x)^2-\cos(x)^2", "1", False),
        (r"\sin(2x)", r"2\sin(x)\cos(x)", True),
        (r"\sqrt{\frac{1}{n}}", r"\frac{1}{\sqrt{n}}", True),
        ("|x|", "x", False),  # equal at positive points alone
        (r"\ln(x^2)", r"2\ln(x)", True),  # where both are real
        (r"e^{i\pi}", "-1", True),
        (r"\sum_{k=1}^{n} k", r"\frac{n(n+1)}{2}", True),
        (r"\sum_{k=1}^{n} k", r"\frac{n(n-1)}{2}", False),
        (r"\int_0^1 x^2 dx", r"\frac13", True),
        (r"\int_0^1 x^2 dx", r"\frac14", False),
        (r"\cos((n+1)\pi)", "-(-1)^n", True),  # at whole numbers
        (r"\sin\frac{\pi}{3}", r"\frac{\sqrt3}{2}", True),
        (r"\sin\frac{\pi}{3}", "0.86602540378", True),  # to the last digit given
        (r"\sin\frac{\pi}{3}", "0.86602540388", False),
        (r"\frac{10^{400}}{\pi}", r"\frac{10^{400}}{\pi}+1", False),  # infinite in floats, so unlike anything
    ],
)
def test_values(gold: str, answer: str, same: bool) -> None:
    assert ORACLE.equal(gold, answer) is same
    assert ORACLE.equal(answer, gold) is same


def test_no_value_is_no_verdict() -> None:
    assert ORACLE.equal(r"f(x)\sin x", r"f(x)\sin x + 1") is None, "of a function that nobody defined"
    assert ORACLE.equal(r"\sin(", "1") is None
    assert ORACLE.ratio(r"\sin(", "1") is None
    with pytest.raises(Unreadable):
        parse(r"\sin(")


@pytest.mark.parametrize(
    ("gold", "answer", "sign"),
    [
        (r"2\sin x", r"\sin x", 1),
        (r"-\frac{1}{3}\sin x", r"\sin x", -1),
        (r"\sin x", r"\cos x", 0),
        (r"i\sin x", r"\sin x", 0),  # by no real constant
    ],
)
def test_ratio(gold: str, answer: str, sign: int) -> None:
    assert ORACLE.ratio(gold, answer) == sign


@pytest.mark.parametrize(
    ("gold", "answer", "verdict", "reason"),
    [
        (r"\tan x", r"\frac{\sin x}{\cos x}", True, "the values agree"),
        (r"\tan x", r"\cot x", False, "the values differ"),
        (r"\sin x", r"\sin(", None, "the answer can't be read as mathematics"),
        (r"\sin(", r"\sin x", None, "the gold answer can't be read"),
    ],
)
def test_judge_says_why(gold: str, answer: str, verdict: bool | None, reason: str) -> None:
    found, why = judge(gold, answer)
    assert found is verdict
    assert why.startswith(reason)


def test_endless_sums_are_refused() -> None:
    with pytest.raises(TooLarge, match="a sum or product of"):
        ORACLE.equal(r"\sum_{k=1}^{900}\sum_{j=1}^{900} \sin(jk)", "1")
