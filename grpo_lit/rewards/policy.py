"""What the verifier makes of units, percent signs and currencies: policies where no answer is the only right one.

The worker process loads this file too, so it imports nothing but the standard library.
"""

from __future__ import annotations

from typing import NamedTuple

UNITS = ("lenient", "required", "ignored")
PERCENTS = ("either", "value", "number")
CURRENCIES = ("lenient", "required")


class VerifierPolicy(NamedTuple):
    """How an answer's dress is judged; the defaults never lose a right number to it.

    The gold answer's reading comes first; all three concern single quantities, also within lists and tuples.
    """

    units: str = "lenient"
    """``lenient``: a unit on one side only is ignored; two known ones must measure the same and are converted.
    ``required``: where the gold answer has a known unit, the answer must have one too. ``ignored``: only the numbers
    are compared."""
    percent: str = "either"
    """Between ``25%`` and a number without the sign: ``either`` takes 25 and 0.25, ``value`` only 0.25, ``number`` only
    25."""
    currency: str = "lenient"
    """``lenient``: ``$5`` answers 5 and 5 answers ``$5``. ``required``: where the gold answer has a currency, the
    answer must have the same."""

    def problem(self) -> tuple[str, str, str] | None:
        """Name, value and accepted values of the first field that can't be; None if all can."""
        for name, accepted in (("units", UNITS), ("percent", PERCENTS), ("currency", CURRENCIES)):
            if getattr(self, name) not in accepted:
                return name, getattr(self, name), " | ".join(accepted)
        return None


DEFAULT_POLICY = VerifierPolicy()
