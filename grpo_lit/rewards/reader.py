r"""Reads normalised text as exact algebra.

>>> read(r"\frac{\sqrt{3}}{3}").same_as(read(r"1/\sqrt{3}"))
True
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import lru_cache

from .algebra import TooLarge, Undecided, Value, add, divide, multiply, number, power, root, variable

MAX_DEPTH = 40
MAX_CHARS = 600

GREEK = r"alpha|beta|gamma|delta|epsilon|theta|lambda|mu|nu|rho|sigma|tau|phi|omega|Delta|Omega|Phi"
_TOKEN = re.compile(
    r" *(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+(?![0-9a-zA-Z.^]))?)"
    rf"|(?P<name>(?:[a-zA-Z]|\\(?:{GREEK})(?![a-zA-Z]))(?: ?_ ?(?:[0-9]+|[a-zA-Z]|\{{[^{{}}]*\}}))?)"
    r"|(?P<command>\\[a-zA-Z]+)|(?P<sign>\*\*|[-+*/^_(){}\[\]|!%]))"
)
# Before a bracket these are read as functions, which algebra knows nothing of.
_FUNCTION_LETTERS = set("fghuyFGHPQTW")
_MIXED = re.compile(r"(?<![0-9a-zA-Z.^_/}])([0-9]+) ([0-9]+) ?/ ?([0-9]+)(?![0-9a-zA-Z.^!])")


class _Reader:
    """Recursive descent over one expression; every method leaves `position` behind what it read."""

    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        self.position = 0
        self.depth = 0
        start, text = 0, text.rstrip()
        while start < len(text):
            match = _TOKEN.match(text, start)
            if match is None or match.lastgroup is None:
                raise Undecided(f"the character {text[start : start + 2].strip()!r}")
            self.tokens.append((match.lastgroup, match[match.lastgroup]))
            start = match.end()

    def peek(self) -> str:
        return self.tokens[self.position][1] if self.position < len(self.tokens) else ""

    def kind(self) -> str:
        return self.tokens[self.position][0] if self.position < len(self.tokens) else "end"

    def take(self, expected: str | None = None) -> str:
        token = self.peek()
        if not token or (expected is not None and token != expected):
            raise Undecided(f"{token or 'the end'} where {expected or 'something else'} should be")
        self.position += 1
        return token

    def sum(self) -> Value:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise TooLarge(f"brackets nested deeper than {MAX_DEPTH}")
        sign = -1 if self.peek() == "-" else 1
        if self.peek() in ("-", "+"):
            self.take()
        total = multiply(number(sign), self.product())
        while self.peek() in ("+", "-"):
            sign = -1 if self.take() == "-" else 1
            total = add(total, multiply(number(sign), self.product()))
        self.depth -= 1
        return total

    def product(self) -> Value:
        result, after_number = self.power(), self._was_number()
        while True:
            token, kind = self.peek(), self.kind()
            if token in ("*", r"\cdot", r"\times", "/", r"\div"):
                self.take()
                sign = -1 if self.peek() == "-" else 1
                if self.peek() in ("-", "+"):
                    self.take()
                operation = divide if token in ("/", r"\div") else multiply
                result = operation(result, multiply(number(sign), self.power()))
            elif kind == "number":
                raise Undecided("two numbers side by side")
            elif token == r"\frac" and after_number:
                fraction = self.power()
                mixed = result.rational is not None and result.rational.denominator == 1
                # 2\frac{1}{3} is a mixed number, 2\frac{x}{3} a product.
                result = (add if mixed and fraction.rational is not None else multiply)(result, fraction)
            elif kind in ("name", "command") or token in ("(", "[", "{"):
                result = multiply(result, self.power())
            else:
                return result
            after_number = False

    def _was_number(self) -> bool:
        return self.tokens[self.position - 1][0] == "number" and (
            self.position < 2 or self.tokens[self.position - 2][1] not in ("^", "**")
        )

    def power(self) -> Value:
        base = self.atom()
        while self.peek() in ("^", "**", "!", "%"):
            token = self.take()
            if token == "!":
                base = _factorial(base)
            elif token == "%":
                base = multiply(base, number(Fraction(1, 100)))
            else:
                sign = -1 if self.peek() == "-" else 1
                if sign < 0:
                    self.take()
                exponent = self.argument() if token == "^" else self.power()
                if self.peek() in ("^", "**"):  # towers associate to the right
                    self.take()
                    exponent = power(exponent, self.power())
                base = power(base, multiply(number(sign), exponent))
        return base

    def argument(self) -> Value:
        r"""What a command or ``^`` applies to: a group or a token; of a number one digit, as in TeX."""
        if self.kind() == "number" and self.peek().isdigit() and len(self.peek()) > 1:
            first, rest = self.peek()[0], self.peek()[1:]
            self.tokens[self.position : self.position + 1] = [("number", first), ("number", rest)]
        return self.atom()

    def atom(self) -> Value:
        kind, token = self.kind(), self.take()
        if kind == "number":
            return self._decimal(token)
        if kind == "name":
            if self.peek() == "(" and token[0] in _FUNCTION_LETTERS:
                raise Undecided("a function")
            return variable(re.sub("[ {}]", "", token))
        if token in ("(", "[", "{"):
            value = self.sum()
            self.take({"(": ")", "[": "]", "{": "}"}[token])
            return value
        if token == r"\pi":
            return variable(r"\pi")
        if token == r"\frac":
            over = self.argument()
            return divide(over, self.argument())
        if token == r"\binom":
            over = self.argument()
            return _binomial(over, self.argument())
        if token == r"\sqrt":
            return self._root()
        raise Undecided(token)

    def _decimal(self, token: str) -> Value:
        mantissa, _, exponent = token.lower().partition("e")
        if len(token) > 4000 or len(exponent) > 4:
            raise TooLarge("a number of thousands of digits")
        value = Fraction(mantissa) * Fraction(10) ** int(exponent or 0)
        if self.peek() == r"\overline" and "." in token:
            self.take()
            self.take("{")
            digits = self.take()
            self.take("}")
            if not digits.isdigit():
                raise Undecided("a repeating part that isn't digits")
            places = len(token.partition(".")[2])
            value += Fraction(int(digits), (10 ** len(digits) - 1) * 10**places)
        return number(value)

    def _root(self) -> Value:
        degree = number(2)
        if self.peek() == "[":
            self.take()
            degree = self.sum()
            self.take("]")
        radicand = self.argument()
        if degree.rational is None or degree.rational.denominator != 1:
            raise Undecided("a root of no integer degree")
        return root(radicand, int(degree.rational))


def _whole(value: Value, limit: int) -> int:
    if value.rational is None or value.rational.denominator != 1 or value.rational < 0:
        raise Undecided("a factorial or binomial of an expression")
    if value.rational > limit:
        raise TooLarge(f"a factorial or binomial above {limit}")
    return int(value.rational)


def _factorial(value: Value) -> Value:
    return number(math.factorial(_whole(value, 2800)))


def _binomial(over: Value, under: Value) -> Value:
    return number(math.comb(_whole(over, 5000), _whole(under, 5000)))


@lru_cache(maxsize=4096)
def read(text: str) -> Value:
    r"""Reads a normalised expression.

    >>> read(r"\frac{\sqrt{3}}{3}").same_as(read(r"1/\sqrt{3}"))
    True
    >>> read("12\\frac{3}{5}").rational
    Fraction(63, 5)

    Raises:
        Undecided: it isn't exact algebra.
        TooLarge: evaluating it would take more than milliseconds.
    """
    if len(text) > MAX_CHARS:
        raise TooLarge(f"an expression of {len(text)} characters")
    reader = _Reader(_MIXED.sub(r"(\1+\2/\3)", text))
    value = reader.sum()
    if reader.position < len(reader.tokens):
        raise Undecided(f"{reader.peek()} after the end")
    return value
