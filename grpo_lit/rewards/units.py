"""Units of measure, money and percent at the end (or front) of an answer.

Policy, chosen so that a right number isn't lost to how it was dressed, and a wrong one isn't saved by it:

* a unit on one side only is ignored: ``60 km/h`` answers gold ``60``;
* two known units must measure the same thing, and are converted: ``1.5 hours`` answers gold ``90 minutes``,
  ``9 feet`` doesn't answer gold ``9 inches``;
* a unit that isn't in the table is ignored;
* percent: with a sign on one side only, ``25`` and ``0.25`` both answer gold ``25%``, and ``25%`` answers
  both.

`grpo_lit.rewards.policy.VerifierPolicy` makes each of them stricter.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

PERCENT = "percent"
CURRENCIES = ("usd", "eur", "gbp", "yuan")
# Of each dimension: names of a unit, and how many of the base unit it holds.
_TABLE: dict[str, dict[str, str]] = {
    "length": {
        "m meter metre": "1",
        "cm centimeter centimetre": "1/100",
        "mm millimeter millimetre": "1/1000",
    }
    | {"km kilometer kilometre": "1000", "in inch": "127/5000", "ft foot feet": "381/1250"}
    | {"yd yard": "1143/1250", "mi mile": "201168/125"},
    "mass": {"g gram": "1", "kg kilogram": "1000", "mg milligram": "1/1000", "ton": "1000000"}
    | {"lb lbs pound": "45359237/100000", "oz ounce": "45359237/1600000"},
    "time": {"s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800"}
    | {"month": "2629800", "yr year": "31557600"},
    "volume": {
        "l liter litre": "1",
        "ml milliliter millilitre": "1/1000",
        "gal gallon": "473176473/125000000",
    },
    "angle": {"° deg degree": "1"},
    "radians": {"rad radian": "1"},
    "usd": {"$ usd dollar buck": "1", "¢ cent": "1/100"},
    "eur": {"€ eur euro": "1"},
    "gbp": {"£ gbp": "1"},
    "yuan": {"yuan rmb": "1"},
    PERCENT: {"% percent pct percentage": "1"},
    "energy": {"j joule": "1", "kj": "1000"},
    "speed": {"kmph kph kmh": "5/18", "mph": "44704/100000"},
}


class Unit(NamedTuple):
    """What is measured, as sorted (dimension, power) pairs, and how many base units it holds."""

    dimensions: tuple[tuple[str, int], ...]
    factor: Fraction


_UNITS = {
    name: Unit(((dimension, 1),), Fraction(factor))
    for dimension, units in _TABLE.items()
    for names, factor in units.items()
    for name in names.split()
}
_NUMBER = r"-?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:/[0-9]+)?"
_MONEY_IN_FRONT = re.compile(r"(-?) ?(?:([$€£¥₹])|(?:US|USD|Rs\.?) ?(?=[0-9$])\$?) ?(.+)")
_TEXT_AT_END = re.compile(r"((?: ?[/·]? ?\\text\{[^{}]*\}(?: ?\^ ?\{?-?[0-9]\}?)?)+)$")
_SIGN_AT_END = re.compile(r" ?(%|°|€|£|¥|¢|\$)$")
_WORDS_AT_END = re.compile(rf"({_NUMBER}|.*[0-9)}}]|.*\\pi) ?((?:[a-zA-Z°][a-zA-Z .'/°-]*)(?:\^ ?\{{?-?[0-9]\}}?)?)")
_NOT_A_UNIT = re.compile(
    r"\b(?:or|and|not|but|to|than|plus|minus|times|squared|cubed|hundred|thousand|million|billion|trillion|half|either"
    r"|maybe|if|is|are|was|e|i|x|y|z|n|pi|mod|choose|over|factorial)\b",
    re.IGNORECASE,
)
_POWERS = [
    (re.compile(r"\b(?:square|sq\.?) ([a-z]+)"), r"\1^2"),
    (re.compile(r"\b(?:cubic|cu\.?) ([a-z]+)"), r"\1^3"),
]


def unit_named(text: str) -> Unit | None:
    """Reads ``km/h``, ``square inches`` or ``m^2``; None when a part of it isn't in the table."""
    text = text.lower().replace("\\text", " ").replace("{", "").replace("}", "").replace(" per ", "/").strip(" .")
    for pattern, new in _POWERS:
        text = pattern.sub(new, text)
    dimensions: dict[str, int] = {}
    factor = Fraction(1)
    for position, part in enumerate(text.split("/")):
        for word in re.sub(r" ?\^ ?", "^", part).replace("·", " ").split():
            name, _, power_text = word.strip(".").partition("^")
            unit = _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or _UNITS.get(name.removesuffix("es"))
            if unit is None or (power_text and not power_text.lstrip("-").isdigit()):
                return None
            power = int(power_text or 1) * (-1 if position else 1)
            for dimension, own in unit.dimensions:
                dimensions[dimension] = dimensions.get(dimension, 0) + own * power
            factor *= unit.factor**power
    return Unit(tuple(sorted(dimensions.items())), factor) if dimensions else None


def split_unit(text: str) -> tuple[str, str | None]:
    r"""Splits a normalised answer into what is measured and its unit as written.

    >>> split_unit(r"15\text{cm}^2"), split_unit("$60"), split_unit("72 cubic inches"), split_unit("5x")
    (('15', '\\text{cm}^2'), ('60', '$'), ('72', 'cubic inches'), ('5x', None))
    """
    money = _MONEY_IN_FRONT.fullmatch(text)
    if money:
        rest, _ = split_unit(money[3])
        return money[1] + rest, money[2] or "$"
    sign = _SIGN_AT_END.search(text)
    if sign and sign.start():
        return text[: sign.start()], sign[1]
    worded = _TEXT_AT_END.search(text)
    if worded and worded.start() and not _NOT_A_UNIT.search(worded[1]):
        return text[: worded.start()].rstrip(), worded[1].strip()
    words = _WORDS_AT_END.fullmatch(text)
    if words and not _NOT_A_UNIT.search(words[2]):
        plain_number = re.fullmatch(_NUMBER, words[1]) is not None
        unit = words[2].strip()
        if (plain_number and _is_unit_like(unit)) or (len(unit) > 1 and unit_named(unit)):
            return words[1].rstrip(), unit
    return text, None


def is_currency(unit: str) -> bool:
    """Whether a unit as written is money."""
    if unit in "¥₹":
        return True
    known = unit_named(unit)
    return known is not None and known.dimensions[0][0] in CURRENCIES


def _is_unit_like(words: str) -> bool:
    """Anything but a product of variables: three letters or more, or a unit that is in the table."""
    return len(words) > 2 or words.lower() in _UNITS
