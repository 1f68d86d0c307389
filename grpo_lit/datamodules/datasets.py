"""The registry of datasets: where each lies and which columns hold question and answer.

A new dataset is one more `DatasetSpec`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lit.datamodules.arithmetic import arithmetic_rows
from grpo_lit.datamodules.one_token import one_token_rows
from grpo_lit.errors import SystemFault, UserError

Row = dict[str, Any]
_GSM8K_ANSWER = re.compile(r"####\s*(\S.*?)\s*$")


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset: its place on the hub and how a row becomes a question with a gold answer."""

    question: str
    """Column with the question."""
    answer: str
    """Column with the answer."""
    hub: str | None = None
    """Hub id, or None for a generated dataset."""
    hub_config: str | None = None
    """Configuration on the hub, such as GSM8K's ``main``."""
    parse_answer: Callable[[Any], str | None] = field(default=lambda value: None if value is None else str(value))
    """Answer column -> gold answer, or None where there is none."""
    generate: Callable[..., list[Row]] | None = None
    """Makes the rows of a generated dataset from ``data.dataset_options``."""


def gsm8k_answer(value: Any) -> str | None:
    """The gold answer behind ``####``, without thousands separators.

    >>> gsm8k_answer("He has 2*3=6. #### 1,234")
    '1234'
    """
    match = _GSM8K_ANSWER.search(str(value or ""))
    return match.group(1).replace(",", "") if match else None


DATASETS: dict[str, DatasetSpec] = {
    "gsm8k": DatasetSpec("question", "answer", "openai/gsm8k", "main", parse_answer=gsm8k_answer),
    "arithmetic": DatasetSpec("question", "answer", generate=arithmetic_rows),
    "one_token": DatasetSpec("question", "answer", generate=one_token_rows),
}


def load_rows(
    name: str, *, split: str = "train", path: str | None = None, options: Mapping[str, Any] | None = None
) -> list[Row]:
    """Rows of a dataset with ``question``, ``answer`` (gold) and every other column of the original.

    Args:
        name: a name of `DATASETS`.
        split: hub split.
        path: local .jsonl or .parquet file in the dataset's original schema, instead of the hub.
        options: arguments of a generated dataset.

    Raises:
        UserError: unknown name, missing file, no rows, or a row without question or answer.
        SystemFault: the hub can't be reached.
    """
    if name not in DATASETS:
        raise UserError("data.dataset", name, f"one of {', '.join(sorted(DATASETS))}")
    spec = DATASETS[name]
    if path is not None:
        raw, where = _read_file(path), path
    elif spec.generate is not None:
        raw, where = _generate(name, spec, options or {}), name
    else:
        raw, where = _read_hub(spec, split), f"{spec.hub} ({split})"
    if not raw:
        raise UserError("data.path" if path else "data.dataset", where, "at least one row")
    return [_normalise(row, spec, f"{where}, row {number}") for number, row in enumerate(raw, start=1)]


def _normalise(row: Row, spec: DatasetSpec, where: str) -> Row:
    question, answer = row.get(spec.question), spec.parse_answer(row.get(spec.answer))
    if not isinstance(question, str) or not question.strip():
        raise UserError("data.path", where, f"a row with a text in column {spec.question!r}")
    if answer is None or not answer.strip():
        raise UserError("data.path", where, f"a row with an answer in column {spec.answer!r}")
    return {**row, "question": question, "answer": answer}


def _generate(name: str, spec: DatasetSpec, options: Mapping[str, Any]) -> list[Row]:
    assert spec.generate is not None
    try:
        return spec.generate(**options)
    except TypeError as error:
        raise UserError("data.dataset_options", dict(options), f"the options of {name} ({error})") from error


def _read_file(path: str) -> list[Row]:
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError("data.path", path, "an existing .jsonl or .parquet file")
    if file.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        try:
            rows: list[Row] = pyarrow.parquet.read_table(file).to_pylist()
        except (OSError, pyarrow.ArrowException) as error:
            raise UserError("data.path", path, "a complete .parquet file") from error
        return rows
    if file.suffix not in (".jsonl", ".json"):
        raise UserError("data.path", path, "a .jsonl or .parquet file")
    return [_parse_line(line, f"{path}, line {n}") for n, line in enumerate(_lines(file), start=1) if line.strip()]


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError("data.path", str(file), "a file in UTF-8") from error


def _parse_line(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError("data.path", where, "one JSON object a line") from error
    if not isinstance(row, dict):
        raise UserError("data.path", where, "one JSON object a line")
    return row


def _read_hub(spec: DatasetSpec, split: str) -> list[Row]:
    from datasets import load_dataset

    try:
        return list(load_dataset(spec.hub, spec.hub_config, split=split))
    except (OSError, ValueError) as error:
        raise SystemFault(
            f"data.dataset: {spec.hub} can't be loaded from the hub ({' '.join(str(error).split())[:160]}); "
            "give a local copy with data.path"
        ) from error
