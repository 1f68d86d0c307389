"""The registry of datasets: where each lies and which columns hold question and answer.

A new dataset is one more `DatasetSpec` in `DATASETS`; any other file or hub dataset is read by naming its columns.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_lit.datamodules.arithmetic import arithmetic_rows
from grpo_lit.datamodules.gym import gym_rows
from grpo_lit.datamodules.one_token import one_token_rows
from grpo_lit.datamodules.readers import Row, read_file, read_hub
from grpo_lit.errors import UserError
from grpo_lit.rewards.extract import find_boxes
from grpo_lit.rewards.functions import gold_text

_log = logging.getLogger(__name__)
_GSM8K_ANSWER = re.compile(r"####\s*(\S.*?)\s*$")
_DAPO_WRAPPER = re.compile(
    r"Solve the following math problem step by step\..*?answer to the problem\.\s*(?P<question>.*?)"
    r"\s*Remember to put your answer on its own line after \"Answer:\"\.\s*",
    re.DOTALL,
)
CUSTOM = "custom"
"""Name of a dataset that is a file with named columns."""


def gsm8k_answer(value: Any) -> str | None:
    """The gold answer behind ``####``, without thousands separators.

    >>> gsm8k_answer("He has 2*3=6. #### 1,234")
    '1234'
    """
    match = _GSM8K_ANSWER.search(str(value or ""))
    return match.group(1).replace(",", "") if match else None


def boxed_answer(value: Any) -> str | None:
    r"""What the last box of a solution holds; where there is none, the text itself if it is no solution.

    >>> boxed_answer(r"so $x=\boxed{1.6} \mathrm{~cm}$"), boxed_answer("12"), boxed_answer("It is.\nNo box.")
    ('1.6', '12', None)
    """
    text = gold_text(value)
    if text is None:
        return None
    boxes, _ = find_boxes(text)
    if boxes:
        return boxes[-1][2].strip() or None
    return None if "\n" in text or len(text) > 200 else text


def dapo_question(text: str) -> str:
    """The question without the instructions that DAPO-Math-17k wraps around it."""
    match = _DAPO_WRAPPER.fullmatch(text)
    return match["question"] if match else text


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset: its place on the hub and how a row becomes a question with a gold answer."""

    question: tuple[str, ...] = ("question",)
    """Columns that may hold the question; the first that a row has is taken. ``a.b`` looks into a nested column.
    A list of chat messages is kept in ``messages``, its last user turn becomes the question."""
    answer: tuple[str, ...] = ("answer",)
    """Columns that may hold the answer, likewise; none where the rewards need no answer."""
    hub: str | None = None
    """Hub id, or None for a generated dataset."""
    hub_config: str | None = None
    """Configuration on the hub, such as GSM8K's ``main``."""
    splits: tuple[str, ...] = ("train",)
    """Splits on the hub; the first is the default. A dataset for evaluation has no ``train``."""
    context: str | None = None
    """Column with text that goes in front of the question, where a row has any."""
    parse_answer: Callable[[Any], str | None] = gold_text
    """Answer column -> gold answer, or None where there is none."""
    parse_question: Callable[[str], str] | None = None
    """Takes instructions off a question."""
    unique: bool = False
    """Keep each question once: the copy on the hub repeats its rows."""
    generate: Callable[..., list[Row]] | None = None
    """Makes the rows of a generated dataset from ``data.dataset_options``."""


