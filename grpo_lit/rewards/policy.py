"""What the verifier makes of units, percent signs and currencies: policies where no answer is the only right one.

The worker process loads this file too, so it imports nothing but the standard library.
"""

from __future__ import annotations

from typing import NamedTuple

UNITS = ("lenient", "required", "ignored")
PERCENTS = ("either", "value", "number")
CURRENCIES = ("lenient", "required")
CALCULATIONS = ("refused", "accepted")


class VerifierPolicy(NamedTuple):
    """How an answer's dress is judged; the defaults never lose a right number to it.

    The gold answer's reading comes first; the first three concern single quantities, also within lists and tuples.
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
    calculations: str = "refused"
    """Where the gold answer is a plain number: ``refused`` judges what a calculation was worked out to, and ``3+5`` is
    no answer to 8; ``accepted`` takes it, as Math-Verify does. A policy that is trained by it learns to repeat the
    question."""

    def problem(self) -> tuple[str, str, str] | None:
        """Name, value and accepted values of the first field that can't be; None if all can."""
        for name, accepted in zip(self._fields, (UNITS, PERCENTS, CURRENCIES, CALCULATIONS), strict=True):
            if getattr(self, name) not in accepted:
                return name, getattr(self, name), " | ".join(accepted)
        return None


DEFAULT_POLICY = VerifierPolicy()
