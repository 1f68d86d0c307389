"""A size that was made smaller after an out-of-memory error, on its careful way back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_SAFE = 0.9  # share of a size that failed which is tried without a longer wait
_LONGEST_WAIT = 256


@dataclass
class Backoff:
    """Bound of a size, in rows or tokens.

    After an error the size stays for `wait` clean steps, then grows by `growth`, again and again, up to just below what
    failed; only then is that size itself tried again. Each further error doubles the wait.
    """

    wait: int
    """Clean steps before the next growth."""
    growth: float
    """Factor of each growth, above 1."""
    bound: int | None = None
    """Largest size allowed; None where nothing has failed."""
    failed_at: int | None = None
    """Smallest size that failed."""
    first_failed_at: int | None = None
    """The size in use when it failed first."""
    clean: int = 0
    """Steps without an error since the last change."""

    def fail(self, size: int, now: int) -> None:
        """Note that `size` did not fit and that `now` is used from here on."""
        if self.bound is not None:
            self.wait = min(2 * self.wait, _LONGEST_WAIT)
        if self.bound is None:
            self.first_failed_at = size
        self.failed_at = size if self.failed_at is None else min(self.failed_at, size)
        self.bound, self.clean = now, 0

    def step(self, ceiling: int | None) -> bool:
        """Note a step without an error; True where the bound has changed.

        Args:
            ceiling: the bound goes away when it reaches this; None: when it reaches what failed first.
        """
        if self.bound is None or self.failed_at is None:
            return False
        self.clean += 1
        if self.clean < self.wait:
            return False
        self.clean = 0
        below = int(_SAFE * self.failed_at)
        if self.bound >= below:
            self.failed_at = int(self.failed_at * self.growth) + 1
            below = int(_SAFE * self.failed_at)
        self.bound = min(int(self.bound * self.growth) + 1, max(below, self.bound))
        if self.bound >= (ceiling or self.first_failed_at or 0):
            self.bound = self.failed_at = self.first_failed_at = None
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for the checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for name, value in state.items():
            setattr(self, name, value)
