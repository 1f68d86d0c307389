"""Verdicts on single answers: what counts, what is equal to what, and what must never pass."""

from __future__ import annotations

import random

import pytest

from grpo_lit.errors import UserError
from grpo_lit.rewards import VerifierPolicy, VerifierPool, explain, final_answer, verify_math
from grpo_lit.rewards.algebra import TooLarge, Undecided
from grpo_lit.rewards.reader import read

Case = tuple[str, str, bool]  # gold, response, right

# Pairs on which published verifiers differ.
PUBLISHED: list[Case] = [
    (r"\frac{1}{2}", r"$\boxed{\frac{1}{2}}$", True),
    (r"\frac{\sqrt{3}}{2}", r"\boxed{\dfrac{\sqrt{3}}{2}}", True),
    ("#### 1,234", "Total: 1234 \n#### 1234", True),
    ("1234567", r"\boxed{1,234,567}", True),
    ("1000", r"\boxed{1{,}000}", True),
    ("60", r"\boxed{60 \text{ km/h}}", True),
    (r"25\%", r"\boxed{25}", True),
    ("0.3333", r"\boxed{\frac{1}{3}}", False),
    ("0.5", r"\boxed{1/2}", True),
    ("[0,1)", r"\boxed{[0,1]}", False),
    (r"(-\infty,2]", r"\boxed{x \le 2}", True),
    ("(1,2)", r"\boxed{(2,1)}", False),
    ("-5", r"\boxed{−5}", True),
    ("42", "The answer is 42.", True),
    ("7", r"\boxed{3} then wait, \boxed{7}", True),
    (r"\text{Friday}", r"\boxed{\text{Friday}}", True),
    ("5", r"\boxed{x=5}", True),
    (r"\tfrac{3}{4}", r"\boxed{\tfrac34}", True),
    (r"90^\circ", r"\boxed{90}", True),
    ("16", r"so 4*4 = 16 and then we need to \boxed{1", False),
    ("5", r"\boxed{10^{10^{10}}}", False),
    ("5", r"\boxed{(((10^{9})!)!)!}", False),
    ("3", r"I considered 3 but \boxed{4}", False),
    ("1.5", r"\boxed{1,5}", False),
    (r"\pi", r"\boxed{3.14159}", False),
    ("A", r"\boxed{A}", True),
    ("3:4", r"\boxed{3:4}", True),
]

# False positives and false negatives that users of Math-Verify reported.
REPORTED = [
    ("1/2004!", r"\boxed{1/2006!}", False),
    (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}", False),
    (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}", False),
    ("$n=2,3,4$", "$n=1,2,3$", False),
    ("$D=(0,1)$", "$D=(0,1.5)$", False),
    ("$12:00$", "$1:00$", False),
    (r"$1-\frac{1}{e}$", r"$1+\frac{1}{e}$", False),
    ("$4$", r"$4\sqrt(2)$", False),
    ("$4$", r"\boxed{4\sqrt{2}}", False),
    ("$y=2x+3$", "$y=2x-3$", False),
    ("2x+3y=6", r"\boxed{2x+3y=7}", False),
    ("2x+3y=6", r"\boxed{4x+6y=12}", True),
    (r"\sqrt{\frac{1}{n}}", r"\boxed{\frac{1}{\sqrt{n}}}", True),
    (r"\sqrt{1/n}", r"\boxed{1/\sqrt{n}}", True),
    ("sqrt(1/n)", "1/sqrt(n)", True),
    ("13", r"\boxed{\text{13}}", True),
    (r"\text{13}", "13", True),
    ("73", "**73**", True),
    ("234", "**73**", False),
    ("73", "The answer is **73**.", True),
    (r"\dfrac{9}{7}", r"\dfrac{9}{7}", True),
    ("9/7", r"\dfrac{9}{7}", True),
    ("9/7", r"So it is \dfrac{9}{7}", True),
    (r"\dfrac{\pi}{2}", r"\boxed{pi/2}", True),
    (r"\dfrac{\pi}{2}", "pi/2", True),
    (r"\frac{\pi}{2}", "The answer is pi/2.", True),
]

