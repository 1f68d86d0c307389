r"""Exact arithmetic on answers: rational functions with square roots, in pure Python and bounded time.

A `Value` is a quotient of two polynomials with rational coefficients, whose variables are letters, ``\pi`` and ``e``,
and whose monomials may carry the root of one squarefree integer. Such roots are linearly independent over the
rationals (Besicovitch 1940), so two values are equal exactly if the cross products of their polynomials are: no
rounding, no simplifier, and a "no" is as certain as a "yes". What lies outside (functions, symbolic exponents, cube
roots that stay roots) raises `Undecided` and is left to SymPy.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

MAX_BITS = 30_000  # enough for 2006!; a product of two such numbers takes microseconds
MAX_TERMS = 300
MAX_DEPTH = 40
MAX_CHARS = 600

Monomial = tuple[
    int, tuple[tuple[str, int], ...]
]  # (squarefree number under the root, ((variable, power), ...))
Polynomial = dict[Monomial, Fraction]
_ONE: Monomial = (1, ())


class Undecided(Exception):
    """The text isn't exact algebra as known here; another method may still read it."""


class TooLarge(Exception):
    """The text asks for a number or a nesting that no honest answer needs; nothing should evaluate it."""


@dataclass(frozen=True)
class Value:
    """``numerator / denominator``; the denominator is never empty (zero)."""

    numerator: Polynomial
    denominator: Polynomial

    @property
    def rational(self) -> Fraction | None:
        """The value as a fraction if it is one."""
        if self.denominator != {_ONE: 1}:
            return None
        if not self.numerator:
            return Fraction(0)
        return self.numerator.get(_ONE) if len(self.numerator) == 1 else None

    def same_as(self, other: Value) -> bool:
        """Whether both are the same function of their variables."""
        return _times(self.numerator, other.denominator) == _times(other.numerator, self.denominator)

    def ratio_to(self, other: Value) -> Fraction | None:
        """The rational c with ``self = c * other``; None if there is none."""
        left, right = _times(self.numerator, other.denominator), _times(other.numerator, self.denominator)
        if not left or not right or left.keys() != right.keys():
            return None
        ratios = {left[key] / right[key] for key in left}
        return ratios.pop() if len(ratios) == 1 else None

    def approximate(self) -> float | None:
        """A float if the value is a real number that fits one."""
        try:
            return _approximate(self.numerator) / _approximate(self.denominator)
        except (Undecided, OverflowError, ZeroDivisionError):
            return None


