"""What exact algebra can't decide: SymPy on values, Math-Verify on whole answers. For the worker process.

Values are compared by evaluating both to 50 digits at fixed points instead of by `simplify`: two expressions
that agree at several unrelated points are the same function for all practical purposes, two that differ at
one are not (Schwartz 1980, Zippel 1979, for polynomials), and it takes milliseconds. Positive points come
first, so that sqrt(1/n) equals 1/sqrt(n); negative ones count where both sides are real there, so that |x|
isn't x.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mpmath  # type: ignore[import-untyped]
import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended import NormalizationConfig, latex2sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from sympy.printing.pycode import MpmathPrinter  # type: ignore[import-untyped]

from .algebra import TooLarge
from .compare import same_answer
from .leaves import LONG_DECIMAL_DIGITS, ExactOracle, check_size, plain_number
from .policy import DEFAULT_POLICY, VerifierPolicy

DIGITS = 50
MAX_SUMMANDS = 20_000
_SAME = mpmath.mpf(10) ** -30
_NEARLY_SAME = mpmath.mpf(10) ** -12  # where a decimal became a float of 15 digits, or a value is found by quadrature
_APPROXIMATE = (sympy.Float, sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none", equations=False
)
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_FLOATS = {name: getattr(mpmath.fp, name) for name in dir(mpmath.fp) if not name.startswith("_")}
_FLOATS["mpf"] = lambda value: float(mpmath.mpf(value))
_PRINTER = MpmathPrinter({"fully_qualified_modules": False})
_CONSTANTS = {"e": sympy.E, "i": sympy.I, "pi": sympy.pi}
_WHOLE_ONLY = (
    sympy.floor,
    sympy.ceiling,
    sympy.factorial,
    sympy.binomial,
    sympy.Mod,
    sympy.Sum,
    sympy.Product,
)
# Unrelated fractions; the last two points are negative. Of each row, variable number j takes entry j
# (cyclically).
_POINTS = [
    [sympy.Rational(a, b) for a, b in row]
    for row in (
        [(13, 11), (29, 17), (7, 3), (41, 37), (53, 23), (19, 16)],
        [(31, 9), (5, 7), (17, 13), (3, 8), (23, 6), (47, 29)],
        [(2, 19), (37, 12), (11, 5), (43, 31), (9, 4), (59, 27)],
        [(-17, 14), (8, 13), (-27, 10), (33, 16), (-21, 4), (39, 11)],
        [(-31, 22), (-25, 9), (-3, 7), (-61, 12), (-14, 17), (-2, 3)],
    )
]
_WHOLE_POINTS = [
    [sympy.Integer(n) for n in row]
    for row in (
        [9, 4, 6, 3, 7, 5],
        [4, 9, 3, 7, 5, 8],
        [12, 5, 7, 2, 10, 3],
        [3, 7, 11, 4, 6, 2],
        [8, 2, 5, 10, 3, 6],
    )
]


class Unreadable(Exception):
    """The library can't parse the text."""


def parse(text: str) -> Any:
    """SymPy's reading of normalised text.

    Raises:
        TooLarge: evaluating it could take for ever.
        Unreadable: it isn't mathematics that the library knows.
    """
    check_size(text)
    text = re.sub(r"\\frac ?([0-9]) ?([0-9])", r"\\frac{\1}{\2}", text.replace("**", "^").replace("°", r"^{\circ}"))
    text = re.sub(r"\\frac ?(\{[^{}]*\}) ?([0-9a-z])", r"\\frac\1{\2}", text)
    text = re.sub(r"(\^|\\sqrt) ?\(([^()]*)\)", r"\1{\2}", text)
    text = re.sub(r"\\sqrt ?([0-9a-z])", r"\\sqrt{\1}", text)
    text = re.sub(r"([0-9a-z]|\([^()]*\)) ?! ?\^", r"(\1!)^", text)
    try:
        parsed = latex2sympy(text, normalization_config=_NORMALIZATION, conversion_config=_CONVERSION)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the parser raises bare Exception
        raise Unreadable(text) from error
    if isinstance(parsed, sympy.Basic):
        constants = {s: _CONSTANTS[s.name] for s in parsed.free_symbols if getattr(s, "name", "") in _CONSTANTS}
        return parsed.xreplace(constants)
    return parsed