THINKING = [
    ("5", r"\boxed{4} <think>a</think> b </think> it is 5", True),
    ("4", r"<think>\boxed{4}</think>", False),
    ("4", r"<think>5</think>\boxed{4}", True),
    ("4", r"<think>5 \boxed{4}", False),
    ("4", "First, 2 plus 2.\n</think>\nThe answer is 4.", True),
    ("5", "First \\boxed{5}\n</think>\nThe answer is 4.", False),
    ("4", r"\boxed{4} <think> hmm", False),
    ("4", r"<think>a</think> \boxed{4} <think>b \boxed{5}</think>", True),
    ("4", "<think>a<think>b</think>c</think>4", True),
]

HEDGES = [
    ("12", r"\boxed{12 or 13}", False),
    ("13", r"\boxed{12 \text{ or } 13}", False),
    ("13", "The answer is 12 or 13.", False),
    ("13", "It is 12 or 13", False),
    ("13", "12 or 13", False),
    ("3", r"\boxed{3 and 4}", False),
    ("4", "3 and 4", False),
    ("13", r"\boxed{12} or \boxed{13}", False),
    ("12", r"\boxed{12, 13}", False),
    ("5", r"\boxed{\pm 5}", False),
    ("13", r"\boxed{12 13}", False),
    ("12", r"\boxed{12 not 13}", False),
    ("12", r"\boxed{12 \lor 13}", False),
    ("12", r"\boxed{x=12 \text{ or } x=13}", False),
    ("12", r"\boxed{12 / 13}", False),
    ("12", r"\boxed{12-13}", False),
    ("12", r"\boxed{\{12,13\}}", False),
    ("12", "#### 12 or 13", False),
    ("13", "<answer>12 or 13</answer>", False),
    ("12", r"\boxed{12 \text{ (or maybe } 13)}", False),
    ("13", "Either 12 or maybe 13.", False),
    ("12", r"\boxed{12?}", False),
]

WORDS = [
    ("A", r"\boxed{(A)}", True),
    ("A", r"\boxed{\text{A}}", True),
    ("A", r"\boxed{\textbf{(A)}\ 5}", True),
    ("A", r"\boxed{B}", False),
    ("B", "The answer is (B).", True),
    ("B", "The answer is B", True),
    (r"\text{(B)}", r"\boxed{B}", True),
    (r"\text{(B)}", r"\boxed{(C)}", False),
    ("A", r"\boxed{A, B}", False),
    ("A", r"\boxed{A or B}", False),
    ("yes", r"\boxed{\text{Yes}}", True),
    ("yes", "The answer is no.", False),
    ("Yes", "Yes, because 3 is prime.", True),
    ("no", r"\boxed{yes}", False),
    ("yes", "The answer is yes and no", False),
    ("None", "It cannot be determined.", True),
    ("None", r"\boxed{5}", False),
    ("None", "The answer is none.", True),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", True),
    (r"\text{Evelyn}", r"\boxed{Evelyn}", True),
    (r"\text{Evelyn}", r"\boxed{Carla}", False),
    (r"\text{even}", r"The function is \boxed{even}", True),
    (r"\text{even}", r"\boxed{odd}", False),
    ("ellipse", r"\boxed{\text{an ellipse}}", True),
]

UNITS = [
    (r"5 \text{ m}", r"\boxed{5 \text{ s}}", False),
    (r"5 \text{ m}", r"\boxed{5 \text{ m}^2}", False),
    ("5 dollars", r"\boxed{500 \text{ cents}}", True),
    ("15 cm^2", r"\boxed{15\text{ cm}^2}", True),
    (r"15\mbox{ cm}^2", r"\boxed{15}", True),
    (r"9 \text{ inches}", r"\boxed{9 \text{ feet}}", False),
    (r"9 \text{ feet}", r"\boxed{108 \text{ inches}}", True),
    ("5 hours", r"\boxed{300 minutes}", True),
    ("245 yd.", r"\boxed{245\text{ yards}}", True),
    ("0.25", r"\boxed{25\%}", True),
    ("25%", r"\boxed{0.25}", True),
    ("25", r"\boxed{0.25}", False),
    (r"80\%", r"\boxed{80}", True),
    (r"80\%", r"\boxed{8}", False),
    (r"\$36", r"\boxed{36}", True),
    (r"\$32,\!348", r"\boxed{32348}", True),
    ("36", r"\boxed{\$36.00}", True),
    ("5", r"\boxed{5 \text{ million}}", False),
    ("5000000", r"\boxed{5 \text{ million}}", True),
    ("5", r"\boxed{five}", True),
    ("12", r"\boxed{12 apples}", True),
    ("12", r"\boxed{12x}", False),
    ("20", "He has 20 dollars left.", True),
    ("20", "#### $20.00", True),
]