def number(value: Fraction | int) -> Value:
    """A rational number as a `Value`."""
    value = Fraction(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooLarge("a number of more than 30,000 bits")
    return Value({_ONE: value} if value else {}, {_ONE: Fraction(1)})


def variable(name: str) -> Value:
    """A letter, a Greek letter or a subscripted name."""
    return Value({(1, ((name, 1),)): Fraction(1)}, {_ONE: Fraction(1)})


def _approximate(polynomial: Polynomial) -> float:
    total = 0.0
    for (root, powers), coefficient in polynomial.items():
        term = float(coefficient) * math.sqrt(root)
        for name, power in powers:
            if name not in (r"\pi", "e"):
                raise Undecided(name)
            term *= (math.pi if name == r"\pi" else math.e) ** power
        total += term
    return total


def _collect(terms: list[tuple[Monomial, Fraction]]) -> Polynomial:
    total: Polynomial = {}
    for monomial, coefficient in terms:
        total[monomial] = total.get(monomial, Fraction(0)) + coefficient
    total = {monomial: c for monomial, c in total.items() if c}
    if len(total) > MAX_TERMS:
        raise TooLarge(f"more than {MAX_TERMS} terms")
    return total


def _times_monomial(a: Monomial, b: Monomial) -> tuple[Monomial, int]:
    common = math.gcd(a[0], b[0])
    factor = common
    powers = dict(a[1])
    for name, power in b[1]:
        powers[name] = powers.get(name, 0) + power
    if (
        "i" in powers
    ):  # the imaginary unit; as a mere letter, i*i = -1 can't make unequal answers equal in practice
        quarter = powers["i"] % 4
        factor *= -1 if quarter >= 2 else 1
        powers["i"] = quarter % 2
    return (a[0] // common * (b[0] // common), tuple(sorted((n, p) for n, p in powers.items() if p))), factor


def _times(a: Polynomial, b: Polynomial) -> Polynomial:
    if len(a) * len(b) > 20 * MAX_TERMS:
        raise TooLarge("a product of long polynomials")
    terms = []
    for left, x in a.items():
        for right, y in b.items():
            if x.numerator.bit_length() + y.numerator.bit_length() > 3 * MAX_BITS:
                raise TooLarge("a product of huge numbers")
            monomial, factor = _times_monomial(left, right)
            terms.append((monomial, x * y * factor))
    return _collect(terms)


def _quotient(numerator: Polynomial, denominator: Polynomial) -> Value:
    if not denominator:
        raise Undecided("a division by zero")
    if len(denominator) == 1:
        ((root, powers), coefficient) = next(iter(denominator.items()))
        # 1 / (c sqrt(r) m) = sqrt(r) / (c r) / m
        inverse: Polynomial = {(root, tuple((n, -p) for n, p in powers)): 1 / (coefficient * root)}
        return Value(_times(numerator, inverse), {_ONE: Fraction(1)})
    return Value(numerator, denominator)


def add(a: Value, b: Value) -> Value:
    """``a + b``."""
    if a.denominator == b.denominator:
        return Value(_collect([*a.numerator.items(), *b.numerator.items()]), a.denominator)
    left, right = _times(a.numerator, b.denominator), _times(b.numerator, a.denominator)
    return Value(_collect([*left.items(), *right.items()]), _times(a.denominator, b.denominator))


def multiply(a: Value, b: Value) -> Value:
    """``a * b``."""
    return _quotient(_times(a.numerator, b.numerator), _times(a.denominator, b.denominator))


def divide(a: Value, b: Value) -> Value:
    """``a / b``."""
    return _quotient(_times(a.numerator, b.denominator), _times(a.denominator, b.numerator))


def power(base: Value, exponent: Value) -> Value:
    """``base ** exponent`` for a rational exponent; integer ones for anything, half ones for rationals."""
    rational = exponent.rational
    if rational is None:
        raise Undecided("a symbolic exponent")
    if rational.denominator != 1:
        if base.rational is None:
            raise Undecided("a root of an expression")
        return root(number(_integer_power(base, rational.numerator).rational or 0), rational.denominator)
    return _integer_power(base, rational.numerator)


def _integer_power(base: Value, n: int) -> Value:
    if n < 0:
        return divide(number(1), _integer_power(base, -n))
    sizes = [max(c.numerator.bit_length(), c.denominator.bit_length()) for c in base.numerator.values()]
    single = len(base.numerator) <= 1 and len(base.denominator) == 1
    if n > (10**6 if single else 40) or max(sizes, default=1) * n > MAX_BITS + n:
        raise TooLarge(f"the power {n if n < 10**9 else 'above 10^9'}")
    result = number(1)
    while n:
        if n & 1:
            result = multiply(result, base)
        n >>= 1
        base = multiply(base, base) if n else base
    return result


def root(radicand: Value, degree: int) -> Value:
    """The root of a rational: any square root, and other roots where they come out rational."""
    value = radicand.rational
    if value is None or not 1 <= degree <= 64:
        raise Undecided("a root of an expression")
    if degree == 1 or not value:
        return number(value)
    if value < 0 and degree % 2 == 0:
        if degree != 2:
            raise Undecided("an even root of a negative number")
        return multiply(variable("i"), root(number(-value), 2))
    sign = -1 if value < 0 else 1
    over, under = (_exact_root(part, degree) for part in (abs(value.numerator), value.denominator))
    if over is not None and under is not None:
        return number(Fraction(sign * over, under))
    if degree != 2:
        raise Undecided("a root that isn't rational")
    outside, inside = _squarefree(value.numerator * value.denominator)
    return Value({(inside, ()): Fraction(outside, value.denominator)}, {_ONE: Fraction(1)})


def _exact_root(n: int, degree: int) -> int | None:
    guess = math.isqrt(n) if degree == 2 else round(n ** (1 / degree)) if n < 2**900 else 0
    return next((g for g in (guess - 1, guess, guess + 1) if g >= 0 and g**degree == n), None)


def _squarefree(n: int) -> tuple[int, int]:
    """``(a, b)`` with ``n = a^2 b`` and b squarefree."""
    if n > 10**10:
        raise Undecided("a root of a large number")
    outside, inside, divisor = 1, 1, 2
    while divisor * divisor <= n:
        while n % (divisor * divisor) == 0:
            n //= divisor * divisor
            outside *= divisor
        if n % divisor == 0:
            n //= divisor
            inside *= divisor
        divisor += 1
    return outside, inside * n


# ---- reading ---------------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    r" *(?:(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+(?![0-9a-zA-Z.^]))?)"
    r"|(?P<command>\\[a-zA-Z]+)|(?P<letter>[a-zA-Z])|(?P<sign>\*\*|[-+*/^_(){}\[\]|!%]))"
)
_GREEK = set(
    "alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi omega Delta Omega Phi".split()
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
            elif kind in ("letter", "command") or token in ("(", "[", "{"):
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
        r"""What a command or ``^`` applies to: a group, or one token (of a number one digit, as TeX has it)."""
        if self.kind() == "number" and self.peek().isdigit() and len(self.peek()) > 1:
            first, rest = self.peek()[0], self.peek()[1:]
            self.tokens[self.position : self.position + 1] = [("number", first), ("number", rest)]
        return self.atom()

    def atom(self) -> Value:
        kind, token = self.kind(), self.take()
        if kind == "number":
            return self._decimal(token)
        if kind == "letter" or (kind == "command" and token[1:] in _GREEK):
            return self._name(token)
        if token in ("(", "[", "{"):
            value = self.sum()
            self.take({"(": ")", "[": "]", "{": "}"}[token])
            return value
        if token == "|":
            return self._absolute()
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

    def _name(self, token: str) -> Value:
        if self.peek() == "_":
            self.take()
            if self.peek() == "{":
                self.take()
                subscript = ""
                while self.peek() not in ("}", ""):
                    subscript += self.take()
                self.take("}")
            else:
                subscript = self.take()
            token = f"{token}_{subscript}"
        if self.peek() == "(" and token[0] in _FUNCTION_LETTERS:
            raise Undecided("a function")
        return variable(token)

    def _absolute(self) -> Value:
        value = self.sum()
        self.take("|")
        size = value.approximate()
        if size is None or abs(size) < 1e-9:
            raise Undecided("an absolute value")
        return value if size > 0 else multiply(number(-1), value)

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
