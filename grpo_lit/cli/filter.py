"""``grpo-lit filter``: a new .jsonl of the rows worth training on, and a report of what went and why.

    grpo-lit filter --dataset gsm8k --path train.jsonl --output kept.jsonl --sent_cache sent.jsonl \\
        --filter.min_pass_rate 0.1 --filter.max_pass_rate 0.9 --filter.duplicates near --against math500
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from grpo_lit.cli.parser import CLIParser
from grpo_lit.datamodules.datasets import dataset_spec, load_rows, read_raw
from grpo_lit.datamodules.filters import Count, FilterConfig, FilterResult, filter_rows
from grpo_lit.datamodules.sent_cache import read_sent_cache
from grpo_lit.errors import UserError, typed_names
from grpo_lit.files import write_whole
from grpo_lit.markdown import table
from grpo_lit.model_source import resolve_model_source
from grpo_lit.paths import output_file
from grpo_lit.prompts import load_tokenizer


def main(arguments: Sequence[str]) -> int:
    """Read, filter, write the rows and the report."""
    parser = CLIParser(prog="grpo-lit filter", description="Keep the rows of a dataset that are worth training on.")
    parser.add_argument("--dataset", type=str, default="gsm8k", help="A dataset's name, custom, or a hub id.")
    parser.add_argument("--path", type=str | None, default=None, help="Local file instead of the hub.")
    parser.add_argument("--split", type=str | None, default=None, help="Split of the hub or a folder.")
    parser.add_argument("--columns", type=dict[str, str] | None, default=None, help="Columns of question and answer.")
    parser.add_argument("--dataset_options", type=dict[str, Any] | None, default=None, help="Of a generated dataset.")
    parser.add_argument("--output", type=str | None, default=None, help="The new .jsonl; the report lies beside it.")
    parser.add_argument("--tokenizer", type=str | None, default=None, help="Model whose tokens lengths count.")
    parser.add_argument("--sent_cache", type=str | None, default=None, help="File of grpo-lit sent for these rows.")
    parser.add_argument(
        "--against", nargs="*", type=str, default=[], help="Datasets or files whose questions no row may resemble."
    )
    parser.add_class_arguments(FilterConfig, "filter", instantiate=True)
    options = parser.instantiate_classes(parser.parse_args(list(arguments)))
    if options.output is None or not options.output.endswith(".jsonl"):
        raise UserError("output", options.output, "the name of a new .jsonl file")
    output = output_file(options.output, "output")
    if output.exists():  # it may be the input itself
        raise UserError("output", options.output, "the name of a new .jsonl file; this one exists")
    with typed_names({"data": ""}):  # the settings of a data module are options of their own here
        return filter_to(output, options)


def filter_to(output: Path, options: Any) -> int:
    """Filter by checked options into a new file."""
    spec = dataset_spec(options.dataset, options.columns)
    against = [(name, questions_of(name)) for name in options.against]
    raw, where = read_raw(
        options.dataset, spec, split=options.split, path=options.path, options=options.dataset_options, argument="path"
    )
    result = filter_rows(
        raw,
        spec,
        options.filter,
        cache=None if options.sent_cache is None else read_sent_cache(options.sent_cache, argument="sent_cache"),
        count=_counter(options.tokenizer),
        against=against,
    )
    settings = {**asdict(options.filter), "tokenizer": options.tokenizer, "against": options.against}
    write(output, result, {"input": where, "rows": len(raw), "settings": settings})
    print(report_table(result, len(raw)))
    print(f"rows: {output}; every row that went: {output.with_suffix('.report.json')}")
    return 0


def _counter(tokenizer: str | None) -> Count:
    if tokenizer is None:
        return len
    encode = load_tokenizer(resolve_model_source(tokenizer, argument="tokenizer"), argument="tokenizer")
    return lambda text: len(encode(text, add_special_tokens=False).input_ids)


def questions_of(name: str) -> list[str]:
    """Questions of a dataset by name, or of a file, ``NAME=FILE`` where its schema is a dataset's."""
    dataset, _, path = name.rpartition("=") if "=" in name else ("", "", name)
    if not dataset and not Path(path).expanduser().exists():
        dataset, path = path, ""
    with typed_names({"data.dataset": "against", "data.path": "against"}):
        rows = load_rows(dataset or "custom", path=path or None, argument="against")
    return [row["question"] for row in rows]


def write(output: Path, result: FilterResult, facts: dict[str, Any]) -> None:
    """Rows and report, each whole or not at all.

    Raises:
        SystemFault: the disk is full or can't be written.
    """
    removed = {
        rule: [{"row": row, "why": why} for row, why in sorted(rows)] for rule, rows in sorted(result.removed.items())
    }
    report = {**facts, "kept": len(result.kept), "kept_rows": result.kept_indices, "removed": removed}
    texts = {
        # str: parquet has dates, decimals and bytes
        output: "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in result.kept),
        output.with_suffix(".report.json"): json.dumps(report, ensure_ascii=False, indent=1) + "\n",
    }
    for path, text in texts.items():
        write_whole(path, text)


def report_table(result: FilterResult, total: int) -> str:
    """Markdown: rows by rule, with an example of each."""
    lines: list[list[object]] = [["kept", f"{len(result.kept)} of {total}", ""]]
    for rule, rows in sorted(result.removed.items(), key=lambda item: -len(item[1])):
        index, why = min(rows)
        lines.append([rule, len(rows), f"row {index}: {why}"])
    return "\n".join(table(["rule", "rows", "such as"], lines))