INTERVALS = [
    (r"(2,\infty)", r"\boxed{x>2}", True),
    (r"(2,\infty)", r"\boxed{x\ge 2}", False),
    ("x>2", r"\boxed{(2,\infty)}", True),
    ("-793 < a < 10", r"\boxed{(-793,10)}", True),
    (r"(0,9)\cup(9,36)", r"\boxed{(9,36)\cup(0,9)}", True),
    (r"x \neq 3", r"\boxed{(-\infty,3)\cup(3,\infty)}", True),
    ("(0,1)", r"\boxed{[0,1)}", False),
    (r"\mathbb{R}", r"\boxed{(-\infty,\infty)}", True),
    (r"x<-1 \text{ or } x>1", r"\boxed{(-\infty,-1)\cup(1,\infty)}", True),
    ("[-1,1]", r"\boxed{-1\le x\le 1}", True),
]

COLLECTIONS = [
    ("5", r"\boxed{3} for part (a) and \boxed{5}", True),
    ("3, 5", r"\boxed{3} for part (a) and \boxed{5}", True),
    ("3, 5", r"\boxed{3}. But wait, no, and \boxed{5}", False),
    (r"\{1\pm\sqrt{5},-2\}", r"\boxed{-2, 1+\sqrt{5}, 1-\sqrt{5}}", True),
    (r"1 \pm \sqrt{19}", r"\boxed{1+\sqrt{19},1-\sqrt{19}}", True),
    ("3, 5, 7", r"\boxed{7,3,5}", True),
    ("3, 5, 7", r"\boxed{3,5}", False),
    ("3,5,7", r"\boxed{3} and \boxed{5} and \boxed{7}", True),
    ("(1,2)", r"\boxed{1,2}", True),
    ("(1,2)", r"\boxed{\{1,2\}}", False),
    ("(1,2),(3,4)", r"\boxed{(3,4),(1,2)}", True),
    ("(1,2),(3,4)", r"\boxed{(2,1),(3,4)}", False),
    ("3:4", r"\boxed{\frac{3}{4}}", True),
    ("3:4", r"\boxed{6:8}", True),
    ("3:4", r"\boxed{4:3}", False),
    ("2:30", r"\boxed{2:30 \text{ PM}}", True),
    ("2:30 AM", r"\boxed{2:30 \text{ PM}}", False),
]

MATRICES = [
    (
        r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}",
        r"\boxed{\begin{bmatrix} \frac15 \\ -\frac{18}{5} \end{bmatrix}}",
        True,
    ),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\boxed{\begin{pmatrix} 1 & 2 \\ 3 & 5 \end{pmatrix}}", False),
    (r"\begin{pmatrix} -18 \\ -49 \\ 96 \end{pmatrix}", r"\boxed{(-18,-49,96)}", True),
]

