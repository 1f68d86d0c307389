r"""Reads an answer's shape: list, tuple, interval, set, union, relation, equation, matrix, ratio or value.

The leaves stay text; `compare` says when two shapes with two leaves are the same answer. Reading never fails:
what has no known shape is one leaf.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

MAX_PARTS = 64


class Node:
    """A piece of an answer."""


@dataclass(frozen=True)
class Leaf(Node):
    """One value, as normalised text."""

    text: str


@dataclass(frozen=True)
class Items(Node):
    """Several answers in no order: ``1, 2``, ``1 or 2``, ``1 \\pm 2``; braces make it a set."""

    parts: tuple[Node, ...]
    braces: bool = False


@dataclass(frozen=True)
class Group(Node):
    """Ordered parts in brackets: a tuple, or with two parts perhaps an interval."""

    left: str
    parts: tuple[Node, ...]
    right: str


@dataclass(frozen=True)
class Union(Node):
    """A union of intervals or sets."""

    parts: tuple[Node, ...]


@dataclass(frozen=True)
class Relation(Node):
    """A chain such as ``a < b <= c``: one operator fewer than sides."""

    sides: tuple[str, ...]
    operators: tuple[str, ...]


@dataclass(frozen=True)
class Equation(Node):
    """``left = ... = right``; ``value`` is the right side read for itself."""

    left: str
    right: str
    value: Node


@dataclass(frozen=True)
class Matrix(Node):
    """Rows of entries."""

    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Ratio(Node):
    """``a : b : c``, or a time of day."""

    parts: tuple[str, ...]


_OPERATORS = {r"\le": "<=", r"\ge": ">=", r"\ne": "!=", "<": "<", ">": ">"}
_RELATION = re.compile(r"\\le(?![a-z])|\\ge(?![a-z])|\\ne(?![a-z])|[<>]")
_EQUALS = re.compile(r"=")
_UNION = re.compile(r"\\cup(?![a-z])|\\bigcup(?![a-z])")
_APPROXIMATELY = re.compile(r"\\approx(?![a-z])")
_COLON = re.compile(":")
_MEMBER = re.compile(r".{1,30}?\\in(?![a-z])(?P<set>.+)")
_SEPARATOR = re.compile(r"[,;]|(?<![\\a-zA-Z])(?:and|or)(?![a-z{])|(?<=[0-9)}])(?:and|or)(?![a-z{])")
_GROUPED_DIGITS = re.compile(r"(?<![0-9.,_])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_SPACED_DIGITS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])")
_MATRIX = re.compile(r"\\begin\{([a-zA-Z]*matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}", re.DOTALL)
# {x | x > 2}, {x in R : x > 2}: the set of all that fulfil a condition
_BUILDER = re.compile(r" ?([a-z]) ?(?:\\in ?\\mathbb\{R\} ?)?[|:] ?(?P<condition>.*\1.*)")
_OPEN, _CLOSE = "([{", ")]}"
_NAME = re.compile(
    r"\\?[a-zA-Z]+'*(?:_(?:\{[^{}]*\}|[0-9a-zA-Z]))?'*"  # x, x_1, \theta, Area, AB
    r"|\\?[a-zA-Z]+(?:_\{?[0-9a-zA-Z]+\}?)?\([^()=<>+*/]*\)"  # f(x), P(A \cup B)
    r"|\|[a-zA-Z]+\||\\(?:overline|angle|triangle|hat|bar|vec|dot|text) ?\{?[^{}=]*\}?"
    r"|m\\angle ?[A-Z0-9]+"
    r"|\\frac\{[a-zA-Z]+\}\{[a-zA-Z]+\}|[A-Z]+ ?/ ?[A-Z]+"
    r"|\((?:[a-zA-Z](?:_[0-9])?,? ?)+\)"  # (x, y)
    r"|[a-zA-Z]+(?: [a-zA-Z]+){1,4}"  # Total cost
)


def is_name(text: str) -> bool:
    r"""Whether a left side only says what is asked: ``x``, ``f(n)``, ``|AB|``, ``\frac{NO}{BO}``."""
    return _NAME.fullmatch(text.strip()) is not None


def balanced(text: str) -> bool:
    """Whether brackets close in pairs; a half-open interval's brackets may differ in kind."""
    depth = 0
    for character in text:
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth < 0:
            return False
    return depth == 0


