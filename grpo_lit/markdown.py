"""Markdown tables, for the terminal, TensorBoard and model cards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Iterable[object]]) -> list[str]:
    r"""Lines of a table; bars in cells are escaped.

    >>> table(["rule", "rows"], [["a|b", 2]])
    ['| rule | rows |', '|---|---|', '| a\\|b | 2 |']
    """
    body = ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(header) + " |", "|" + "---|" * len(header), *body]


def quoted(text: str, limit: int = 600) -> str:
    """A model's text for a cell, cut at `limit` characters: nothing in it acts as markup, and lines stay lines."""
    text = text if len(text) <= limit else text[:limit] + "…"
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")