OTHERS = [
    ("5", r"\boxed{5 = x}", True),
    ("6", r"\boxed{5=6}", False),
    ("5", r"\boxed{\text{not } 5}", False),
    (r"\frac{1}{12}", r"\boxed{0.0833333333333333}", True),
    (r"\frac{1}{3}", r"\boxed{0.333333}", False),
    ("P(x)", r"\boxed{p(x)}", False),
    (r"\sqrt{x^2}", r"\boxed{x}", False),
    (r"3 \bmod 5", r"\boxed{3 \bmod 7}", False),
    (r"x^2+2x+1", r"\boxed{(x+1)^2}", True),
    (r"x_{1}+2x_{12}", r"\boxed{2x_{12}+x_1}", True),
    (r"x_{12}", r"\boxed{2x_1}", False),
    (r"\theta_1 \theta_2", r"\boxed{\theta_2\theta_1}", True),
    (r"\frac{1}{\sqrt{2}-1}", r"\boxed{1+\sqrt{2}}", True),
    (r"\sin^2 x", r"\boxed{1-\cos^2 x}", True),
    (r"\sum_{k=1}^{n} k", r"\boxed{\frac{n(n+1)}{2}}", True),
    ("x > 1", r"\boxed{2x > 2}", True),
    ("x > 1", r"\boxed{-x > -1}", False),
    (r"a \le b", r"\boxed{2b \ge 2a}", True),
    (r"1+10^{-40}\sin 1", r"\boxed{1}", True),
    (r"1+10^{-20}\sin 1", r"\boxed{1}", False),
    ("52_8", r"\boxed{52_8}", True),
    ("52_8", r"\boxed{52}", True),
    ("52_8", r"\boxed{52_{8}}", True),
    ("52_8", r"\boxed{42}", False),
    ("52_8", r"\boxed{52_9}", False),
    ("4K", r"\boxed{4K}", True),
    ("-f(-y)", r"\boxed{f(y)}", False),
    ("-f(-y)", r"\boxed{-f(-y)}", True),
    (r"\cot x", r"\boxed{\frac{\cos x}{\sin x}}", True),
    (r"\cot x", r"\boxed{\tan x}", False),
    (r"\binom{2n}{n}", r"\boxed{\frac{(2n)!}{n!^2}}", True),
    (r"\binom{2n}{n}", r"\boxed{\frac{(2n)!}{(n!)^2}}", True),
    (r"\lceil n/2\rceil+1", r"\boxed{\lfloor (n+1)/2 \rfloor + 1}", True),
    (r"2\sqrt[12]{32}", r"\boxed{2^{17/12}}", True),
    (r"2,-\log _{10} 250", r"\boxed{-\log_{10}250, 2}", True),
    (r"5 \sqrt[3]{4}", r"\boxed{5 \cdot 4^{1/3}}", True),
    ("f(n)=n^{2}", r"\boxed{f(x)=x^2}", True),
    ("f(n)=n^{2}", r"\boxed{n^2}", True),
    ("A=B", r"\boxed{A=B}", True),
    ("e^{x}", r"\boxed{e^{-x}}", False),
    (r"\ln 2", r"\boxed{\ln 3}", False),
    (r"\frac{10^{b}}{n}", r"\boxed{10^b/n}", True),
    ("2^{k-n}", r"\boxed{\frac{2^k}{2^n}}", True),
    ("2^{k-1}", r"\boxed{2^k-1}", False),
    ("023", r"\boxed{23}", True),
    (r"12\frac{3}{5}", r"\boxed{12.6}", True),
    (r"12\frac{3}{5}", r"\boxed{\frac{36}{5}}", False),
    ("July 4, 2020", r"\boxed{4 July 2020}", True),
    ("July 4", r"\boxed{July 5}", False),
    ("x^2+y^2=4", r"\boxed{x^2+y^2-4=0}", True),
    ("-1,1", r"\boxed{x=\pm1}", True),
    ("|x|", r"\boxed{x}", False),
    ("10", r"\boxed{2x=10}", False),
    ("5", r"\boxed{x+y=5}", True),
    ("16", r"\boxed{4\cdot4=16}", True),
    ("2", "The solutions are 1 and 2.", False),
    ("1, 2", "The solutions are 1 and 2.", True),
    ("6", r"\boxed 6", True),
    ("5", r"\boxed{\boxed{5}}", True),
    ("5", "The answer is: \n5", True),
    ("5", "**Answer:** 5", True),
    ("5", r"Answer: $\frac{10}{2}$", True),
    ("1.5", "It costs $1.50", True),
    ("20", r"so \[ x = 20 \]", True),
]

