"""Whether two single values are the same answer: words, numbers in a base, quantities, plain numbers.

The policies are these (units and percent: see `grpo_lit.rewards.units`):

* words are compared without case and leading article; ``five`` is 5, ``5 million`` is 5000000;
* a decimal is what it says: 0.3333 isn't 1/3 and 3.14159 isn't pi. Only one with ten significant digits or
  more, as printed by a program, answers an exact gold that it rounds;
* a base written as a subscript must agree, but may be left out: ``52`` answers gold ``52_8``.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import Protocol

from .algebra import TooLarge, Undecided, Value
from .normalize import canonical
from .policy import DEFAULT_POLICY, VerifierPolicy
from .reader import MAX_CHARS, read
from .units import PERCENT, is_currency, split_unit, unit_named

LONG_DECIMAL_DIGITS = 10
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_FRACTION = re.compile(r"[-+]?[0-9]{1,40}/[0-9]{1,40}")
_BASED = re.compile(r"([0-9A-F]+) ?_ ?(?:\{ ?([0-9]{1,2}) ?\}|([0-9]))|([0-9A-F]+)")
_WORDS = re.compile(r"(?!.*\b[a-zA-Z] ?- ?[a-zA-Z]\b)[a-zA-Z][a-zA-Z' .-]*[a-zA-Z]")  # x-x is a difference
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_SCALE = re.compile(
    r"(-?\$? ?[0-9][0-9.]*) ?(?:\\text\{ ?)?(dozen|hundred|thousand|million|billion|trillion)(?: |\}|$)(.*)"
)
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SMALL = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_NUMBER_WORDS = {word: n for n, word in enumerate(f"{_SMALL} seventeen eighteen nineteen".split())}
_TENS = dict(twenty=20, thirty=30, forty=40, fifty=50, sixty=60, seventy=70, eighty=80, ninety=90)
_PARTS = dict(half=2, third=3, quarter=4, fourth=4, fifth=5, sixth=6, eighth=8, tenth=10)
_PART = re.compile(rf"(?:({'|'.join(_NUMBER_WORDS)})[ -]|(?=half))({'|'.join(_PARTS)})s?")


class Oracle(Protocol):
    """Decides about values, given as normalised text. None means that it can't tell."""

    policy: VerifierPolicy

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether both are the same value."""

    def ratio(self, gold: str, answer: str) -> int | None:
        """Sign of the constant c in ``gold = c * answer``; 0 if there is no such constant."""


class ExactOracle:
    """Exact algebra in this process; see `grpo_lit.rewards.algebra`."""

    def __init__(self, policy: VerifierPolicy = DEFAULT_POLICY) -> None:
        self.policy = policy

    def equal(self, gold: str, answer: str) -> bool | None:
        """Whether both are the same value; None if one of them isn't exact algebra."""
        left, right = _read_both(gold, answer)
        if left is None or right is None:
            return None
        return left.same_as(right) or rounds(answer, left) or rounds(gold, right)

    def ratio(self, gold: str, answer: str) -> int | None:
        """Sign of the constant c in ``gold = c * answer``; 0 if there is no such constant."""
        left, right = _read_both(gold, answer)
        if left is None or right is None:
            return None
        ratio = left.ratio_to(right)
        return 0 if ratio is None else 1 if ratio > 0 else -1


def _read_both(*texts: str) -> list[Value | None]:
    # Both, even if the first can't be read: what is too large must be found here, not in the worker.
    values: list[Value | None] = []
    for text in texts:
        try:
            values.append(read(text))
        except Undecided:
            values.append(None)
    return values


def plain_number(text: str) -> Fraction | None:
    """An integer, decimal or fraction of integers, read exactly; None for anything else."""
    if len(text) > MAX_CHARS:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(Decimal(text))
    if _FRACTION.fullmatch(text) and int(text.partition("/")[2]):
        return Fraction(text)
    return None


