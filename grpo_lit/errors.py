"""The ways a run can end early, and what each prints.

A mistake of the user's (`UserError`) ends the command with exit code 2, a fault of the system's
(`SystemFault`) with exit code 1, SIGTERM (`Terminated`) with 143, Ctrl-C with 130. All print one line and no traceback.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


class Terminated(BaseException):
    """SIGTERM came: raised where the program stands, so that files are closed and child processes end with it.

    Args:
        message: one line.
    """

    exit_code = 143

    def __init__(self, message: str = "terminated by SIGTERM") -> None:
        super().__init__(message)


@contextmanager
def on_stop(told: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C and SIGTERM inside say what is kept and how to go on.

    Args:
        told: gives the words that follow "interrupted" or "terminated by SIGTERM".
    """
    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        raise type(stop)(f"{str(stop) or 'interrupted'}{told()}") from stop


@contextmanager
def typed_names(names: Mapping[str, str]) -> Iterator[None]:
    """Let mistakes found inside name their arguments as the command at hand calls them.

    Args:
        names: by the name that the code inside gives; also in front of a dot, so that ``{"verifier": "policy"}`` turns
            ``verifier.units`` into ``policy.units``. ``""`` stands for every name that is not listed and puts its
            value in front.

    >>> with typed_names({"num_workers": "workers"}):
    ...     raise UserError("num_workers", 0, "at least 1")
    Traceback (most recent call last):
    grpo_lit.errors.UserError: workers=0: accepted is at least 1
    """
    try:
        yield
    except UserError as error:
        if type(error) is not UserError:  # a parser's own words
            raise
        name = _typed(error.argument, names)
        if name == error.argument and "" in names:
            name = f"{names['']}.{name}"
        raise UserError(name, error.value, _typed(error.accepted, names)) from error
    except SystemFault as error:
        raise SystemFault(_typed(str(error), names)) from error


def _typed(text: str, names: Mapping[str, str]) -> str:
    """A text with the names as they are typed: whole ones, and sections in front of a dot."""
    for known, typed in names.items():
        if text == known:
            return typed
        if "." in known:  # a bare word may be one of the sentence
            text = re.sub(rf"(?<![\w.]){re.escape(known)}(?![\w.]*\w)", typed, text)
        if known:
            text = re.sub(rf"(?<![\w.]){re.escape(known)}\.(?=\w)", f"{typed}." if typed else "", text)
    return text


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage in front of every mistake: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        """End the command; ``message`` names the argument."""
        if (unknown := re.match(r"unrecognized arguments: (--[\w-]+)", message)) is not None:
            nested = (action.choices.values() for action in self._actions if isinstance(action.choices, dict))
            parsers = [self, *itertools.chain.from_iterable(nested)]
            names = [name for parser in parsers for action in parser._actions for name in action.option_strings]
            close = difflib.get_close_matches(unknown.group(1), names, n=1, cutoff=0.5)
            message += f"; did you mean {close[0]}?" if close else ""
        self.exit(2, f"grpo-lit: error: {message}; {self.prog} --help lists what is accepted\n")