# Found by trying what was in no table: judged wrongly until a rule was mended.
FOUND: list[Case] = [
    *(("8", text, False) for text in ("8~10", "It takes 8~10 days.", r"\boxed{8~9}", r"\boxed{~~8~~ 9}", "8.5 ~ 9")),
    *(("[1,2)", rf"\boxed{{{text}}}", right) for text, right in (("1,2", False), ("1 and 2", False), ("[1, 2)", True))),
    *(("1,2", rf"\boxed{{{text}}}", right) for text, right in (("(1,2]", False), ("(1,2)", True))),
    *(("0", rf"\boxed{{{text}}}", right) for text, right in (("x-x", False), ("zero", True))),
    ("8", "The answer is 8. Wait, no: 9.", False),
    ("8", "The answer is 9.\nActually, 2*4 = 8.", True),
    ("8", "The answer is 8. No, that is 2 less than it should be, 10.", False),
    ("8", "The answer is 8. No other number will do.", True),
    ("8", "The answer is 8. Actually, no need to check.", True),
    *(
        ("43", f"The answer is 43{text}", True)
        for text in (", since 42 is even.", " apples because 42+1 = 43.", ", which is 1 more.")
    ),
    *(
        ("42", f"The answer is 43{text}", False)
        for text in (", since 42 is even.", " => 42 + 1", " because it isn't 42.")
    ),
    *(("42", text, False) for text in ("42 => 43", r"\boxed{42 => 43}", "The answer is 42 or more, since 41 is odd.")),
    *(("42", text, True) for text in ("So 6 x 7 = 42.", "That makes 6 x 7 = 42 apples.", "The value of x = 42.")),
    *(
        ("2", f"It is 3 {text} 2.", False)
        for text in ("x", "X", "multiplied by", "divided by", "modulo", "increased by", "less")
    ),
    *(("1000", text, False) for text in ("It is 6 x 1000.", "It is 3.2 x 10^3.")),
    ("42", "The answer is 42. Wait, let me check: 42/6 = 7. Yes.", True),
    ("42", "The answer is found by adding 40 and 2, which gives 42.", True),
    *(("3200", text, True) for text in ("3.2 x 10^3", r"\boxed{3.2x10^{3}}", "It is 3.2 X 10^3.")),
    *((r"\emptyset", rf"\boxed{{{text}}}", True) for text in (r"\varnothing", "∅", r"\{\}", r"\{ \}")),
    *((r"\emptyset", rf"\boxed{{{text}}}", False) for text in ("0", r"\{0\}", "")),
    *(
        ("5", rf"\boxed{{{text}}}", True)
        for text in (r"\color{red}{5}", r"\textcolor{blue}{5}", r"\underline{5}", r"\large 5")
    ),
    *(("5", rf"\boxed{{{text}}}", True) for text in (r"\ 5\ ", r"\mathbf{\text{5}}", r"{10 \over 2}")),
    *(("5", rf"\boxed{{{text}}}", False) for text in (r"\color{red}{5}8", r"\underline{5}8", r"{5 \over 2}")),
    ("1/3", r"\boxed{0.\bar{3}}", True),
    ("1/3", r"\boxed{0.\bar{4}}", False),
    ("5.67", r"\boxed{17/3 = 5.67}", True),
    ("5.68", r"\boxed{17/3 = 5.68}", False),
    *(("21", text, True) for text in ("twenty-one", r"\boxed{twenty one}", r"\boxed{\text{twenty-one apples}}")),
    *(
        ("105", rf"\boxed{{{text}}}", True)
        for text in ("one hundred and five", "a hundred five", "One hundred five dollars")
    ),
    *(("2000340", rf"\boxed{{{text}}}", True) for text in ("two million three hundred forty", "2000340")),
    *(("12000", rf"\boxed{{{text}}}", True) for text in ("twelve thousand", "12 thousand")),
    ("24", r"\boxed{two dozen}", True),
    # An equation in variables is no answer, whatever its other side says; a name or what was asked for may stand there.
    *(
        ("9", text, False)
        for text in ("x+1=9", "x^2=9", "-x=9", r"\boxed{x/2 = 9}", "9 = 2x+1", r"\theta+1=9", "2 x + 1 = 9")
    ),
    *(("k=1", rf"\boxed{{{text}}}", False) for text in ("-k=1", "k+1=1", "k^2=1", "1/k=1", "x = 3 = 1+k")),
    *(
        ("9", text, True)
        for text in ("x=4+5=9", "x+y=4+5=9", r"\text{Area} = 3*3 = 9", "3x3 = 9", "3 x 3 = 9", "f(2) = 4+5 = 9")
    ),
    *(("9", text, True) for text in ("5 m + 4 m = 9 m", r"\sum_{i=1}^{3} (i+1) = 9", "4 apples + 5 apples = 9 apples")),
    *(
        ("5", rf"\boxed{{{text}}}", False)
        for text in ("five hundred", "five six", "twenty-five", "five dozen", "five and six")
    ),
    *(
        ("20", rf"\boxed{{{text}}}", False)
        for text in ("twenty twelve", "two zero", "twenty-one", "twenty thousand", "ten ten")
    ),
    *(
        ("1", rf"\boxed{{{text}}}", False)
        for text in ("one two", "one zero", "one hundred", "twenty-one", "one and two", "one apple two")
    ),
]

