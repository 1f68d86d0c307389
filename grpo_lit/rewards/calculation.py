r"""Calculations that are not carried out: "3+5" where 8 is asked for.

By value they equal the answer, so a policy that is paid for them learns to repeat the question; where what follows a
sign of approximation isn't looked at, it learns "3+5 ≈ 7". Both were seen. So where the gold answer is a plain number
and the answer calculates, only what it was worked out to is judged. Fractions, roots, powers and scientific notation
are ways to write a number, and stay answers.
"""

from __future__ import annotations

import re

SIDES = re.compile(r"=|≈|≃|≅|∼|~|→|⇒|\\(?:approx|sim|simeq|cong|to|rightarrow|Rightarrow|implies)(?![a-zA-Z])")
_SPACING = re.compile(r"\\left|\\right|\\(?:big|Big|bigg|Bigg)[lr]?|\\q?quad|\\[,;!: ]|\\\$|[\s$]")
_WORDS = re.compile(r"\\text\s*\{[^{}]*\}|\b(?:and|or)\b")
_SCIENTIFIC = re.compile(r"(?:[*×·⋅]|\\times|\\cdot)10(?:\^|\*\*)")
_OPERATOR = r"(?:[-+*×·⋅∙•∗÷−–—‐‑±]|\\(?:times|cdot|div|pm|ast)(?![a-zA-Z]))"
# an operator between two values, or a product of brackets; brackets around them change nothing
_OPERATION = re.compile(
    rf"[\d.)\]}}%]{_OPERATOR}(?:{_OPERATOR}|[(\[{{])*(?:[\d.]|\\[dt]?frac|\\sqrt|\\text)|[\d)]\([-+−(]*[\d.]"
)

# numbers side by side, which Math-Verify adds up ("3 5" is 8 to it): not digit groups, not the 3 1/2 of a mixed number
_SIDE_BY_SIDE = re.compile(r"(?<![\d.,])\d[\d.,]*(?:\s+\d[\d.,]*)+(?:\s*/\s*\d)?")
_GROUPS_OR_MIXED = re.compile(r"\d{1,3}(?:,?\s+\d{3})+[\d.,]*|\d+\s+\d+\s*/\s*\d")


def worked_out(text: str) -> str | None:
    r"""What a calculation was worked out to: its last side that is a value; None where it has none.

    A text without a calculation comes back as it is.

    >>> [worked_out(text) for text in ("3+5", "(3+5)", "x = 3-(-5)", "3+5 = 5+3", r"\frac{3+5}{1}")]
    [None, None, None, None, None]
    >>> [worked_out(text) for text in ("3 5", "8 8", "118 000", "3 1/2")]
    [None, None, '118 000', '3 1/2']
    >>> [worked_out(text) for text in ("3+5 = 8", "3+5 ≈ 7.", "8 = 3+5", "3+5 = 7 = 8")]
    ['8', '7.', '8', '8']
    >>> [worked_out(text) for text in ("-8", "16/2", "2^3 ≈ 8", r"3 \times 10^5", r"2\sqrt{2}")]
    ['-8', '16/2', '2^3 ≈ 8', '3 \\times 10^5', '2\\sqrt{2}']
    """
    found, value = False, None
    for side in SIDES.split(text):
        plain = _SCIENTIFIC.sub("e", _SPACING.sub("", side))
        if _OPERATION.search(plain) or _are_side_by_side(side):
            found = True
        elif any(char.isdigit() for char in plain):
            value = side.strip()
    return value if found else text


def calculates(text: str) -> bool:
    r"""Whether some side of a text is a calculation, one in a tuple or an interval included.

    >>> texts = ("(3-2,1+1)", "x > 1+1", "(1,2)", "x > -2", r"[0,1) \cup (2,3]", "1 and -2")
    >>> [calculates(text) for text in texts]
    [True, True, False, False, False, False]
    """
    sides = SIDES.split(_WORDS.sub(",", text))
    return any(_OPERATION.search(_SCIENTIFIC.sub("e", _SPACING.sub("", side))) for side in sides)


def _are_side_by_side(side: str) -> bool:
    found = _SIDE_BY_SIDE.findall(_SPACING.sub(" ", side))
    return any(_GROUPS_OR_MIXED.fullmatch(numbers) is None for numbers in found)
