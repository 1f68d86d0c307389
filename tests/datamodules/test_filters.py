"""Rows that go, and the rule that each broke; the new file still loads by its dataset's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from grpo_lit.cli import main
from grpo_lit.datamodules import load_rows
from grpo_lit.datamodules.sent_cache import SentCacheWriter, SentEntry, rows_fingerprint

STORY = "Natalia sold clips to {} of her friends in April, and then she sold half as many clips in May. How many?"
ROWS: list[dict[str, Any]] = [
    {"question": STORY.format(48), "answer": "So it is 72.\n#### 72"},
    {"question": STORY.format(52), "answer": "#### 78"},  # alike
    {"question": "1+1?", "answer": "#### 2"},
    {"question": "1 + 1 ?", "answer": "#### 2"},  # equal
    {"question": "What is 3+4?", "answer": "no mark"},  # no answer
    {"question": "What is 5+4?", "answer": "#### 10^{10^{10}} + ("},
    {"question": "What is 6+4, if anyone can tell?", "answer": "#### 10"},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


def run(path: Path, *more: str) -> tuple[list[dict[str, Any]], dict[str, dict[int, str]]]:
    """Kept rows, and by rule what went."""
    output = path.with_name("kept.jsonl")
    output.unlink(missing_ok=True)
    assert main(["filter", "--dataset=gsm8k", f"--path={path}", f"--output={output}", *more]) == 0
    report = json.loads(output.with_suffix(".report.json").read_text())
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    removed = {rule: {entry["row"]: entry["why"] for entry in rows} for rule, rows in report["removed"].items()}
    assert len(kept) == report["kept"] == len(report["kept_rows"])
    assert len(kept) + sum(map(len, removed.values())) == report["rows"] == len(ROWS)
    return kept, removed


def test_defaults_take_out_what_can_t_be_trained_on(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, removed = run(path)
    assert kept == [ROWS[0], ROWS[1], ROWS[2], ROWS[6]]
    assert {rule: list(rows) for rule, rows in removed.items()} == {
        "duplicate": [3],
        "unparsable gold": [5],
        "unreadable": [4],
    }
    assert "equal, row 2" in removed["duplicate"][3]
    assert "| kept | 4 of 7 |" in capsys.readouterr().out
    again = load_rows("gsm8k", path=str(path.with_name("kept.jsonl")))
    assert [row["answer"] for row in again] == ["72", "78", "2", "10"]


def test_length_near_duplicates_and_overlap(path: Path, tmp_path: Path, tiny_llama: Path) -> None:
    _, removed = run(path, "--filter.duplicates=near", "--filter.min_length=5", f"--tokenizer={tiny_llama}")
    assert removed["duplicate"] == {1: "100 % alike, row 0"}
    assert removed["length"] == {2: "4 is below 5"}
    (tmp_path / "eval.jsonl").write_text(json.dumps({"question": STORY.format(50), "answer": "75"}))
    _, removed = run(path, "--against", str(tmp_path / "eval.jsonl"))
    assert list(removed[f"overlap with {tmp_path / 'eval.jsonl'}"]) == [0, 1]
    _, removed = run(path, "--filter.duplicates=keep", "--filter.max_length=31", "--filter.drop_unparsable_gold=false")
    assert {rule: list(rows) for rule, rows in removed.items()} == {"unreadable": [4], "length": [0, 1, 6]}


def test_bands_of_pass_rate_and_entropy(path: Path, tmp_path: Path) -> None:
    good = [row for row in ROWS if "####" in row["answer"]]
    (tmp_path / "good.jsonl").write_text("\n".join(map(json.dumps, good)))
    rows = load_rows("gsm8k", path=str(tmp_path / "good.jsonl"))
    writer = SentCacheWriter(tmp_path / "sent.jsonl", {"dataset": {"fingerprint": rows_fingerprint(rows)}}, {})
    writer.add([SentEntry(i, i / 10, [0, 0], [0.0, 0.5, 0.75, 1.0, 0.5][i], []) for i in range(5)])  # row 5 is held out
    writer.finish()
    output = tmp_path / "band.jsonl"
    own = ["--filter.min_pass_rate=0.5", "--filter.max_pass_rate=0.75", "--filter.max_entropy=0.3"]
    common = ["filter", f"--path={tmp_path / 'good.jsonl'}", f"--sent_cache={tmp_path / 'sent.jsonl'}"]
    assert main([*common, f"--output={output}", "--filter.drop_unparsable_gold=false", *own]) == 0
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["pass_rate"], row["semantic_entropy"]) for row in kept] == [(0.5, 0.1), (0.75, 0.2)]
    report = json.loads(output.with_suffix(".report.json").read_text())["removed"]
    assert {rule: {e["row"]: e["why"] for e in rows} for rule, rows in report.items()} == {
        "pass rate": {0: "0 is below 0.5", 3: "1 is above 0.75", 5: "not known"},
        "entropy": {4: "0.4 is above 0.3"},
    }
    # the figures are columns now: the next filter needs no cache
    narrow = tmp_path / "narrow.jsonl"
    assert main(["filter", f"--path={output}", f"--output={narrow}", "--filter.min_pass_rate=0.6"]) == 0
    assert len(narrow.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--output=x.csv"], "output='x.csv'"),
        ([], "output=None"),
        (["--output=x.jsonl", "--filter.min_length=5", "--filter.max_length=2"], "filter.min_length=5"),
        (["--output=x.jsonl", "--sent_cache=nowhere.jsonl"], "sent_cache='nowhere.jsonl'"),
        (["--output=x.jsonl", "--against", "no_such_set"], "no_such_set"),
        (["--output=x.jsonl", "--filter.duplicates=all"], "duplicates"),
        (["--output=x.jsonl", "--filter.max_pass_rate=2"], "filter.max_pass_rate=2"),
        (["--output=x.jsonl", "--filter.max_length=-1"], "filter.max_length=-1"),
        (["--output=x.jsonl", "--filter.min_pass_rate=0.1"], "a column pass_rate"),
        (["--output=x.jsonl", "--dataset=custom", "--columns={question: other}"], "column 'other'"),
    ],
)
def test_mistakes_are_named(more: list[str], words: str, path: Path, refused: Callable[..., None]) -> None:
    refused(["filter", f"--path={path}", *more], words)


def test_the_input_is_never_overwritten(path: Path, refused: Callable[..., None]) -> None:
    refused(["filter", f"--path={path}", f"--output={path}"], "this one exists")


def test_figures_that_are_no_numbers_count_as_not_known(path: Path) -> None:
    rows = [{**row, "pass_rate": "high" if i else 0.5} for i, row in enumerate(ROWS)]
    path.write_text("\n".join(map(json.dumps, rows)))
    _, removed = run(path, "--filter.min_pass_rate=0.1")
    assert set(removed["pass rate"].values()) == {"not known"}


def test_a_cache_of_other_rows_is_refused(path: Path, tmp_path: Path, refused: Callable[..., None]) -> None:
    SentCacheWriter(tmp_path / "sent.jsonl", {"dataset": {"fingerprint": "0" * 16}}, {}).finish()
    own = [f"--path={path}", f"--output={tmp_path / 'x.jsonl'}", f"--sent_cache={tmp_path / 'sent.jsonl'}"]
    refused(["filter", *own], "a cache of these rows")


def test_columns_that_json_does_not_know_are_kept_as_text(tmp_path: Path) -> None:
    rows = [{"question": f"{n}+1?", "answer": str(n + 1), "day": date(2026, 1, n)} for n in (1, 2)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert (
        main(["filter", "--dataset=custom", f"--path={tmp_path}/rows.parquet", f"--output={tmp_path}/kept.jsonl"]) == 0
    )
    assert [row["day"] for row in load_rows("custom", path=f"{tmp_path}/kept.jsonl")] == ["2026-01-01", "2026-01-02"]