_PROBLEM = ("problem", "question")
DATASETS: dict[str, DatasetSpec] = {
    "gsm8k": DatasetSpec(hub="openai/gsm8k", hub_config="main", splits=("train", "test"), parse_answer=gsm8k_answer),
    # An answer "None" stands for a question that lacks what is needed to answer it.
    "gsm_plus": DatasetSpec(hub="qintongli/GSM-Plus", splits=("testmini", "test")),
    "open_rs": DatasetSpec(_PROBLEM, hub="knoveleng/open-rs"),
    "dapo_math_17k": DatasetSpec(
        ("prompt",),
        ("reward_model.ground_truth",),
        hub="BytedTsinghua-SIA/DAPO-Math-17k",
        parse_question=dapo_question,
        unique=True,
    ),
    "deepscaler": DatasetSpec(_PROBLEM, hub="agentica-org/DeepScaleR-Preview-Dataset"),
    "open_deepscaler": DatasetSpec(_PROBLEM, hub="knoveleng/open-deepscaler"),
    "math500": DatasetSpec(_PROBLEM, hub="HuggingFaceH4/MATH-500", splits=("test",)),
    "aime24": DatasetSpec(_PROBLEM, hub="HuggingFaceH4/aime_2024"),
    "aime25": DatasetSpec(_PROBLEM, hub="math-ai/aime25", splits=("test",)),
    "amc23": DatasetSpec(("question", "problem"), hub="math-ai/amc23", splits=("test",)),
    "minerva_math": DatasetSpec(
        _PROBLEM, ("answer", "solution"), hub="math-ai/minervamath", splits=("test",), parse_answer=boxed_answer
    ),
    "olympiadbench": DatasetSpec(
        answer=("final_answer", "answer"),
        hub="Hothan/OlympiadBench",
        hub_config="OE_TO_maths_en_COMP",
        context="context",
    ),
    "arithmetic": DatasetSpec(generate=arithmetic_rows),
    "one_token": DatasetSpec(generate=one_token_rows, parse_answer=lambda value: None if value is None else str(value)),
    "reasoning_gym": DatasetSpec(generate=gym_rows),
    CUSTOM: DatasetSpec(_PROBLEM, ("answer", "solution", "final_answer"), parse_answer=boxed_answer),
}
ALIASES = {
    "dapo": "dapo_math_17k",
    "dapo_math": "dapo_math_17k",
    "math_500": "math500",
    "minerva": "minerva_math",
    "aime2024": "aime24",
    "aime2025": "aime25",
    "gsmplus": "gsm_plus",
}


def dataset_spec(name: str, columns: Mapping[str, str | None] | None = None) -> DatasetSpec:
    """The entry of a name: of `DATASETS`, ``custom``, or a hub id such as ``org/name``.

    Args:
        name: upper case and hyphens make no difference for registered names.
        columns: of ``question`` and ``answer``, the column that holds it; overrides the entry. An answer in None: rows
            have no gold answer, and none is looked for.

    Raises:
        UserError: no such dataset, or another key in ``columns``.
    """
    key = name.lower().replace("-", "_")
    key = ALIASES.get(key, key)
    if key in DATASETS:
        spec = DATASETS[key]
    elif re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        spec = replace(DATASETS[CUSTOM], hub=name)
    else:
        accepted = f"one of {', '.join(sorted(DATASETS))}, or a hub id (org/name)"
        raise UserError("data.dataset", name, accepted)
    named = dict(columns or {})
    if unknown := set(named) - {"question", "answer", "context"}:
        raise UserError("data.columns", named, f"columns for question, answer and context, not {sorted(unknown)[0]}")
    if question := named.get("question"):
        spec = replace(spec, question=(question,))
    if "answer" in named:
        spec = replace(spec, answer=(named["answer"],) if named["answer"] else ())
    return replace(spec, context=named["context"]) if "context" in named else spec


def load_rows(
    name: str,
    *,
    split: str | None = None,
    path: str | None = None,
    options: Mapping[str, Any] | None = None,
    columns: Mapping[str, str | None] | None = None,
    argument: str = "data.path",
) -> list[Row]:
    """Rows of a dataset with ``question``, ``answer`` (gold text) and every other column of the original.

    Args:
        name: see `dataset_spec`.
        split: of the hub or of a folder; the dataset's first by default.
        path: local file or folder in the dataset's original schema, instead of the hub.
        options: arguments of a generated dataset.
        columns: names of the columns, where they differ from the entry's.
        argument: how the user calls the path; for errors.

    Raises:
        UserError: unknown name or split, missing file, no rows, or a row without question or answer.
        SystemFault: the hub can't be reached.
    """
    spec = dataset_spec(name, columns)
    raw, where = read_raw(name, spec, split=split, path=path, options=options, argument=argument)
    return [normalise_row(row, spec, f"{where}, row {n}", argument) for n, row in enumerate(raw, start=1)]