class SymbolicOracle:
    """Exact algebra first, then numbers at fixed points."""

    def __init__(self, policy: VerifierPolicy = DEFAULT_POLICY) -> None:
        self.policy = policy
        self.exact = ExactOracle(policy)

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether both are the same value."""
        verdict = self.exact.equal(gold, answer)
        if verdict is not None:
            return verdict
        pair = self._expressions(gold, answer)
        if pair is None:
            return None
        values = _values(*pair)
        if values is None:
            return None
        if any(mpmath.isinf(a) or mpmath.isinf(b) for a, b in values):
            return False
        tolerance = max(_tolerance(gold), _tolerance(answer), mpmath.mpf(10) ** -45)
        same = _NEARLY_SAME if any(expression.has(*_APPROXIMATE) for expression in pair) else _SAME
        return all(abs(a - b) <= max(same * max(abs(a), abs(b)), tolerance) for a, b in values)

    def ratio(self, gold: str, answer: str) -> int | None:
        """Sign of the constant c in ``gold = c * answer``; 0 if there is no such constant."""
        verdict = self.exact.ratio(gold, answer)
        if verdict is not None:
            return verdict
        pair = self._expressions(gold, answer)
        values = _values(*pair) if pair else None
        if values is None or any(abs(b) < _SAME or mpmath.isinf(a) or mpmath.isinf(b) for a, b in values):
            return None
        ratios = [a / b for a, b in values]
        constant = all(abs(r - ratios[0]) <= _NEARLY_SAME * abs(ratios[0]) for r in ratios)
        if not constant or mpmath.im(ratios[0]) or abs(ratios[0]) < _SAME:
            return 0
        return 1 if mpmath.re(ratios[0]) > 0 else -1

    def _expressions(self, gold: str, answer: str) -> tuple[sympy.Expr, sympy.Expr] | None:
        try:
            found = (parse(gold), parse(answer))
        except Unreadable:
            return None
        return found if all(isinstance(expression, sympy.Expr) for expression in found) else None


def _tolerance(text: str) -> Any:
    """One unit of the last digit of a long decimal; nothing for all else."""
    number = text if plain_number(text) is not None else ""
    digits = number.lstrip("+-0.").replace(".", "")
    places = len(number.partition(".")[2])
    return mpmath.mpf(10) ** -places if places and len(digits) >= LONG_DECIMAL_DIGITS else mpmath.mpf(0)


def _values(gold: sympy.Expr, answer: sympy.Expr) -> list[tuple[Any, Any]] | None:
    """Both expressions at the points where both are numbers; None if there are too few to tell."""
    symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
    for expression in (gold, answer):
        _check_terms(expression)
    functions = [_numeric(expression, symbols) for expression in (gold, answer)]
    whole = any(expression.has(*_WHOLE_ONLY) or _has_signs(expression) for expression in (gold, answer))
    found = []
    for row in (_WHOLE_POINTS if whole else _POINTS) if symbols else [[sympy.Integer(1)]]:
        point = [row[j % len(row)] + j // len(row) for j in range(len(symbols))]
        left, right = (function(point) for function in functions)
        if left is None or right is None or (mpmath.isinf(left) and mpmath.isinf(right)):
            continue
        if min(row) < 0 and (mpmath.im(left) or mpmath.im(right)):
            continue
        found.append((left, right))
    return found if len(found) >= (2 if symbols else 1) else None


def _has_signs(expression: sympy.Expr) -> bool:
    """(-1)^n and the like, which only whole numbers evaluate as meant."""
    return any(p.base.is_negative and p.exp.free_symbols for p in expression.atoms(sympy.Pow))


def _numeric(expression: sympy.Expr, symbols: list[sympy.Symbol]) -> Callable[[list[Any]], Any]:
    """The expression as a function of numbers in mpmath; None where it has no value, inf where it's huge.

    One pass of straight arithmetic: `evalf` raises its precision as it goes, which takes for ever on nested
    logarithms. A pass in floats goes first: what overflows there could fill the memory with digits.
    """
    summed = expression.has(sympy.Sum, sympy.Product)
    try:
        function = sympy.lambdify(symbols, expression, modules="mpmath")
        rough = None if summed else sympy.lambdify(symbols, expression, modules=[_FLOATS], printer=_PRINTER)
    except MemoryError:
        raise
    except Exception:  # printers raise whatever they like for objects that they don't know
        return lambda point: None

    def evaluate(point: list[Any]) -> Any:
        with mpmath.workdps(DIGITS):
            try:
                if rough is not None and mpmath.isinf(complex(rough(*map(float, point)))):
                    return mpmath.inf
                # The limits of a sum must be Python's integers.
                exact = [int(x) if summed and x.is_Integer else mpmath.mpf(x.p) / x.q for x in point]
                value = mpmath.mpmathify(function(*exact))
            except MemoryError:
                raise
            except OverflowError:
                return mpmath.inf
            except Exception:  # undefined functions, poles: no number here
                return None
            if not mpmath.isfinite(value):
                return mpmath.inf if mpmath.isinf(value) else None
            return value if abs(mpmath.im(value)) > _SAME * abs(value) else mpmath.re(value)

    return evaluate


def _check_terms(expression: sympy.Expr) -> None:
    """Refuses sums and products of many terms; of nested ones the terms multiply."""
    terms = 1
    for node in expression.atoms(sympy.Sum, sympy.Product):
        for _, lower, upper in node.limits:
            span = upper - lower
            terms *= int(span) + 1 if span.is_Integer and span > 0 else 12
    if terms > MAX_SUMMANDS:
        raise TooLarge(f"a sum or product of {terms} terms")


def judge(gold: str, answer: str, policy: VerifierPolicy = DEFAULT_POLICY) -> tuple[bool | None, str]:
    """Verdict on two normalised answers: True, False, or None for an answer that can't be read; and why.

    Raises:
        TooLarge: evaluating one of them could take for ever.
    """
    oracle = SymbolicOracle(policy)
    verdict = same_answer(gold, answer, oracle)
    if verdict is not None:
        return verdict, "the values agree" if verdict else "the values differ"
    try:
        ours = parse(gold)
    except Unreadable:
        return None, "the gold answer can't be read as mathematics, and the texts differ"
    try:
        theirs = parse(answer)
    except Unreadable:
        return None, "the answer can't be read as mathematics"
    if any(expression is sympy.S.true or expression is sympy.S.false for expression in (ours, theirs)):
        return False, "an equation that always or never holds"
    equal = bool(verify([ours], [theirs], strict=True, timeout_seconds=None))
    return equal, f"Math-Verify: {'equal' if equal else 'different'}"
