"""Options of a benchmark, with the values they take and the options they act with, checked before anything runs."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

from grpo_lit.errors import OneLineParser, UserError

_NOT_GIVEN = object()


class BenchParser(OneLineParser):
    """argparse whose options say what they accept; a parser that parses has checked it.

    >>> parser = BenchParser(prog="grpo-lit bench example")
    >>> parser.option("--ragged", type=int, least=1)
    >>> parser.option("--in-flight", type=int, least=1, needs="--ragged")
    >>> parser.parse_args(["--ragged", "4", "--in-flight", "2"]).in_flight
    2
    >>> parser.parse_args(["--in-flight", "2"])
    Traceback (most recent call last):
    grpo_lit.errors.UserError: --in-flight=2: accepted is only with --ragged
    >>> parser.parse_args(["--ragged", "0"])
    Traceback (most recent call last):
    grpo_lit.errors.UserError: --ragged=0: accepted is at least 1
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)
        self._rules: list[tuple[argparse.Action, dict[str, Any]]] = []

    def option(
        self,
        name: str,
        *,
        least: float | None = None,
        above: float | None = None,
        among: Sequence[str] | None = None,
        needs: str | None = None,
        without: str | None = None,
        **kwargs: Any,
    ) -> None:
        """`add_argument` with rules; of an option with several values they hold for each.

        Args:
            name: the option, such as ``--rows``.
            least: smallest value; nan is refused too.
            above: values must be greater.
            among: names that are accepted, as a closed list.
            needs: another option without which this one does nothing, or ``"--engines hf"``: without this value of it.
            without: another option beside which this one does nothing, or one and a value as above.
            kwargs: as of `argparse.ArgumentParser.add_argument`.
        """
        if among is not None:
            kwargs = {"metavar": "NAME", "help": " | ".join(among), **kwargs}
        rules = {"least": least, "above": above, "among": among, "needs": needs, "without": without}
        self._rules.append((self.add_argument(name, **kwargs), rules))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's.

        Raises:
            UserError: an option breaks one of its rules.
        """
        options, rest = super().parse_known_args(args, namespace)
        self._check_unknown(rest)
        blank = argparse.Namespace(**{action.dest: _NOT_GIVEN for action, _ in self._rules})
        given, _ = super().parse_known_args(args, blank)  # what is there already gets no default
        for action, rules in self._rules:
            name, value = action.option_strings[0], getattr(options, action.dest)
            for one in value if isinstance(value, list) else [value]:
                if (accepted := _accepted(one, rules)) is not None:
                    raise UserError(name, one, accepted)
            if getattr(given, action.dest) is _NOT_GIVEN:
                continue
            if rules["needs"] and not self._holds(rules["needs"], options):
                raise UserError(name, value, f"only with {rules['needs']}")
            if rules["without"] and self._holds(rules["without"], options):
                raise UserError(name, value, f"only without {rules['without']}")
        return options, rest

    def _check_unknown(self, rest: Sequence[str]) -> None:
        """End the command at what is nearly an option; others may be those of another parser."""
        names = [name for action in self._actions for name in action.option_strings]
        for word in rest:
            name = word.partition("=")[0]
            if name.startswith("--") and difflib.get_close_matches(name, names, n=1, cutoff=0.8):
                self.error(f"unrecognized arguments: {name}")

    def _holds(self, condition: str, options: argparse.Namespace) -> bool:
        """Whether an option has been set, or has or holds the value behind its name."""
        name, _, wanted = condition.partition(" ")
        dest = next(action.dest for action in self._actions if name in action.option_strings)
        value = getattr(options, dest)
        if not wanted:
            return value not in (None, False)
        return wanted in map(str, value if isinstance(value, list) else [value])


def _accepted(value: Any, rules: dict[str, Any]) -> str | None:
    """What is accepted, where a value is not."""
    if value is None:
        return None
    if rules["least"] is not None and not value >= rules["least"]:
        return f"at least {rules['least']}"
    if rules["above"] is not None and not value > rules["above"]:
        return f"above {rules['above']}"
    if rules["among"] is not None and value not in rules["among"]:
        return " | ".join(rules["among"])
    return None
