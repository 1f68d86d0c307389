r"""Numbers as they are written, against texts that have to be worked out.

Where a gold answer is one number, an answer must state one: digits, a fraction, a mixed number, a root or power of one,
scientific notation, with a sign, a unit, a currency or a percent sign around it. Everything else that is equal to it
(`\gcd(8,16)`, `3! + 2`, ``x + 8 - x``, ``3 ⊕ 5``) is a question repeated in other signs, which a policy learns where it
is paid.
"""

from __future__ import annotations

import re
from fractions import Fraction

from grpo_lit.rewards.calculation import SIDES, calculates

_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|textit|operatorname)\s*\{[^{}]*\}")
_SPACING = re.compile(r"\\left|\\right|\\q?quad|\\[,;!: ]|\\displaystyle|\s")
_MARKS = re.compile(r"\\?[$€£¥₹%]|\^\{?(?:\\circ|∘|°)\}?|°")
_NAME = re.compile(r"\A[a-zA-Z](?:_\{?\w+\}?)?=")
_UNIT = re.compile(r"(?<=[\d.)}])(?:[a-zA-Zµ]+(?:\^\{?-?\d\}?|[²³])?)(?:[/·*]?[a-zA-Z]+(?:\^\{?-?\d\}?|[²³])?)*\.?\Z")
_DIGITS = r"(?:\d{1,3}(?:(?:,|\{,\})\d{3})+|\d+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.\d*)?|\.\d+)"
_REPEATING = rf"{_DIGITS}?\.\d*(?:\\overline\{{?\d+\}}?|\(\d+\)|\.\.\.|…)"
_PART = rf"[-−]?(?:{_DECIMAL})"
_FRACTION = rf"(?:\\[dt]?frac\{{?({_PART})\}}?\{{?({_PART})\}}?|({_DECIMAL})/({_DECIMAL}))"
_SHORT = re.compile(r"(\\[dt]?frac)(\d)(\d)(?!\d)")
_LITERAL = re.compile(
    rf"[-+−–]?(?:{_DECIMAL}|{_REPEATING}|(?:(?P<whole>\d+)(?=\\))?(?P<fraction>[-−]?{_FRACTION})"
    rf"|\d*\\sqrt(?:\[\d+\])?\{{?\d+\}}?|\d+(?:\^|\*\*)\{{?[-−]?\d+\}}?"
    rf"|{_DECIMAL}(?:[eE][-+]?\d+|(?:[*×·⋅]|\\times|\\cdot)10(?:\^|\*\*)\{{?[-−]?\d+\}}?))"
)


def stripped(text: str) -> str:
    r"""A value without what may stand around it: spacing, brackets, a name and an equals sign, unit, currency, percent.

    >>> [stripped(t) for t in (r"\$1,000", r"8\text{ cm}^2", "x = (8)", "12 %", "+8", "8 apples", r"100^\circ")]
    ['1,000', '8', '8', '12', '+8', '8', '100']
    """
    mixed = re.sub(r"(?<=\d)\s+(?=\d+\s*/\s*\d)", r"\\frac", text)  # 3 1/2 must not become 31/2
    plain = _SPACING.sub("", _TEXT.sub("", re.sub(r"\\frac(\d+)\s*/\s*(\d+)", r"\\frac{\1}{\2}", mixed)))
    plain = re.sub(r"(?<=[\d}])\^\{?[23]\}?\Z", "", plain) if r"\text" in text or r"\mathrm" in text else plain
    before = None
    while plain != before:
        before = plain
        plain = _NAME.sub("", _MARKS.sub("", plain)).strip("., ;:!?'\"")
        inner = plain[1:-1]
        if plain[:1] + plain[-1:] in ("()", "{}", "[]") and (inner.isdigit() or not re.search(r"[(){}\[\],]", inner)):
            plain = inner
        plain = _UNIT.sub("", plain) if not re.fullmatch(r".*\d[eE]\d*", plain) else plain
    return _SHORT.sub(r"\1{\2}{\3}", plain)


def is_literal(text: str) -> bool:
    r"""Whether a text states one number and leaves nothing to work out.

    Fractions, roots and powers of plain numbers are ways to write one; a mixed number whose fraction isn't below one
    (3 5/1) is a sum to do.

    >>> [is_literal(t) for t in ("8", "1,000", r"\frac{17}{12}", "3 1/2", r"3\frac12", "1e3", r"8 \times 10^2")]
    [True, True, True, True, True, True, True]
    >>> [is_literal(t) for t in ("2^{10}", "2**10", r"2\sqrt{4}", "16/2")]
    [True, True, True, True]
    >>> [is_literal(t) for t in (r"3\frac{5}{1}", "3! + 2", r"\gcd(8,16)", "x-x+8", "3 ⊕ 5", "|3|+5", "(3)(2)")]
    [False, False, False, False, False, False, False]
    """
    found = _LITERAL.fullmatch(stripped(text))
    if found is None:
        return False
    if found["fraction"] is None:
        return True
    above, below = (
        Fraction(part.replace("−", "-").replace("{", "").replace("}", "").replace(",", ""))
        for part in found.groups()[2:]
        if part
    )
    if below == 0:
        return False
    return above < below or not found["whole"]


def is_plain(text: str) -> bool:
    """Whether a gold answer is one number and neither a root nor a power."""
    return is_literal(text) and re.search(r"sqrt|\d\s*(?:\^|\*\*)", re.sub(r"10(?:\^|\*\*)", "", text)) is None


def is_worked_out(text: str) -> bool:
    r"""Whether a gold answer of several numbers has no variable, no root and nothing left to work out.

    >>> [is_worked_out(t) for t in ("(1,2)", "x>2", r"2\sqrt2", r"\pi", "2x+3", "yes")]
    [True, True, False, False, False, False]
    """
    inside = re.sub(r"\\[a-zA-Z]+", "", re.sub(r"^[a-z](?=[<>=≤≥]|\\)", "", text.strip()))
    return not re.search(r"[a-zA-Z]", inside) and not re.search(r"sqrt|\\pi|[√π^]", text) and not calculates(text)


def is_one_number_in_words(text: str) -> bool:
    r"""Whether a text has one number at most, no function and nothing that could work on it, such as "8 (the sum)".

    >>> [is_one_number_in_words(t) for t in ("8 in all", "around 8", "8!", r"\exp(8)", "8 or 9", r"|8|")]
    [True, True, False, False, False, False]
    """
    if len(re.findall(_DECIMAL, text)) > 1:
        return False
    return not re.search(
        r"\\(?!text|mathrm|circ|boxed|mbox|quad|left|right|[,;!: $%])[a-zA-Z]|[!^|+*×·÷⌊⌈√∑∫⊕⊞∔⊗∘∏]", text
    )


def stated_number(text: str) -> str | None:
    r"""The part of an answer that states a number; None where nothing in it does.

    Sides of an equation that are neither names nor numbers are what was worked out, and the last side is the result.

    >>> [stated_number(t) for t in ("8", "x + y = 5", r"\sqrt{64} = 8", "3! + 2 = 7", r"\gcd(8,16)", "five")]
    ['8', '5', '\\sqrt{64} = 8', '7', None, 'five']
    """
    sides = [side for side in SIDES.split(text) if side.strip()]
    if all(is_literal(side) or is_one_number_in_words(side) for side in sides):
        return text
    result = sides[-1].strip()
    return (
        result if any(c.isdigit() for c in result) and (is_literal(result) or is_one_number_in_words(result)) else None
    )
