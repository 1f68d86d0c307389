"""Wrong answers by construction, thousands of them from a seed: echoes, hedges, other units, other digits.

None may be taken for right, trip the reader, or take its time. Each template says nothing but a wrong answer, or more
than one, to a gold answer ``{g}``; ``{w}`` is another number.
"""

from __future__ import annotations

import random
import time

import pytest

from grpo_lit.rewards import VerifierPool, explain, verify_math
from grpo_lit.rewards.verify import READER_FAILED

FRAMES = [
    *(
        "{}",
        r"\boxed{{{}}}",
        "The answer is {}.",
        "#### {}",
        "<answer>{}</answer>",
        "It is {}.",
        "${}$",
        r"So \[ {} \]",
    ),
    *(
        "x = {}",
        "I get {} here",
        "Answer: {}",
        "**{}**",
        r"\boxed{{\text{{{}}}}}",
        r"Thus $\boxed{{{}}}$.",
        "Answer: ({})",
    ),
    *("The final answer is ${}$", "<think>hm</think> {}", "The total is {} apples", "{}?", "It is {}, I think"),
]
BEFORE = ["", "", "", "", "", "", "Let me think. ", "3 apples and 4 pears. ", "First, 2+2 = 4.\n"]
HEDGES = [
    *(
        "{g} or {w}",
        "{w} or {g}",
        "either {w} or {g}",
        "{w} (or {g})",
        "{g} (or {w})",
        "{g}, {w}",
        "{w}, {g}",
        "{w} and {g}",
    ),
    *(
        "{w} to {g}",
        "{w}-{g}",
        "{w} – {g}",
        "not {g} but {w}",
        "{g}, no wait, {w}",
        "{w} / {g}",
        "{w}; {g}",
        "{w} | {g}",
    ),
    *(
        "{w} ± {g}",
        "{g} ± {w}",
        "{w} {g}",
        "between {w} and {g}",
        "{w} vs {g}",
        "{w} or perhaps {g}",
        "{w}, {w}1 or {g}",
    ),
    *(
        "from {w} to {g}",
        "{w} through {g}",
        "{{{w}, {g}}}",
        r"\{{{w}, {g}\}}",
        "({w}, {g})",
        "[{w}, {g}]",
        r"{w} \lor {g}",
    ),
    *(
        r"{w} \text{{ or }} {g}",
        r"{w}\ {g}",
        "{w}\u3000{g}",
        "{w}、{g}",
        "{w}／{g}",
        "{w}~or~{g}",
        "neither {w} nor {g}",
    ),
    *("{w} apples or {g} apples", "{w} cm to {g} cm", "{w}, not {g}", "{w} instead of {g}", "{w} && {g}", "{g}...{w}"),
]
ALTERED = [
    *(
        "not {g}",
        "minus {g}",
        "negative {g}",
        "-{g}",
        "−{g}",
        "－{g}",
        "–{g}",
        "⁻{g}",
        "\u2060-{g}",
        "isn't {g}",
        "never {g}",
    ),
    *(
        "half of {g}",
        "twice {g}",
        "more than {g}",
        "at least {g}",
        "at most {g}",
        "> {g}",
        "≥ {g}",
        "≠ {g}",
        r"\neg {g}",
    ),
    *(
        "{g} squared",
        "{g}²",
        "{g}^2",
        "\\sqrt{{{g}}}",
        "1/{g}",
        "{g}.5.5",
        "{g} million",
        "{g} dozen",
        "{g}x",
        "x{g}",
        "{g}i",
    ),
    *(
        "{g} less than {w}",
        "{w} times {g}",
        "{w} out of {g}",
        "{w} over {g}",
        "{w} mod {g}",
        "{w} {g}/1",
        "{g}:{w}",
        "{g}_{w}",
    ),
    *(
        "{g} is wrong",
        "{g} is not the answer",
        "{g} + {w}i",
        "{g}'",
        "{g}e",
        "\u202e{w}",
        "{w}\u200b",
        "{g}٣",
        "{g}\\\\{w}",
    ),
]
SUMS = {
    "+": ["+", " + ", "＋", " plus ", " and ", "⊕", "➕", r"\,+\,", " added to "],
    "-": ["-", " - ", "−", "－", " minus "],
    "*": ["*", "×", r"\times ", r" \cdot ", "·", "∗", " times ", "⨯", "✕", "\u2062", " multiplied by ", ")("],
    "/": ["÷", " ÷ ", r" \div ", " divided by "],
}
OTHER_KINDS = [
    *[("{g} cm", "{g} kg"), ("{g} cm", "{g} m"), ("{g} hours", "{g} minutes"), ("${g}", "{g} cents"), ("${g}", "€{g}")],
    *[("{g} m", "{g} m^2"), ("{g} km/h", "{g} m/s"), ("{g}%", "{g}00%"), ("{g}%", "-{g}%"), ("{g}%", "{g}% or {w}%")],
    *[("({g},{w})", "({w},{g})"), ("({g},{w})", "({g}-1+1,{w})"), ("({g},{w})", "({g}-1+1,{w}) ≈ (7,7)")],
    *[("[{g},{w}9]", "[{g}-1+1,{w}9]"), ("x>{g}", "x>{g}-1+1"), ("x>{g}", "x>{g} or x<{g}"), ("x>{g}", "x≥{g}")],
    *[("{g}, {w}", "{g}, {w}, 0"), ("{g}:{w}", "{w}:{g}"), (r"\frac{{{g}}}{{101}}", r"\frac{{{g}+0}}{{101}}")],
    *[("{g}/101", "{g}/101 or {w}/101"), ("{g}", "cannot be determined"), ("None", "{g}")],
    *[("yes", text) for text in ("yes and no", "yes is wrong", "not yes", "yes or no", "no")],
    *[
        ("A", text)
        for text in (
            "A. B. C.",
            "(A) (B)",
            "A, B",
            "A or B",
            "A/B",
            "not A",
            "option A or option B",
            "A? B?",
            "A. B?",
            "C",
        )
    ],
]
THOUSANDS = [
    "{0}.{1}",
    "{0}, {1}",
    "{0}:{1}",
    "{0}/{1}",
    "{0} and {1}",
    "{0},{1},000",
    "{0},{1}0",
    "{1},{0}",
    "{0}+{1}",
]


