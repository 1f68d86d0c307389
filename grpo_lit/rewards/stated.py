r"""What an answer states, against what it leaves to work out: "3+5" where 8 is asked for.

By value they are equal, so a policy that is paid for the question in other signs (``3+5``, ``3+5 ≈ 7``, ``\gcd(8,16)``,
``x + 8 - x``, ``3 ⊕ 5``) learns to repeat it; the first two were seen. So where every part of the gold answer is a
plain number, every part of an answer has to state one: digits, a fraction, a mixed number, a root or power of one,
scientific notation, with a sign, a unit, a currency or a percent sign. All texts here are normalised.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from .leaves import number_word, plain_words
from .normalize import canonical
from .reader import GREEK
from .structure import Equation, Group, Items, Leaf, Node, Ratio, Relation, Union, read_structure, split_top
from .units import split_unit

_SIDES = re.compile(r"(?<![<>!])=|\\(?:approx|to|sim|simeq|cong)(?![a-zA-Z])")
_FRACTION = re.compile(r"\\frac ?(?:\{([^{}]*)\}|([0-9])) ?(?:\{([^{}]*)\}|([0-9]))")
_DECIMAL = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"[-+]? ?(?:(?:(?P<whole>[0-9]+) )?(?P<over>-?{_DECIMAL})/(?P<under>-?{_DECIMAL})"
    rf"|{_DECIMAL}(?:[eE][-+]?[0-9]+|(?:\*|\\times ?|\\cdot ?)10(?:\^|\*\*)\{{?-?[0-9]+\}}?)?"
    r"|[0-9]*\.[0-9]*(?:\\overline\{?[0-9]+\}?|\([0-9]+\)|\.\.\.)"
    r"|(?P<power>[0-9]*\\sqrt ?(?:\[[0-9]+\])?(?:[0-9]|\{[0-9]+\})|[0-9]+(?:\^|\*\*)(?:[0-9]|\{-?[0-9]+\}|[0-9]+)))"
)
# Letters that are no variable: words, commands, units behind a space, and the x, C and P of 3x4, 5C2 and 5P2.
_NO_VARIABLE = re.compile(
    rf"\\text\{{[^{{}}]*\}}|\\(?!(?:{GREEK})(?![a-zA-Z]))[a-zA-Z]+|(?<![\\a-zA-Z])[a-zA-Z]{{2,}}|e(?=\^)"
    r"|(?<=[0-9]) ?[xXCP] ?(?=\$?[0-9])|(?<=[0-9] )[mgshlL](?![a-zA-Z(])"
)
_BOUND = re.compile(r"\\(?:sum|prod|int|lim)(?![a-zA-Z])")
_NAME = re.compile(r"\\?[a-zA-Z]+'*(?:_(?:[0-9a-zA-Z]|\{[^{}]*\}))?|[-+]?\\infty|-?[0-9]+[a-zA-Z]")


def is_number(text: str, *, powers: bool = True) -> bool:
    r"""Whether one value is a number as written, perhaps with a unit; ``powers``: roots and powers of one as well.

    A mixed number whose fraction isn't below one (3 5/1) is a sum to do.

    >>> [is_number(t) for t in ("8", r"\frac{17}{12}", "3 1/2", r"3\frac12", "1e3", r"8 \times 10^2", r"8\text{cm}^2")]
    [True, True, True, True, True, True, True]
    >>> [is_number(t) for t in ("2^{10}", r"2\sqrt{4}", "16/2", "$8", "12%", "5 million", "8 apples")]
    [True, True, True, True, True, True, True]
    >>> [is_number(t) for t in (r"3\frac{5}{1}", "3! + 2", r"\gcd(8,16)", "x-x+8", "3 ⊕ 5", "|3|+5", "3 5", "not 8")]
    [False, False, False, False, False, False, False, False]
    """
    value = canonical(_FRACTION.sub(r" \1\2/\3\4", split_unit(number_word(text))[0])).strip()
    found = _NUMBER.fullmatch(value)
    if found is None or (found["power"] and not powers):
        return False
    if found["under"] is None:
        return True
    return float(found["under"]) != 0 and (not found["whole"] or float(found["over"]) < float(found["under"]))


def is_plain(gold: str) -> bool:
    r"""Whether a gold answer is made of plain numbers, so that an answer must be too.

    >>> [is_plain(t) for t in ("8", "(1,2)", "x>2", "5 cm, 6 cm", r"2\sqrt2", r"\pi", "2x+3", "yes")]
    [True, True, True, True, False, False, False, False]
    """
    parts = [part for side in split_top(gold, _SIDES)[0] for part in _parts(read_structure(side)) if part]
    numbers = [is_number(part, powers=False) for part in parts]
    return any(numbers) and all(n or _is_no_number(part) for n, part in zip(numbers, parts, strict=True))


@lru_cache(maxsize=4096)
def stated(answer: str) -> str | None:
    r"""The answer, if it states all its parts; else its last side that states a number; None where none does.

    A side in variables says of what: ``x = 8`` of x, but ``x+1 = 8`` of no answer, which comparison sees.

    >>> [stated(t) for t in ("8", "x = 8", "3+5 = 8", "8 = 3+5", r"3+5 \approx 7", "3+5", "(3-2,2)", "(x,y) = (1,2)")]
    ['8', 'x = 8', '8', '8', '7', None, None, '(x,y) = (1,2)']
    >>> [stated(t) for t in ("x = 3+5 = 8", "x+1 = 8", "8 = 2x", "3x4 = 12", "5 m + 3 m = 8 m")]
    ['x = 8', 'x+1 = 8', '8 = 2x', '12', '8 m']
    """
    sides = [side for side in split_top(answer, _SIDES)[0] if side]
    states = [all(is_number(p) or _is_no_number(p) for p in _parts(read_structure(side))) for side in sides]
    if all(states):
        return answer
    sides_that_do = [side for side, ok in zip(sides, states, strict=True) if ok and re.search("[0-9]", side)]
    if not sides_that_do:
        return None
    of = next((side for side in sides if side != sides_that_do[-1] and _has_variable(side)), None)
    return sides_that_do[-1] if of is None else f"{of} = {sides_that_do[-1]}"


def _has_variable(text: str) -> bool:
    return _BOUND.search(text) is None and re.search("[a-zA-Z]", _NO_VARIABLE.sub("", text)) is not None


def _is_no_number(text: str) -> bool:
    """Whether one value is a variable, with a coefficient or without, infinity, or words."""
    return _NAME.fullmatch(text) is not None or plain_words(text) is not None


def _parts(node: Node) -> Iterator[str]:
    """The single values of a structure; none of a matrix, which is left to comparison."""
    match node:
        case Leaf(text):
            yield text
        case Relation(sides) | Ratio(sides):
            yield from sides
        case Equation(left, _, value):
            yield left
            yield from _parts(value)
        case Items(nodes) | Union(nodes) | Group(_, nodes):
            for part in nodes:
                yield from _parts(part)