def rounds(decimal: str, exact: Value, least: int = LONG_DECIMAL_DIGITS) -> bool:
    """Whether a decimal of at least so many digits is ``exact`` to within one unit of its last digit."""
    digits = decimal.lstrip("+-0.").replace(".", "")
    if not _NUMBER.fullmatch(decimal) or "." not in decimal or len(digits) < least:
        return False
    value = Fraction(Decimal(decimal))
    if exact.rational is not None:
        return abs(value - exact.rational) <= Fraction(1, 10 ** len(decimal.partition(".")[2]))
    size = exact.approximate()
    places = len(decimal.partition(".")[2])
    return size is not None and abs(float(value) - size) <= max(10.0**-places, 1e-14 * abs(size))


def rounds_text(decimal: str, exact: str) -> bool:
    """Whether a decimal of any length is what a text says to within one unit of its last digit."""
    value = _read_both(exact)[0]
    return value is not None and rounds(decimal, value, 1)


def same_leaf(gold: str, answer: str, oracle: Oracle) -> bool | None:
    """Compares two single values; None if the oracle can't tell."""
    if canonical(gold) == canonical(answer):
        return True
    if r"\infty" in gold or r"\infty" in answer:
        return canonical(gold).lstrip("+") == canonical(answer).lstrip("+")
    left, right = plain_number(gold), plain_number(answer)
    if left is not None and left == right:
        return True
    for compare in (_same_words, _same_in_base):
        verdict = compare(gold, answer)
        if verdict is not None:
            return verdict
    return _same_quantity(number_word(gold), number_word(answer), oracle)


def plain_words(text: str) -> str | None:
    """An answer in words, lower-cased and without its article; None if it isn't one."""
    words = " ".join(_TEXT.sub(r" \1 ", text).split()).strip("()\"'.")
    if not _WORDS.fullmatch(words):
        return None
    return re.sub(r"^(?:the|a|an) ", "", words.lower()).strip()


def _same_words(gold: str, answer: str) -> bool | None:
    left, right = plain_words(gold), plain_words(answer)
    if left is None or right is None:
        return None
    if left == right:
        return True
    if " " not in left + right and "text" not in gold + answer and sorted(left) == sorted(right):
        return None  # perhaps products of variables: ab and ba
    return number_word(left) == number_word(right)


def _same_in_base(gold: str, answer: str) -> bool | None:
    left, right = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if not left or not right or (left[4] and right[4]):
        return None
    digits = (left[1] or left[4]).lstrip("0") == (right[1] or right[4]).lstrip("0")
    bases = {base for base in (left[2] or left[3], right[2] or right[3]) if base}
    return digits and len(bases) == 1


def number_word(text: str) -> str:
    """Number words as digits: ``twenty-one`` is 21, ``two thirds`` 2/3, ``5 million`` 5000000; others as they are."""
    words = plain_words(text)
    if words is not None:
        part = _PART.fullmatch(words)
        if part:
            return f"{_NUMBER_WORDS.get(part[1], 1)}/{_PARTS[part[2]]}"
        return _spelled(words) or text
    scale = _SCALE.fullmatch(text)
    if scale and scale[1].lstrip("-$ ").count(".") <= 1:
        sign = scale[1].rstrip("0123456789.")
        amount = Decimal(scale[1][len(sign) :].rstrip(".") or 0) * _SCALES[scale[2]]
        return f"{sign}{amount.normalize():f} {scale[3].strip(' }')}".strip()
    return text


