"""Whether two normalised answers are the same: shapes here, single values by an oracle.

Every function answers True, False or None: None means that the oracle couldn't tell, and a stronger one may.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .algebra import Undecided
from .leaves import Oracle, plain_number, plain_words, rounds_text, same_leaf
from .normalize import canonical
from .phrases import same_phrase
from .reader import GREEK, read
from .structure import (
    Equation,
    Group,
    Items,
    Leaf,
    Matrix,
    Node,
    Ratio,
    Relation,
    Union,
    is_name,
    read_structure,
)

_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}
_CLOCK = re.compile(r"([0-9]{1,2}) *(?:\\text\{)? *(?:([ap])\.? ?m\.?)?\}?", re.IGNORECASE)


def same_answer(gold: str, answer: str, oracle: Oracle) -> bool | None:
    """Compares two normalised answers.

    Raises:
        TooLarge: one of them asks for a number that nothing should evaluate.
    """
    if canonical(gold) == canonical(answer):
        return True
    verdict = same_phrase(gold, answer)
    if verdict is not None:
        return verdict
    if re.fullmatch(r"-?[0-9]+,[0-9]{1,2}", gold) and plain_number(answer) is not None:
        # Either a list or a decimal comma; no list is a single number, so that a decimal is the only other
        # reading.
        return plain_number(gold.replace(",", ".")) == plain_number(answer)
    return same(read_structure(gold), read_structure(answer), oracle)


def is_several(gold: str) -> bool:
    """Whether a normalised gold answer lists more than one answer."""
    node = read_structure(gold)
    return isinstance(node, Items) and len(node.parts) > 1


def same(gold: Node, answer: Node, oracle: Oracle) -> bool | None:
    """Compares two shapes."""
    gold, answer = _real_line(gold), _real_line(answer)
    if isinstance(gold, Leaf) and isinstance(answer, Leaf):
        return same_leaf(gold.text, answer.text, oracle)
    for kinds, compare in _RULES:
        if isinstance(gold, kinds) or isinstance(answer, kinds):
            return compare(gold, answer, oracle)
    return None


def _real_line(node: Node) -> Node:
    if isinstance(node, Leaf) and canonical(node.text) in (r"\mathbb{R}", r"\R", "all real numbers"):
        return Group("(", (Leaf(r"-\infty"), Leaf(r"\infty")), ")")
    return node


def _unlike(gold: Node, answer: Node) -> bool | None:
    """Of two shapes that never match, unless one is an expression yet to be worked out."""
    leaf = next((node for node in (gold, answer) if isinstance(node, Leaf)), None)
    if leaf is None or plain_number(leaf.text) is not None or plain_words(leaf.text):
        return False
    try:
        read(leaf.text)
    except Undecided:
        return None
    return False


def _all(pairs: Sequence[tuple[Node, Node]], oracle: Oracle) -> bool | None:
    undecided = False
    for gold, answer in pairs:
        verdict = same(gold, answer, oracle)
        if verdict is False:
            return False
        undecided |= verdict is None
    return None if undecided else True


# ---- equations and relations -------------------------------------------------------------------------------


def _same_equation(gold: Node, answer: Node, oracle: Oracle) -> bool | None:
    """Two equations: the same up to a factor. One: its right side, if the left is but a name or a number."""
    if not isinstance(answer, Equation):
        assert isinstance(gold, Equation)
        return same(gold.value, answer, oracle) if _states_value(gold, strict=True) else False
    if not isinstance(gold, Equation):
        if not _states_value(answer, strict=False) or _is_false(answer, oracle):
            return False
        return same(gold, answer.value, oracle)
    if is_name(gold.left) and is_name(answer.left):
        renamed = _with_variable_of(gold.left, answer)
        if renamed is not None:
            return same(gold.value, renamed, oracle)
        letters = re.fullmatch(r"[a-zA-Z]", gold.left) and re.fullmatch(r"[a-zA-Z]", answer.left)
        if canonical(gold.left) == canonical(answer.left) or not letters:
            return same(gold.value, answer.value, oracle)
    ratio = oracle.ratio(f"({gold.left})-({gold.right})", f"({answer.left})-({answer.right})")
    return None if ratio is None else ratio != 0


def _is_false(equation: Equation, oracle: Oracle) -> bool:
    """Whether both sides are numbers, and not the same: 5 = 6 states neither. A decimal may round the other side."""
    if re.search("[a-zA-Z]", equation.left + equation.right):
        return False
    return oracle.equal(equation.left, equation.right) is False and not rounds_text(equation.right, equation.left)


def _states_value(equation: Equation, *, strict: bool) -> bool:
    if is_name(equation.left):
        return True
    letters = re.sub(rf"\\(?!(?:{GREEK})(?![a-zA-Z]))[a-zA-Z]+", "", equation.left)
    if not re.search("[a-zA-Z]", letters):
        return True  # 4*4 = 16
    # An answer may repeat what was asked for: x + y = 5. As a gold answer that would be a line.
    return not strict and re.fullmatch(r"(?!-)[^0-9]+", equation.left) is not None


def _with_variable_of(name: str, equation: Equation) -> Node | None:
    """``f(n) = n + 1`` as ``f(x) = x + 1``, if ``name`` is f(x)."""
    ours, theirs = (re.fullmatch(r"([a-zA-Z]+)\(([a-z])\)", text) for text in (name, equation.left))
    if not ours or not theirs or ours[1] != theirs[1] or ours[2] == theirs[2]:
        return None
    return read_structure(re.sub(rf"(?<![a-zA-Z\\]){theirs[2]}(?![a-z]{{3}})", ours[2], equation.right))


def _interval(relation: Relation) -> tuple[str, Node] | None:
    """The variable and its values, if the relation bounds a single name."""
    sides, operators = relation.sides, relation.operators
    if len(sides) == 2:
        if not is_name(sides[0]):
            sides, operators = sides[::-1], (_FLIPPED[operators[0]],)
        name, bound = sides
        if not is_name(name) or canonical(name) in canonical(bound):
            return None
        lower, upper = Leaf(r"-\infty"), Leaf(r"\infty")
        if operators[0] == "!=":
            parts = (Group("(", (lower, Leaf(bound)), ")"), Group("(", (Leaf(bound), upper), ")"))
            return canonical(name), Union(parts)
        if operators[0] in ("<", "<="):
            return canonical(name), Group("(", (lower, Leaf(bound)), "]" if operators[0] == "<=" else ")")
        return canonical(name), Group("[" if operators[0] == ">=" else "(", (Leaf(bound), upper), ")")
    if len(sides) == 3 and is_name(sides[1]):
        if all(operator in (">", ">=") for operator in operators):
            sides, operators = sides[::-1], tuple(_FLIPPED[operator] for operator in reversed(operators))
        if all(operator in ("<", "<=") for operator in operators):
            left, right = "[" if operators[0] == "<=" else "(", "]" if operators[1] == "<=" else ")"
            return canonical(sides[1]), Group(left, (Leaf(sides[0]), Leaf(sides[2])), right)
    return None


def _same_relation(gold: Node, answer: Node, oracle: Oracle) -> bool | None:
    left = _interval(gold) if isinstance(gold, Relation) else None
    right = _interval(answer) if isinstance(answer, Relation) else None
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_chain(gold, answer, left, right, oracle)
    if isinstance(gold, Relation):
        return same(left[1], answer, oracle) if left and not isinstance(answer, Leaf) else False
    return same(gold, right[1], oracle) if right and not isinstance(gold, Leaf) else False


def _same_chain(
    gold: Relation,
    answer: Relation,
    left: tuple[str, Node] | None,
    right: tuple[str, Node] | None,
    oracle: Oracle,
) -> bool | None:
    if left and right:
        return left[0] == right[0] and same(left[1], right[1], oracle)
    if len(gold.sides) != len(answer.sides):
        return False
    verdicts = []
    turned = Relation(answer.sides[::-1], tuple(_FLIPPED[operator] for operator in reversed(answer.operators)))
    for other in (answer, turned):
        if gold.operators == other.operators:
            verdicts.append(_all([(Leaf(a), Leaf(b)) for a, b in zip(gold.sides, other.sides, strict=True)], oracle))
            if verdicts[-1]:
                return True
    if len(gold.sides) > 2:
        return None if None in verdicts else False
    ratio = oracle.ratio(*(f"({relation.sides[0]})-({relation.sides[1]})" for relation in (gold, answer)))
    if ratio is None:
        return None
    wanted = gold.operators[0] if ratio > 0 else _FLIPPED[gold.operators[0]]
    return ratio != 0 and wanted == answer.operators[0]


# ---- collections -------------------------------------------------------------------------------------------


def _distinct(parts: Sequence[Node], oracle: Oracle) -> list[Node]:
    kept: list[Node] = []
    for part in parts:
        if not any(same(part, other, oracle) for other in kept):
            kept.append(part)
    return kept


def _unordered(gold: Sequence[Node], answer: Sequence[Node], oracle: Oracle) -> bool | None:
    """Whether each part has its equal on the other side, repetitions apart."""
    left, right = _distinct(gold, oracle), _distinct(answer, oracle)
    undecided = False
    for part in left:
        verdicts = [same(part, other, oracle) for other in right]
        if True in verdicts:
            right.pop(verdicts.index(True))
        elif None in verdicts:
            undecided = True
        else:
            return False
    return None if undecided else not right


def _same_items(gold: Node, answer: Node, oracle: Oracle) -> bool | None:
    for one, other in ((gold, answer), (answer, gold)):
        if not isinstance(one, Items):
            continue
        relations = all(isinstance(part, Relation) for part in one.parts)
        if relations and isinstance(other, (Union, Group, Relation)):
            return _same_region(gold, answer, oracle)
        if isinstance(other, Union):
            return None
        if isinstance(other, Group) and not any(isinstance(part, Group) for part in one.parts):
            # A list without brackets, in the tuple's order, is the tuple; a set isn't.
            half_open = (other.left == "(") != (other.right == ")")
            if one.braces or half_open or len(one.parts) != len(other.parts):
                return False
            pairs = list(zip(one.parts, other.parts, strict=True))
            return _all(pairs if one is gold else [(b, a) for a, b in pairs], oracle)
    return _unordered(_parts(gold), _parts(answer), oracle)


def _parts(node: Node) -> tuple[Node, ...]:
    return node.parts if isinstance(node, (Items, Union)) else (node,)


def _same_region(gold: Node, answer: Node, oracle: Oracle) -> bool | None:
    """Unions of intervals, and relations joined by "or", part by part."""

    def regions(node: Node) -> list[Node]:
        found: list[Node] = []
        for part in _parts(node):
            bounds = _interval(part) if isinstance(part, Relation) else None
            found.extend(_parts(bounds[1]) if bounds else [part])
        return found

    verdict = _unordered(regions(gold), regions(answer), oracle)
    # The same set can be cut into parts in several ways: leave a "no" to the library.
    return verdict or (None if len(regions(gold)) + len(regions(answer)) > 2 else verdict)


def _same_matrix(gold: Node, answer: Node, oracle: Oracle) -> bool | None:
    ours, theirs = _rows(gold), _rows(answer)
    if ours is None or theirs is None:
        return _unlike(gold, answer)
    if [len(row) for row in ours] == [len(row) for row in theirs]:
        return _all([pair for a, b in zip(ours, theirs, strict=True) for pair in zip(a, b, strict=True)], oracle)
    # A vector may be written upright, lying, or as a tuple; two matrices must have one shape.
    flat, other = ([cell for row in rows for cell in row] for rows in (ours, theirs))
    vectors = all(len(rows) == 1 or all(len(row) == 1 for row in rows) for rows in (ours, theirs))
    if (isinstance(gold, Matrix) and isinstance(answer, Matrix)) or not vectors or len(flat) != len(other):
        return False
    return _all(list(zip(flat, other, strict=True)), oracle)


def _rows(node: Node) -> list[list[Node]] | None:
    if isinstance(node, Matrix):
        return [[Leaf(cell) for cell in row] for row in node.rows]
    return [list(node.parts)] if isinstance(node, Group) else None


def _same_group(gold: Node, answer: Node, oracle: Oracle) -> bool | None:
    if not isinstance(gold, Group) or not isinstance(answer, Group):
        return _unlike(gold, answer)
    if len(gold.parts) != len(answer.parts):
        return False
    if len(gold.parts) == 2 and (gold.left, gold.right) != (answer.left, answer.right):
        return False
    return _all(list(zip(gold.parts, answer.parts, strict=True)), oracle)


def _same_ratio(gold: Node, answer: Node, oracle: Oracle) -> bool | None:
    """Times literally; ratios up to a factor; a ratio of two also as a fraction."""
    if isinstance(gold, Ratio) and isinstance(answer, Ratio):
        clocks = [[_CLOCK.fullmatch(part) for part in ratio.parts] for ratio in (gold, answer)]
        if _is_clock(gold) and _is_clock(answer):
            times = [[(int(m[1]), (m[2] or "").lower()) if m else None for m in side] for side in clocks]
            return len(times[0]) == len(times[1]) and all(
                a is not None and b is not None and a[0] == b[0] and (a[1] == b[1] or not a[1] or not b[1])
                for a, b in zip(*times, strict=True)
            )
        if len(gold.parts) != len(answer.parts):
            return False
        first, other = gold.parts[0], answer.parts[0]
        products = [
            same_leaf(f"({a})({other})", f"({b})({first})", oracle)
            for a, b in zip(gold.parts[1:], answer.parts[1:], strict=True)
        ]
        zeros = any(plain_number(part) == 0 for ratio in (gold, answer) for part in ratio.parts)
        return False if False in products or zeros else None if None in products else True
    ratio, leaf = (gold, answer) if isinstance(gold, Ratio) else (answer, gold)
    assert isinstance(ratio, Ratio)
    if not isinstance(leaf, Leaf) or len(ratio.parts) != 2 or _is_clock(ratio):
        return False
    return oracle.equal(f"({ratio.parts[0]})/({ratio.parts[1]})", leaf.text)


def _is_clock(ratio: Ratio) -> bool:
    clock = re.compile(r"[0-5][0-9] *(?:\\text\{)? *(?:[ap]\.? ?m\.?)?\}?", re.IGNORECASE)
    return len(ratio.parts) in (2, 3) and all(clock.fullmatch(part) for part in ratio.parts[1:])


_Rule = Callable[[Node, Node, Oracle], "bool | None"]
# In this order: an equation states one of the others, a list holds them.
_RULES: list[tuple[type | tuple[type, ...], _Rule]] = [
    (Equation, _same_equation),
    (Items, _same_items),
    (Relation, _same_relation),
    (Union, _same_region),
    (Matrix, _same_matrix),
    (Group, _same_group),
    (Ratio, _same_ratio),
]
