r"""Exact arithmetic on answers: rational functions with square roots, in pure Python and bounded time.

A `Value` is a quotient of two polynomials with rational coefficients, whose variables are letters, ``\pi``
and ``e``, and whose monomials may carry the root of one squarefree integer. Such roots are linearly
independent over the rationals (Besicovitch 1940), so two values are equal exactly if the cross products of
their polynomials are: no rounding, no simplifier, and a "no" is as certain as a "yes". What lies outside
(functions, symbolic exponents, cube roots that stay roots) raises `Undecided` and is left to SymPy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

MAX_BITS = 30_000  # enough for 2006!; a product of two such numbers takes microseconds
MAX_TERMS = 300

Monomial = tuple[int, tuple[tuple[str, int], ...]]  # (squarefree number under the root, ((variable, power), ...))
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
    if "i" in powers:  # the imaginary unit; as a mere letter, i*i = -1 can't make unequal answers equal in practice
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