def split_top(text: str, pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Splits outside of all brackets; returns the stripped parts and the separators between them."""
    depths, depth = [], 0
    for character in text:
        depth -= character in _CLOSE
        depths.append(depth)
        depth += character in _OPEN
    parts, separators, start = [], [], 0
    for match in pattern.finditer(text):
        if depths[match.start()] == 0:
            parts.append(text[start : match.start()].strip())
            separators.append(match[0])
            start = match.end()
    return [*parts, text[start:].strip()], separators


@lru_cache(maxsize=4096)
def read_structure(text: str) -> Node:
    r"""Reads normalised text.

    >>> read_structure("(1, 2)")
    Group(left='(', parts=(Leaf(text='1'), Leaf(text='2')), right=')')
    >>> read_structure(r"1,234")
    Leaf(text='1234')
    """
    return _read(text.strip(), 0)


def _read(text: str, depth: int) -> Node:
    if depth > 6 or not text or not balanced(text):
        return Leaf(text)
    text = _cut_approximation(text)
    if not text:  # a sign of approximation and nothing after it
        return Leaf(text)
    member = _MEMBER.fullmatch(text)
    if member and is_name(text[: member.start("set")].rpartition("\\in")[0]):
        return _read(member["set"].strip(), depth + 1)
    bracketed = _read_brackets(text, depth)
    if bracketed is not None:
        return bracketed
    text = _join_digit_groups(text)
    parts, _ = split_top(text, _SEPARATOR)
    parts = [part for part in parts if part]
    if 1 < len(parts) <= MAX_PARTS:
        return Items(_flatten(tuple(_read(part, depth + 1) for part in parts)))
    for reader in (_read_union, _read_relation, _read_equation, _read_ratio, _read_plus_minus):
        node = reader(text, depth)
        if node is not None:
            return node
    return Leaf(text)


def _cut_approximation(text: str) -> str:
    r"""``1/3 \approx 0.33`` states 1/3; a mere ``\approx 0.33`` states 0.33."""
    parts, separators = split_top(text, _APPROXIMATELY)
    if not separators:
        return text
    return parts[1] if not parts[0] or is_name(parts[0]) else parts[0]


def _join_digit_groups(text: str) -> str:
    if "," in text:
        parts, separators = split_top(text, _GROUPED_DIGITS)
        text = "".join(p + s.replace(",", "") + " " for p, s in zip(parts, [*separators, ""], strict=True)).strip()
        text = re.sub(r"(?<=[0-9]) (?=[.%])|(?<=[-$(]) (?=[0-9])", "", text)
    return _SPACED_DIGITS.sub(lambda m: m[0].replace(" ", ""), text) if " " in text else text


def _flatten(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    flat: list[Node] = []
    for node in nodes:
        flat.extend(node.parts if isinstance(node, Items) and not node.braces else [node])
    return tuple(flat)


def _closing(text: str) -> int:
    """Index of the bracket that closes the first one."""
    depth = 0
    for index, character in enumerate(text):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0:
            return index
    return -1


def _read_brackets(text: str, depth: int) -> Node | None:
    """A matrix, set, tuple or interval, when brackets enclose the whole text."""
    matrix = _MATRIX.fullmatch(text)
    if matrix and r"\begin" not in matrix[2]:
        rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix[2]) if row.strip()]
        return Matrix(tuple(tuple(cell.strip() for cell in row.split("&")) for row in rows))
    if text.startswith(r"\{") and text.endswith(r"\}") and _closing(text[1:]) == len(text) - 2:
        left, inner, right = "{", text[2:-2], "}"
    elif text[0] in _OPEN and _closing(text) == len(text) - 1:
        left, inner, right = text[0], text[1:-1], text[-1]
    else:
        return None
    if left == "{" and (builder := _BUILDER.fullmatch(inner)):
        return _read(builder["condition"], depth + 1)
    if left == "{" and "|" in inner:
        return None
    parts, separators = split_top(inner, re.compile("[,;]"))
    if left == "{":
        if not separators and not text.startswith("\\"):
            return _read(inner.strip(), depth + 1)
        return Items(_flatten(tuple(_read(part, depth + 1) for part in parts if part)), braces=True)
    if not separators and left == "(":
        # Brackets around one value: (B), (x+1).
        return _read(inner.strip(), depth + 1) if inner.strip() else None
    if not 1 < len(parts) <= MAX_PARTS or not all(parts):
        return None
    return Group(left, tuple(_read(part, depth + 1) for part in parts), right)


def _read_union(text: str, depth: int) -> Node | None:
    parts, separators = split_top(text, _UNION)
    return Union(tuple(_read(part, depth + 1) for part in parts)) if separators and all(parts) else None


def _read_relation(text: str, depth: int) -> Node | None:
    sides, operators = split_top(text, _RELATION)
    if not operators or not all(sides) or len(sides) > 8:
        return None
    return Relation(tuple(sides), tuple(_OPERATORS[operator] for operator in operators))


def _read_equation(text: str, depth: int) -> Node | None:
    parts, separators = split_top(text, _EQUALS)
    if not separators or not all(parts):
        return None
    if len(parts) == 2 and is_name(parts[1]) and not is_name(parts[0]):
        parts.reverse()  # 5 = x
    return Equation(parts[0], parts[-1], _read(parts[-1], depth + 1))


def _read_ratio(text: str, depth: int) -> Node | None:
    parts, separators = split_top(text, _COLON)
    return Ratio(tuple(parts)) if 1 <= len(separators) <= 3 and all(parts) else None


def _read_plus_minus(text: str, depth: int) -> Node | None:
    if text.count(r"\pm") + text.count(r"\mp") != 1:
        return None
    sign = r"\pm" if r"\pm" in text else r"\mp"
    plus, minus = (text.replace(sign, f" {s} ").strip().removeprefix("+").strip() for s in "+-")
    return Items((Leaf(plus), Leaf(minus)))
