"""Where a command is asked to write, told before anything is computed or moved if it can't be; where it imports."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from grpo_lit.errors import UserError


def output_folder(path: str | Path, argument: str) -> Path:
    """The folder of an output, there or not, with its home expanded.

    Raises:
        UserError: it is a file, or lies under one.
    """
    folder = Path(path).expanduser()
    if not str(path):
        raise UserError(argument, "", "a folder, new or there")
    if (file := _file_in(folder)) is not None:
        raise UserError(argument, str(path), "a folder, new or there" + _because(file, folder))
    return folder


def output_file(path: str | Path, argument: str) -> Path:
    """The file of an output, there or not, with its home expanded.

    Raises:
        UserError: it is a folder, or lies under a file.
    """
    found = Path(path).expanduser()
    if not str(path) or found.is_dir():
        raise UserError(argument, str(path), "a file, not a folder")
    if (file := _file_in(found.parent)) is not None:
        raise UserError(argument, str(path), "a file in a folder" + _because(file, found))
    return found


def csv_argument(text: str) -> Path:
    """`output_file` as the type of an argument of argparse."""
    try:
        path = output_file(text, "--csv")
    except UserError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted is {error.accepted}") from error
    folder = next(part for part in path.absolute().parents if part.exists())
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r}: {folder} can't be written")
    return path


def image_argument(text: str) -> Path:
    """The same for a figure, whose ending says how it is written."""
    endings = ("png", "svg", "pdf")
    if text.rpartition(".")[2].lower() not in endings:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted is a file that ends in .{', .'.join(endings)}")
    return csv_argument(text)


def _file_in(folder: Path) -> Path | None:
    """The first of a path and what is above it that is there, if it is no folder."""
    there = next((part for part in (folder, *folder.parents) if part.exists() or part.is_symlink()), None)
    return None if there is None or there.is_dir() else there


def _because(file: Path, path: Path) -> str:
    return "" if file == path else f"; {file} is a file"


def look_in_current_folder() -> None:
    """Let modules of the current folder be imported: a console script's path doesn't hold where it is started."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
