"""Write docs/options.md: every option of fit, evaluate and the callbacks, from their docstrings.

python scripts/options_page.py [FILE]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from grpo_lit import callbacks
from grpo_lit.cli.parser import GRPOCLI, CLIParser
from grpo_lit.datamodules import MathDataModule
from grpo_lit.evaluation.config import DatasetEntry, EvaluateConfig, ModelEntry
from grpo_lit.lora import LoRAConfig
from grpo_lit.markdown import table

PAGE = Path(__file__).parent.parent / "docs" / "options.md"
HEAD = """# Options

What `grpo-lit fit` and `evaluate` take, from the docstrings; `--help` says the same, with types. Options of Lightning's
trainer (`trainer.*`) are in [its documentation](https://lightning.ai/docs/pytorch/stable/common/trainer.html), and
`seed_everything` (42) seeds all but the data's split and order (`data.seed`). `python scripts/options_page.py` writes
this page.
"""


_NO_OPTIONS = ("help", "config", "print_config", "seed_everything")  # parsers' own, and one that Lightning describes


class _ParserIsMade(Exception):  # noqa: N818
    """The parser has all of its arguments."""


class _Options(GRPOCLI):
    """Takes the arguments and parses nothing."""

    def parse_arguments(self, parser: Any, args: Any) -> None:
        del args
        raise _ParserIsMade(parser)


def fit_parser() -> CLIParser:
    """The parser of ``grpo-lit fit``."""
    try:
        _Options([], "fit")
    except _ParserIsMade as made:
        parser: CLIParser = made.args[0]
    return parser


def rows_of(parser: ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """Name, default and text of each option; sections themselves are none."""
    actions = {action.dest: action for action in parser._actions if action.dest.rpartition(".")[2] not in _NO_OPTIONS}
    for name, action in actions.items():
        if any(other.startswith(f"{name}.") for other in actions):
            continue
        default = getattr(action.default, "__name__", action.default)
        text = default.replace("\n", "\\n") if isinstance(default, str) else json.dumps(default)
        yield name, text, " ".join((action.help or "").split()).replace("``", "`")


def of_class(described: type, name: str | None) -> list[tuple[str, str, str]]:
    """The same of a class's arguments."""
    parser = ArgumentParser()
    parser.add_class_arguments(described, name)
    return list(rows_of(parser))


def sections() -> dict[str, list[tuple[str, str, str]]]:
    """Options by section, in the order of the parser."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for row in [
        *rows_of(fit_parser()),
        *of_class(LoRAConfig, "model.lora"),
        *of_class(MathDataModule, "data"),
    ]:
        section = row[0].rpartition(".")[0] or "run"
        if not section.startswith("trainer") and row[0] not in ("data", "model.lora"):
            found.setdefault(section, []).append(row)
    for name in callbacks.__all__:
        if name != "RunCheckpoint" and (options := of_class(getattr(callbacks, name), name)):  # section checkpoint
            found[f"grpo_lit.callbacks.{name}"] = options
    found["grpo-lit evaluate"] = of_class(EvaluateConfig, None)
    found["grpo-lit evaluate: models"] = of_class(ModelEntry, "models.NAME")
    found["grpo-lit evaluate: datasets"] = of_class(DatasetEntry, "datasets.NAME")
    return found


def page() -> str:
    """The page in Markdown."""
    parts = [HEAD]
    for section, options in sections().items():
        cells = [[f"`{name}`", f"`{default}`" if default else "", text] for name, default, text in options]
        parts += [f"## {section}\n", *table(["option", "default", ""], cells), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    target.write_text(page(), encoding="utf-8")
