"""``--config``: a file, or the name of a configuration that ships with the package."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from grpo_lit.errors import UserError


def shipped_configs() -> dict[str, Path]:
    """Name and file of every configuration in the package."""
    folder = Path(str(files("grpo_lit") / "configs"))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def resolve_config_names(arguments: Sequence[str]) -> list[str]:
    """Replace ``--config NAME`` by the file of the shipped configuration of that name.

    Raises:
        UserError: neither a file nor a shipped name.
    """
    resolved: list[str] = []
    expect_value = False
    for argument in arguments:
        if expect_value:
            resolved.append(find_config(argument))
        elif argument.startswith(("--config=", "-c=")):
            flag, _, value = argument.partition("=")
            resolved.append(f"{flag}={find_config(value)}")
        else:
            resolved.append(argument)
        expect_value = not expect_value and argument in ("--config", "-c")
    return resolved


def find_config(value: str) -> str:
    """Path of a configuration given as a file, or as the name of a shipped one.

    Raises:
        UserError: neither.
    """
    if (file := Path(value).expanduser()).is_file():
        _check_yaml(str(file))
        return str(file)
    shipped = shipped_configs()
    name = value.removesuffix(".yaml").removeprefix("configs/")
    if name in shipped:
        return str(shipped[name])
    raise UserError("--config", value, f"a YAML file or one of the shipped configs: {', '.join(shipped)}")


class _EachKeyOnce(yaml.SafeLoader):
    """Refuses a key that stands twice in one section, of which YAML would silently take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} stands twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def _check_yaml(value: str) -> None:
    """Name the file that is no configuration: the parser's own words do not."""
    try:
        content = yaml.load(Path(value).read_text(encoding="utf-8"), _EachKeyOnce)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("--config", value, "a YAML file in UTF-8 that can be read") from error
    except yaml.YAMLError as error:
        raise UserError("--config", value, f"valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise UserError("--config", value, "a YAML file of sections, such as trainer, model and data")
