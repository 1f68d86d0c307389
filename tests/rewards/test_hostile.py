"""Answers made to stall, to crash, or to slip through: judged quickly, and never right."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_lit.rewards import VerifierPool, final_answer, verify, verify_math
from grpo_lit.rewards.verify import READER_FAILED

TOWERS = [
    *("10" + "^{10" * n + "}" * n for n in range(2, 8)),
    *("(" * n + "10^{9}" + ")!" * n for n in range(1, 8)),
    *("2**30**5", "9**9**9**9", "9^9^9^9", "2^{2^{2^{2^{2^{2}}}}}", "99999999999!", "(10^{100})!", "3!!!!"),
    *("e^{e^{e^{e^{100}}}}", r"\sin(10^{10^{10}})", "x^{10^{10^{10}}}", r"\log(\log(10^{10^{10}}))", "5" + "!" * 50),
    *(r"\binom{10^9}{10^8}", r"\binom{1000000}{500000}", "1e999999", "9e99999", "1e-999999", r"\Gamma(10^{10})"),
    *(r"\sin(x^{(99x)^{99x}})", "x^{x^{x^{x^{x}}}}", r"\ln(\ln(\ln(10^{10^{100}})))", r"e^{x^{y^{z^{w}}}}", "((n!)!)!"),
    *(r"\log_{2}(\log_{3}(\log_{5}(7^{11^{13}})))", r"\tan(10^{300})", r"\lfloor 10^{400} \pi \rfloor"),
    *(rf"(x+1)^{{{n}}}" for n in (40, 100, 9999, 10**6)),
    *(rf"(x+y+z+w+v)^{{{n}}}" for n in (5, 20, 39)),
    *(rf"\sum_{{k=1}}^{{{n}}}\frac{{1}}{{k^k}}" for n in (10**3, 10**6, 10**9)),
    *(r"\prod_{k=1}^{10^9} k", r"\sum_{k=1}^{9999}\sum_{j=1}^{9999}\sin(k j x)", r"\sum_{n=1}^{\infty}\frac{1}{n!!}"),
    *(r"\int_0^1 \sin(\sin(\sin(\sin(x^{x^x})))) dx", r"\int_{0}^{\infty} e^{-x^{x}} dx"),
    *(rf"\sqrt[{n}]{{2}}" for n in (100, 10**9)),
    *(f"2^{{1/{n}}}" for n in (1000, 10**12)),
]
LONG = [
    *("1" * n for n in (500, 5000, 1_000_000)),
    *("0." + "3" * n for n in (10, 500, 300_000)),
    *("(" * n + "1" + ")" * n for n in (45, 200, 200_000)),
    *("{" * n + "1" + "}" * n for n in (100, 10_000)),
    *(r"\frac{1}{" * n + "2" + "}" * n for n in (20, 60, 1000)),
    *(r"\sqrt{" * n + "2" + "}" * n for n in (20, 60, 1000)),
    *(r"\sin(" * n + "x" + ")" * n for n in (15, 40, 100)),
    *(r"\log{" * n + "x" + "}" * n for n in (5, 15, 24)),
    *("x+" * n + "x" for n in (200, 5000)),
    *(r"\left(" * 10_000, r"\boxed{" * 100_000, r"\text{" * 1000, r"\begin{matrix}" + "1&" * 5000 + r"\end{matrix}"),
    *("1, " * 5000, "1 or " * 3000, "x=" * 3000, "<" * 3000, "a<" * 500 + "b", r"\cup" * 1000, r"\pm" * 1000),
    *(":" * 1000, "!" * 1000, "-" * 3000 + "6", "+-" * 1000 + "6", "\\" * 100_000, "$" * 100_000, r"\[" * 50_000),
    *("answer is " * 20_000, "####" * 50_000, "<think>" * 50_000, "**" * 50_000, "<answer>" * 50_000, " " * 1_000_000),
]
ODD = [
    *(
        "\x00\x01\x02",
        "\u202e6\u202c",
        "\u200b" * 100_000,
        "6\u0301",
        "٣",
        "６",
        "Ⅴ",
        "𝟓",
        "\ud7ff",
        r"\u0035",
        "6\x00",
        "\r\n",
    ),
    *(
        "",
        "   ",
        "{",
        "}",
        "\\",
        "\\\\",
        "$",
        "$$",
        r"\(",
        r"\[",
        "^",
        "_",
        "&",
        "#",
        "%",
        "~",
        r"\frac",
        r"\frac{",
        "=",
        "==",
    ),
    *(
        r"\frac{}{}",
        r"\sqrt",
        r"\begin{pmatrix}",
        r"\begin{cases}5\\6\end{cases}",
        "1=2=3",
        "0x10",
        "NaN",
        "inf",
        "-inf",
    ),
    *(
        "1/0",
        "0^0",
        "0/0",
        r"\infty-\infty",
        r"\frac{1}{0}",
        r"\log(0)",
        "i^i",
        "(-8)^{1/3}",
        "True",
        "None",
        "lambda: 1",
    ),
    *(
        "__import__('os').system('exit 1')",
        "exec('1')",
        "open('/etc/passwd')",
        "[].__class__",
        "{0}",
        r"\text{__import__('os')}",
    ),
    *(
        r"\input{/etc/passwd}",
        r"\def\x{\x\x}\x",
        r"\newcommand{\a}{1}\a",
        r"\cancel{5} 6",
        r"5 \text{ or } 6",
        "5 | 6",
        "5 6",
    ),
    *(
        "5?6",
        "5 vs 6",
        r"5 \to 6",
        r"\{5\}\cup\{6\}",
        r"5\\6",
        "5&6",
        "at least 5",
        "5 or so",
        "not 5",
        r"\neg 5",
        r"5 \pm 1",
    ),
]
# Guesses that cover several answers at once, or a right one that isn't the final answer.
HEDGED = [
    *(
        rf"5 {joint} 6"
        for joint in ("or", "and", ",", ";", r"\text{ or }", r"\lor", r"\vee", r"\quad", "to", r"\text{ to }")
    ),
    *(rf"5 \text{{ {words} }} 6" for words in ("but possibly", "or else", "otherwise", "and also", "unless it is")),
    *(
        "five or six",
        r"\text{5 or 6}",
        "5 or maybe six",
        "x=5 or x=6",
        "5/6",
        "5:6",
        "[5,6]",
        "(5,6)",
        r"\{5,6\}",
        "5...6",
    ),
]
HOSTILE = [*HEDGED, *TOWERS, *LONG, *ODD]


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool() as pool:
        yield pool


@pytest.mark.parametrize("gold", ["5", r"\sin x + \frac{1}{n}"])
def test_two_hundred_hostile_answers_within_a_minute(pool: VerifierPool, gold: str) -> None:
    assert len(HOSTILE) >= 200
    responses = [rf"So \boxed{{{answer}}}" for answer in HOSTILE]
    pool.verify(r"\boxed{\sin x}", r"\cos x")  # the worker is up
    start = time.perf_counter()
    verdicts = pool.verify_many(responses, [gold] * len(responses))
    seconds = time.perf_counter() - start
    right = [v.extracted for v in verdicts if v.correct]
    assert right == []
    assert seconds < 60
    assert not {v.kind for v in verdicts} & {"timeout", "crashed"}
    assert pool.verify(r"\boxed{2\sin x\cos x}", r"\sin 2x").correct


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_finding_the_answer_never_takes_long(answer: str) -> None:
    for response in (answer, rf"\boxed{{{answer}}}", f"The answer is {answer}", f"#### {answer}", f"<think>{answer}"):
        start = time.perf_counter()
        final_answer(response)
        assert time.perf_counter() - start < 1.0


def test_a_megabyte_of_text_is_read_from_its_end() -> None:
    response = "We compute on and on. " * 100_000 + r"\boxed{7}"
    start = time.perf_counter()
    assert verify_math(response, "7").correct
    assert time.perf_counter() - start < 1.0


def test_random_text_never_raises(pool: VerifierPool) -> None:
    pieces = [
        *"(){}[]^_=<>,;:!|$\\&%.-+/ \n12xn5A≈±≤∈→°√·",
        "yes",
        "cm",
        " or ",
        " and ",
        r"\frac{",
        r"\sqrt{",
        r"\text{",
        r"\boxed{",
    ]
    pieces += [r"\{", r"\}", r"\(", r"\)", r"\pm", r"\cup", r"\le ", r"\pi", r"\infty"]
    draw = random.Random(0)
    texts = ["".join(draw.choices(pieces, k=draw.randint(1, 25))) for _ in range(600)]
    golds = [draw.choice(["5", "x+1", "(1,2)", r"\{1,2\}", "[0,1)", "x=5", "x>2", "A", "yes", "1:2"]) for _ in texts]
    verdicts = pool.verify_many([rf"\boxed{{{text}}}" for text in texts], golds, timeout_s=2.0)
    assert {v.kind for v in verdicts} <= {"correct", "wrong", "unparsable"}
    assert not [v for v in verdicts if v.reason.startswith(READER_FAILED)]


@pytest.mark.parametrize("sign", ["≈", r"\approx", *"~=±<→:∈%$°^_·√"])
def test_an_answer_cut_after_a_sign_is_read(pool: VerifierPool, sign: str) -> None:
    for text in (f"{sign} ", f"3 {sign} ", f"x {sign} {sign}", rf"\boxed{{{sign} }}", f"The answer is {sign}"):
        verdict = pool.verify(text, "8")
        assert not verdict.correct
        assert not verdict.reason.startswith(READER_FAILED), (text, verdict.reason)


def test_an_answer_that_trips_the_reader_is_a_verdict_and_a_warning(
    pool: VerifierPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(response: str) -> Any:
        raise IndexError("string index out of range")

    monkeypatch.setattr(verify, "final_answer", broken)
    verdict = pool.verify("It is 8.", "8")
    assert (verdict.kind, verdict.reason.startswith(READER_FAILED)) == ("unparsable", True)
    assert "It is 8." in caplog.text