TABLES = {
    "published": PUBLISHED,
    "reported": REPORTED,
    "thinking": THINKING,
    "hedges": HEDGES,
    "words": WORDS,
    "units": UNITS,
    "intervals": INTERVALS,
    "collections": COLLECTIONS,
    "matrices": MATRICES,
    "others": OTHERS,
    "found": FOUND,
}


@pytest.mark.parametrize(
    ("gold", "response", "right"),
    [pytest.param(*case, id=f"{name}-{number}") for name, cases in TABLES.items() for number, case in enumerate(cases)],
)
def test_verdict(gold: str, response: str, right: bool) -> None:
    verdict = verify_math(response, gold)
    assert verdict.correct is right, explain(response, gold)
    assert verdict.kind in (("correct",) if right else ("wrong", "unparsable"))
    assert verdict.reason


@pytest.mark.parametrize(
    ("response", "text", "source"),
    [
        (r"\boxed{1} no, \boxed{2}", "2", "boxed"),
        (r"\boxed{1}, \boxed{2}", "1, 2", "boxed"),
        (r"\boxed{1} \boxed{2", "1", "boxed"),
        (r"\boxed{a \text{ if } b\} c}", r"a \text{ if } b\} c", "boxed"),
        (r"\fbox{7}", "7", "boxed"),
        ("<answer>7</answer> and 8", "7", "answer tag"),
        ("so 3\n#### 7\n8", "7", "####"),
        ("The answer is 7. I checked it with 8.", "7", "phrase"),
        ("The final answer is $7$. I hope it is correct.", "7", "phrase"),
        ("A: 7", "7", "phrase"),
        (r"\frac{1}{2}", r"\frac{1}{2}", "whole response"),
        ("We get 5, and then 7 apples in the end.", "7", "last value"),
        (r"So \[ x = 7 \] holds.", "x = 7", "last value"),
        ("He pays $5 and then $12 for it.", "$12", "last value"),
        ("That makes 12.<|im_end|>\n<|im_start|>user\nAnd 13?", "12", "last value"),
    ],
)
def test_where_the_answer_is_found(response: str, text: str, source: str) -> None:
    found = final_answer(response)
    assert (found.text or "").strip("$ ") == text.strip("$ ")
    assert found.source == source


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "empty"),
        ("<think>so it is 5", "inside <think>"),
        (r"it is 5, \boxed{5", "never closed"),
        (r"\boxed{}", "empty"),
        ("I have no idea what to say about all of these things.", "no number"),
    ],
)
def test_no_answer_is_unparsable_and_says_why(response: str, reason: str) -> None:
    verdict = verify_math(response, "5")
    assert (verdict.kind, verdict.extracted, verdict.correct) == ("unparsable", None, False)
    assert reason in verdict.reason


def test_extracted_is_what_was_written() -> None:
    assert verify_math(r"thus \boxed{\dfrac{1}{2}}", "0.5").extracted == r"\dfrac{1}{2}"


def test_an_empty_gold_answer_is_never_right() -> None:
    assert verify_math(r"\boxed{}", "").kind == "unparsable"
    assert verify_math(r"\boxed{5}", " ").kind == "unparsable"


@pytest.mark.parametrize(("response", "gold", "timeout_s"), [(5, "5", 5.0), ("5", 5, 5.0), ("5", "5", 0.0)])
def test_bad_arguments_are_named(response: str, gold: str, timeout_s: float) -> None:
    with pytest.raises(UserError, match=r"^(response|gold|timeout_s)="):
        verify_math(response, gold, timeout_s=timeout_s)


def test_explanation_names_both_readings_and_the_route() -> None:
    text = explain(r"So \boxed{\dfrac12}", "#### 0.5")
    assert text.startswith("verdict   correct: ")
    for part in ("'0.5'", r"'\\dfrac12'", "found by: boxed", r"'\\frac12'", "by exact"):
        assert part in text


