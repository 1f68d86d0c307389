"""Tables of benchmarks as files."""

from __future__ import annotations

from pathlib import Path

from grpo_lit.bench.tables import write_csv


def test_rows_are_written_into_a_new_folder(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.csv"
    write_csv(file, [{"a": 1, "b": None}, {"a": 2.5, "b": "x, y"}])
    assert file.read_bytes() == b'a,b\n1,\n2.5,"x, y"\n'
    write_csv(file, [{"a": 1, "b": 2, "c": 3}], ("c", "a"))
    assert file.read_text() == "c,a\n3,1\n"
    write_csv(file, [])
    assert file.read_text() == "\n"
    write_csv(None, [{"a": 1}])