def read_raw(
    name: str,
    spec: DatasetSpec,
    *,
    split: str | None = None,
    path: str | None = None,
    options: Mapping[str, Any] | None = None,
    argument: str = "data.path",
) -> tuple[list[Row], str]:
    """Rows in the original schema, and in words where they are from; arguments as of `load_rows`."""
    raw: Iterable[Row]
    if path is not None:
        raw, where = read_file(path, split or spec.splits[0], argument=argument), path
    elif spec.generate is not None:
        raw, where = _generate(name, spec, options or {}), name
    elif spec.hub is not None:
        wanted = split or spec.splits[0]
        if name in DATASETS and wanted not in spec.splits:
            raise UserError("data.split", wanted, f"a split of {name}: {', '.join(spec.splits)}")
        raw, where = read_hub(spec.hub, spec.hub_config, wanted), f"{spec.hub} ({wanted})"
    else:
        raise UserError(argument, None, f"a file: dataset {name!r} has no place of its own")
    rows = _each_once(raw, spec, where) if spec.unique else list(raw)
    if not rows:
        raise UserError(argument if path else "data.dataset", where, "at least one row")
    return rows, where


def normalise_row(row: Row, spec: DatasetSpec, where: str, argument: str = "data.path") -> Row:
    """A row with ``question``, ``answer`` where one is wanted, and ``messages`` where its prompt is a chat.

    Raises:
        UserError: it lacks one of them.
    """
    question_column, question = _first(row, spec.question)
    messages = question if _is_chat(question) else None
    if messages is not None:
        question = next((m["content"] for m in reversed(messages) if m["role"] == "user"), None)
    if not isinstance(question, str) or not question.strip():
        raise UserError(argument, where, f"a row with a text in {_described(spec.question, row)}")
    if spec.parse_question is not None:
        question = spec.parse_question(question)
    if spec.context is not None and isinstance(row.get(spec.context), str) and row[spec.context].strip():
        question = f"{row[spec.context].strip()}\n\n{question}"
    found = {**row, "question": question}
    if spec.answer:
        answer = spec.parse_answer(_first(row, spec.answer)[1])
        if answer is None or not answer.strip():
            raise UserError(argument, where, f"a row with an answer in {_described(spec.answer, row)}")
        found["answer"] = answer
    return found if messages is None else {**found, "messages": messages}


def _first(row: Row, columns: Sequence[str]) -> tuple[str | None, Any]:
    """The first of the columns that a row has with a value in it, and the value."""
    for column in columns:
        value: Any = row
        for part in column.split(".") if column not in row else [column]:
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != "":
            return column, value
    return None, None


def _is_chat(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def _described(columns: Sequence[str], row: Row) -> str:
    """The columns looked for and, where none is there, those that are."""
    wanted = "column " + " or ".join(map(repr, columns))
    there = any(column.split(".")[0] in row for column in columns)
    return wanted if there else f"{wanted}; there are {', '.join(row)}; data.columns names others"


def _generate(name: str, spec: DatasetSpec, options: Mapping[str, Any]) -> list[Row]:
    assert spec.generate is not None
    try:
        return spec.generate(**options)
    except TypeError as error:
        raise UserError("data.dataset_options", dict(options), f"the options of {name} ({error})") from error


def _each_once(rows: Iterable[Row], spec: DatasetSpec, where: str) -> list[Row]:
    """The first row of each question; never holds more than these, where a copy has millions of rows."""
    kept: dict[str, Row] = {}
    count = 0
    for row in rows:
        count += 1
        kept.setdefault(repr(_first(row, spec.question)[1]), row)
    if len(kept) < count:
        _log.warning("%s: %d of %d rows repeat a question and are left out", where, count - len(kept), count)
    return list(kept.values())
