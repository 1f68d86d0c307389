"""The two ways a run can end early, and what each prints.

A mistake of the user's (`UserError`) ends the command with exit code 2, a fault of the system's
(`SystemFault`) with exit code 1. Both print one line and no traceback.
"""

from __future__ import annotations

import argparse
from typing import NoReturn


class UserError(ValueError):
    """A value the user gave can't be used.

    The message names the argument, the value and what is accepted, in one line.

    Args:
        argument: dotted name as typed in YAML or on the command line, such as ``model.loss.beta``.
        value: the value received.
        accepted: what would have been right, as a short phrase.
    """

    exit_code = 2

    def __init__(self, argument: str, value: object, accepted: str) -> None:
        self.argument = argument
        self.value = value
        self.accepted = accepted
        super().__init__(f"{argument}={value!r}: accepted is {accepted}")


class SystemFault(RuntimeError):
    """The machine can't do what was asked: no GPU, disk full, out of memory at one row.

    Args:
        message: one line that says what happened and what to do about it.
    """

    exit_code = 1


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage in front of every mistake: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """End the command; ``message`` names the argument."""
        self.exit(2, f"grpo-lit: error: {message}; {self.prog} --help lists what is accepted\n")