def an_echo(draw: random.Random) -> tuple[str, str]:
    sign = draw.choice(list(SUMS))
    a, b = draw.randint(3, 60), draw.randint(3, 60)
    a = a * b if sign == "/" else a
    gold = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]
    if gold in (a, b):
        return an_echo(draw)
    joint = draw.choice(SUMS[sign])
    text = f"({a})({b})" if joint == ")(" else f"{a}{joint}{b}"
    ends = ["{}"] * 6 + ["({})", "{} =", "{} ≈", f"{{}} ≈ {gold + 1}", f"{{}} = {gold - 1}", r"\left({}\right)"]
    return str(gold), draw.choice(ends).format(text)


def a_wrong_answer(draw: random.Random) -> tuple[str, str]:
    """A gold answer and what isn't one."""
    kind = draw.randrange(5)
    if kind == 0:
        return an_echo(draw)
    g = draw.choice([draw.randint(10, 99), draw.randint(100, 999), 12.5, 0.25])
    w = g + draw.choice([1, 2, 10])
    if kind == 1:
        gold, text = draw.choice(OTHER_KINDS)
        return gold.format(g=int(g) + 5, w=int(w) + 6), text.format(g=int(g) + 5, w=int(w) + 6)
    if kind == 2:
        thousands, rest = draw.randint(2, 99), draw.randint(101, 999)
        return f"{thousands}{rest}", draw.choice(THOUSANDS).format(thousands, rest)
    return str(g), draw.choice(HEDGES if kind == 3 else ALTERED).format(g=g, w=w)


def test_thousands_of_wrong_answers_are_wrong() -> None:
    draw = random.Random(16)
    cases = []
    for _ in range(4000):
        gold, text = a_wrong_answer(draw)
        cases.append((gold, draw.choice(BEFORE) + draw.choice(FRAMES).format(text)))
    with VerifierPool() as pool:
        pool.verify(r"\boxed{\sin x}", r"\cos x")  # the worker is up
        verdicts = pool.verify_many([response for _, response in cases], [gold for gold, _ in cases])
    assert [case for case, verdict in zip(cases, verdicts, strict=True) if verdict.correct] == []
    assert {v.kind for v in verdicts} == {"wrong", "unparsable"}
    assert not [v for v in verdicts if v.reason.startswith(READER_FAILED)]


RIGHT = {
    "-8": ["minus 8", "negative 8", "It is negative 8.", r"\boxed{negative 8}", "The answer is minus 8."],
    "1/2": ["one half", "half", r"\boxed{\text{one half}}"],
    "2/3": ["two thirds", "two-thirds"],
    "A": ["option A", "The answer is option A", r"\boxed{\text{Option A}}", "Answer: A. It is so since B is wrong"],
    "x>2": [
        "x greater than 2",
        "x is greater than 2",
        r"\{x|x>2\}",
        r"\boxed{\{x \in \mathbb{R} \mid x>2\}}",
        r"\{x : x>2\}",
    ],
    r"x \le 2": ["x is less than or equal to 2"],
    "3": [
        "15 ÷ 5 = 3",
        "15 ÷ 5 is 3",
        "8, no wait, 3",
        "The total comes to 3.",
        "It takes 3 hours.",
        "It is '3'.",
        "(3)",
    ],
    "5000000": ["It takes 5 million."],
    "90 minutes": ["It takes 1.5 hours."],
    r"\sqrt{2}": ["1.41421356237"],
    "3, 5": ["It is $3$ or $5$.", "We get 3 and 5."],
    "(3,5)": [r"\boxed{(x=3, y=5)}", r"\boxed{x = 3, y = 5}", "(x,y) = (3,5)"],
    "yes": ["Yes, because 3 is prime.", "Yes."],
}


@pytest.mark.parametrize("gold", RIGHT)
def test_right_answers_in_other_words_are_right(gold: str) -> None:
    for response in RIGHT[gold]:
        assert verify_math(response, gold).correct, explain(response, gold)


@pytest.mark.parametrize(
    "text", ["{", "8 or ", "not ", "- ", "$1$ ", "\ue000", "half of ", "A. ", r"\frac12 ", "a1", "~8"]
)
def test_a_megabyte_of_what_a_value_is_made_of(text: str) -> None:
    start = time.perf_counter()
    for end in ("", " It is 7.", "\n7 or 9"):
        verdict = verify_math(text * (1_000_000 // len(text)) + end, "9")
        assert not verdict.correct
        assert not verdict.reason.startswith(READER_FAILED), verdict.reason
    assert time.perf_counter() - start < 3.0