def test_algebra_is_exact() -> None:
    assert read(r"\frac{1}{2004!}").same_as(read(r"\frac{1}{2006!}")) is False
    assert read(r"(1+10^{-300})").same_as(read("1")) is False
    assert read(r"\sqrt{2}\sqrt{3}").same_as(read(r"\sqrt{6}"))
    assert read(r"\frac{1}{x-y}+\frac{1}{x+y}").same_as(read(r"\frac{2x}{x^2-y^2}"))
    assert read("0.1+0.2").rational == read("0.3").rational


@pytest.mark.parametrize("text", ["9^{9^{9}}", "10000!", "(" * 60 + "1" + ")" * 60, "(x+y+z)^{40}", "1" * 5000])
def test_algebra_refuses_what_is_too_large(text: str) -> None:
    with pytest.raises(TooLarge):
        read(text)


@pytest.mark.parametrize("text", ["1 2", r"\sin x", "2^x", "f(x)", "1/0", "x +", r"\sqrt{x}", "1 = 1", ""])
def test_algebra_leaves_the_rest_undecided(text: str) -> None:
    with pytest.raises(Undecided):
        read(text)


@pytest.mark.parametrize(
    "response",
    [
        *("1+2", "1 + 2", "1+2:", "1+2.", "4-1", "0+1+2", r"\boxed{1+2}", r"\boxed{3 \times 1}", "The answer is 5-2"),
        *("(1+2)", "1-(-2)", "1+2 = 2+1", "x = 1+2", "(1+2)(1)", "1+2/1", r"\frac{1+2}{1}", r"\left(1 + 2\right)"),
        *(
            r"\boxed{1,000-997}",
            r"$2 + \sqrt{1}$",
            "1+2 =",
            "1+2 ≈",
            "1＋2",
            "(3)(1)",
            "((1)+(2))",
            r"6\div 2",
            "1 2",
            r"1\ 2",
            "#### 2 1",
        ),
    ],
)
def test_echoing_the_question_is_no_answer(response: str) -> None:
    """A policy that learns to repeat "1+2" would otherwise be paid for it."""
    verdict = verify_math(response, "3")
    assert verdict.kind == "wrong"
    assert "not carried out" in verdict.reason


@pytest.mark.parametrize("sign", ["=", "≈", r"\approx", "→", r"\to", "~"])
def test_a_calculation_is_judged_by_what_it_was_worked_out_to(sign: str) -> None:
    """A policy learned to write "1+2 ≈ 7": what stands behind the sign was not looked at."""
    for right in (
        f"1+2 {sign} 3",
        f"1 + 2{sign}3.",
        f"x = 1+2 {sign} 3",
        rf"\boxed{{1+2 {sign} 3}}",
        f"(1+2) {sign} 3",
    ):
        assert verify_math(right, "3").correct, right
    for wrong in (
        f"1+2 {sign} 7",
        f"1 + 2{sign}7.",
        f"1+2 = 3+0 {sign} 7",
        rf"\boxed{{1+2 {sign} 7}}",
        f"3-0 {sign} 33",
    ):
        assert not verify_math(wrong, "3").correct, wrong


def test_the_last_value_of_a_calculation_counts() -> None:
    assert verify_math("1+2 = 4 = 3", "3").correct
    assert not verify_math("1+2 = 3 = 4", "3").correct


def test_numbers_that_are_written_out_stay_answers() -> None:
    fine = {"1+2 = 3": "3", "3 = 1+2": "3", "-3": "-3", r"\boxed{6/2}": "3", r"\boxed{2^{10}}": "1024", "1+2": "1+2"}
    fine |= {r"3 \times 10^5": "300000", "3*10^{-1}": "0.3", r"2\sqrt{4}": "4", "1+2x": "2x+1", r"\sqrt{64} = 8": "8"}
    fine |= {r"1+\sqrt{2}": r"\sqrt2+1", "3 1/2": "3.5", "16-3-4 = 9 eggs": "9", r"2 \cdot 9 = \$18": "18"}
    fine |= {"118 000": "118000", r"11,\! 111": "11111"}
    for answer, gold in fine.items():
        assert verify_math(answer, gold).correct, answer


def test_calculations_can_be_accepted() -> None:
    with VerifierPool(policy=VerifierPolicy(calculations="accepted")) as pool:
        assert pool.verify("1+2", "3").correct
        assert not pool.verify("1+3", "3").correct


