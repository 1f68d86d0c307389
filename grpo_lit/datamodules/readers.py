"""Raw rows from a file, a folder or the hub: JSON lines, a JSON array, CSV, parquet, what `datasets` saved."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.hub import offline_if_unreachable

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
_ACCEPTED = "an existing .jsonl, .json, .csv or .parquet file, or a folder with such a file for each split"
_SHARD = re.compile(r"(?P<split>.+)-[0-9]{5}-of-[0-9]{5}\.parquet")


def read_file(path: str, split: str, *, argument: str = "data.path") -> list[Row]:
    """Every row of a file; of a folder, the rows of its split.

    A folder has a file named after each split, or the shards of a copy from the hub (``train-00000-of-00002.parquet``,
    there or in ``data/``), or is what ``save_to_disk`` of Hugging Face's `datasets` wrote.

    Args:
        path: the file or folder.
        split: of a folder; a file is one split, whatever its name.
        argument: how the user calls the path; for errors.

    Raises:
        UserError: no such file, another format, or a broken row.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        found = [file / f"{split}{suffix}" for suffix in SUFFIXES if (file / f"{split}{suffix}").is_file()]
        if not found:
            return _read_folder(file, split, argument)
        file = found[0]
    suffix = file.suffix.lower()
    if not file.is_file() or suffix not in SUFFIXES:
        raise UserError(argument, path, _ACCEPTED)
    if suffix == ".parquet":
        return _read_parquet(file, argument)
    text = read_text(file, argument)
    if suffix == ".csv":
        return _read_csv(text, str(file), argument)
    if text.lstrip().startswith("["):
        return _read_array(text, f"{file}, line 1", argument)
    return [
        _read_object(line, f"{file}, line {number}", argument)
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def _read_folder(folder: Path, split: str, argument: str) -> list[Row]:
    """The rows of a split whose folder has shards, or was saved by `datasets`."""
    files = [*folder.glob("*.parquet"), *(folder / "data").glob("*.parquet")]
    shards = sorted(file for file in files if (m := _SHARD.fullmatch(file.name)) and m["split"] == split)
    if shards:
        count = int(shards[0].stem.rpartition("-")[2])
        if len(shards) != count:
            raise UserError(argument, str(folder), f"all {count} shards of {split}, of which {len(shards)} are there")
        return [row for shard in shards for row in _read_parquet(shard, argument)]
    saved = folder / split if (folder / "dataset_dict.json").is_file() else folder
    if not (saved / "state.json").is_file():
        accepted = (
            f"a folder with {split}.jsonl, .json, .csv or .parquet, its shards, or what datasets.save_to_disk wrote"
        )
        raise UserError(argument, str(folder), accepted)
    import datasets
    import pyarrow

    try:
        rows: list[Row] = datasets.load_from_disk(str(saved)).to_list()
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:
        raise UserError(argument, str(saved), "a complete folder of datasets.save_to_disk") from error
    return rows


def read_text(file: Path, argument: str) -> str:
    """The text of a file in UTF-8.

    Raises:
        UserError: it is none, or can't be read.
    """
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(argument, str(file), "a file in UTF-8") from error
    except OSError as error:
        raise UserError(argument, str(file), f"a file that can be read ({error.strerror})") from error


def _read_object(line: str, where: str, argument: str) -> Row:
    row = _parse(line, where, argument, "one JSON object a line")
    if not isinstance(row, dict):
        raise UserError(argument, where, "one JSON object a line")
    return row


def _parse(text: str, where: str, argument: str, accepted: str) -> Any:
    """What a JSON text says; halves of surrogate pairs, which no encoding can write, become U+FFFD."""
    try:
        value = json.loads(text)
        return _whole_characters(value) if "\\u" in text else value
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, a thousand brackets
        raise UserError(argument, where, accepted) from error


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return value


def _read_array(text: str, where: str, argument: str) -> list[Row]:
    rows = _parse(text, where, argument, "a JSON array of objects, or one JSON object a line")
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(argument, where, "a JSON array of objects, or one JSON object a line")
    return list(rows)


def _read_csv(text: str, where: str, argument: str) -> list[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    rows: list[Row] = []
    try:
        for number, row in enumerate(reader, start=2):
            if None in row or None in row.values():
                accepted = f"as many fields as the {len(reader.fieldnames or [])} named in the first line"
                raise UserError(argument, f"{where}, record {number}", accepted)
            rows.append(dict(row))
    except csv.Error as error:
        raise UserError(argument, where, f"CSV with a line of column names ({error})") from error
    return rows


def _read_parquet(file: Path, argument: str) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: list[Row] = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(argument, str(file), "a complete .parquet file") from error
    return rows


def read_hub(hub: str, config: str | None, split: str) -> Iterable[Row]:
    """The rows of a split of a dataset on the hub, decoded one by one.

    Raises:
        SystemFault: it can't be loaded.
    """
    offline_if_unreachable()
    from datasets import load_dataset

    logging.getLogger("datasets").setLevel(logging.ERROR)  # it warns that it reads its cache where there is no hub
    try:
        rows: Iterable[Row] = load_dataset(hub, config, split=split)
        return rows
    except (OSError, ValueError) as error:
        raise SystemFault(
            f"data.dataset: {hub} ({split}) can't be loaded from the hub ({' '.join(str(error).split())[:160]}); "
            "give a local copy with data.path"
        ) from error