def _spelled(words: str) -> str | None:
    """Digits and unit of words that begin with a number, as in "two hundred five apples"; None of others."""
    total, group = 0, 0
    room, scale = 1000, 10**15  # a word that is added is below room, one that multiplies below scale
    split = words.replace("-", " ").split()
    taken = 0
    for word in split:
        value = _NUMBER_WORDS.get(word, _TENS.get(word))
        factor = _SCALES.get(word)
        if value is not None and value < room:
            group, room = group + value, 10 if word in _TENS else 0
        elif factor == 100 and group < 10 and room in (0, 1000):
            group, room = 100 * (group or 1), 100
        elif factor is not None and factor != 100 and factor < scale:
            total, group, room, scale = total + factor * (group or 1), 0, 1000, factor
        else:
            break
        taken += 1
    rest = split[taken:]
    if not taken or not {*_NUMBER_WORDS, *_TENS, *_SCALES}.isdisjoint(rest):
        return None
    return " ".join([str(total + group), *rest])


def _same_quantity(gold: str, answer: str, oracle: Oracle) -> bool | None:
    (left, left_unit), (right, right_unit) = split_unit(gold), split_unit(answer)
    gold_unit = unit_named(left_unit) if left_unit else None
    answer_unit = unit_named(right_unit) if right_unit else None
    kinds = {unit.dimensions for unit in (gold_unit, answer_unit) if unit}
    if kinds == {((PERCENT, 1),)} and not (left_unit and right_unit):
        bare, marked = (right, left) if left_unit else (left, right)
        return _same_percent(bare, marked, oracle)
    policy = oracle.policy
    if left_unit and is_currency(left_unit):
        if policy.currency == "required" and not (right_unit and is_currency(right_unit)):
            return False
    elif policy.units == "ignored":
        return _same_value(left, right, oracle)
    elif policy.units == "required" and gold_unit and not answer_unit:
        return False
    if len(kinds) == 2:
        return False
    if gold_unit and answer_unit and gold_unit.factor != answer_unit.factor:
        scale = gold_unit.factor / answer_unit.factor
        left = rf"({left})\cdot\frac{{{scale.numerator}}}{{{scale.denominator}}}"
    return _same_value(left, right, oracle)


def _same_percent(bare: str, marked: str, oracle: Oracle) -> bool | None:
    """A number without the sign against one with it."""
    policy = oracle.policy.percent
    as_number = False if policy == "value" else _same_value(bare, marked, oracle)
    if as_number or policy == "number":
        return as_number
    as_value = _same_value(bare, f"({marked})/100", oracle)
    return as_value if as_value or as_number is False else None


def _same_value(gold: str, answer: str, oracle: Oracle) -> bool | None:
    left, right = plain_number(gold), plain_number(answer)
    if left is not None and right is not None and left == right:
        return True
    return oracle.equal(gold, answer)


def check_size(text: str) -> None:
    """Refuses towers and huge factorials inside what algebra can't read, before SymPy would evaluate them.

    Raises:
        TooLarge: naming what is too large.
    """
    if len(text) > MAX_CHARS:
        raise TooLarge(f"an expression of {len(text)} characters")
    if re.search(r"[0-9]{400}", text):
        raise TooLarge("a number of hundreds of digits")
    depth = powers = 0
    groups: list[bool] = []  # for each open bracket: is it a power's?
    for index, character in enumerate(text):
        if character in "([{":
            groups.append(text[:index].rstrip().endswith(("^", "**")))
        elif character in ")]}" and groups:
            groups.pop()
        depth, powers = max(depth, len(groups)), max(powers, sum(groups))
    if depth > 15:
        raise TooLarge("deep nesting")
    if powers > 2:
        raise TooLarge("powers of powers of powers")
    if re.search(r"(?:\^|\*\*)[ {(]*-?[0-9]{5}|[0-9]{5} ?!|! ?\)* ?!|\)[ }]*!\)*\^", text):
        raise TooLarge("a huge power or factorial")
    if re.search(r"(?:\^|\*\*)[ {(]*[0-9.]+[ })]*(?:\^|\*\*|!)[ {(]*[0-9]", text):
        raise TooLarge("a tower of powers")
    if len(re.findall(r"\^|\*\*", text)) > 30 or text.count("!") > 12:
        raise TooLarge("too many powers or factorials")