def test_a_calculation_is_alike_to_its_kind_only() -> None:
    """Votes and clusters compare both ways round, and "1+2" must not share a class with 3 in one of them."""
    with VerifierPool() as pool:
        for text in ("1+2", "1+2 ≈ 7"):
            assert not pool.same(text, "3")
            assert not pool.same("3", text)
        assert pool.same("1+2", "2+1")
        assert pool.same("x^2+1", "1+x^2")
        assert pool.same("1+2 = 3", "3")


def test_nothing_without_the_number_is_the_number() -> None:
    """What a policy might stumble upon: random texts around the question's own numbers, none of which has an 8."""
    draw = random.Random(8)
    pieces = [
        *"35+-()[]{}=≈~<>:*×|,;?.xN7 °→–",
        *[r"3+5", r"\boxed{", r"\approx", r"\(", r"\)", r"####", r"<answer>", r"\left(", r"\right)", r"\,", r"\quad"],
    ]
    pieces += ["3 + 5", "5 3", " is ", " plus ", " or ", "the answer is "]
    texts = ["".join(draw.choices(pieces, k=draw.randint(1, 4))) for _ in range(1200)]
    texts += [draw.choice(pieces) + "3+5" + "".join(draw.choices(pieces, k=draw.randint(0, 3))) for _ in range(1200)]
    with VerifierPool() as pool:
        verdicts = pool.verify_many(texts, ["8"] * len(texts))
    assert [text for text, verdict in zip(texts, verdicts, strict=True) if verdict.correct] == []
    assert {v.kind for v in verdicts} >= {"wrong", "unparsable"}


ECHOES = {
    "1,000": ["500+500"],
    "17/12": ["2/3+3/4", r"\frac{2}{3}+\frac{3}{4}"],
    "1/2": ["1/4+1/4", "1-1/2"],
    "12%": ["6+6", "100-88", "3×4", "(6+6)%", r"\frac{6+6}{100}"],
    **{gold: ["3+5"] for gold in ("$8", "8 cm", "+8", "(8)", r"8\%", r"8^\circ", r"\frac{8}{1}", "x=8")},
    "(1,2)": ["(3-2,1+1)"],
    "x>2": ["x>1+1"],
    "1, 2": ["3-2, 1+1"],
    "15": ["3⊗5"],
    "6": ["3{2}", "3[2]", r"\frac{3}{1}\frac{2}{1}"],
    "8": [
        *("3 ⊕ 5", "3∔5", "3! + 2", "3°+5°", "3'+5'", "|3|+5", r"\lfloor3\rfloor+5", r"\{3\}+\{5\}", "x+8-x", "3y/y+5"),
        *(r"\sum_{k=3}^{3}k+5", r"\int_0^8 dx", r"\max(3,8)", r"\gcd(8,16)", r"\binom{8}{1}", "8!/7!", r"\exp(\ln 8)"),
        *(r"8\cos 0", r"\log_2 256", r"\lfloor 8.5\rfloor", "3 5/1", r"3\frac51", "7 2/2", r"\pi-\pi+8"),
    ],
    "A": ["(A),(B),(C),(D)", "(A) (B) (C) (D)", "(A) or (B)", "A. B", "A.B", "A) 5 B) 6"],
}


@pytest.mark.parametrize("gold", ECHOES)
def test_a_question_in_other_signs_is_no_answer(gold: str) -> None:
    for text in ECHOES[gold]:
        for response in (text, rf"\boxed{{{text}}}"):
            assert not verify_math(response, gold).correct, explain(response, gold)


def test_what_stands_around_a_number_is_no_calculation() -> None:
    fine = {"1000": "1,000", "$1,000": "1,000", "0.5": "1/2", "50%": "1/2", r"1\frac{5}{12}": r"\frac{17}{12}"}
    fine |= {r"\boxed{8 \text{ cm}^2}": "8", "8 hours": "8", "x = 8": "8", r"\$8.00": "8", "eight": "8", "about 8": "8"}
    fine |= {
        "10^6": "1000000",
        r"45^\circ": "45",
        "(B) A triangle": "B",
        "A. I think so": "A",
        r"\frac{-383}{6}": "-383/6",
    }
    for response, gold in fine.items():
        assert verify_math(response, gold).correct, explain(response, gold)
