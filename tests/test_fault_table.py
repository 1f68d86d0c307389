"""The page of faults says what the record says, and the record has every try of every fault, with nothing lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import fault_table  # type: ignore[import-not-found]

    yield fault_table
    for name in [name for name in sys.modules if name == "fault_table" or name.partition(".")[0] == "faults"]:
        del sys.modules[name]


def test_every_fault_was_tried_and_lost_nothing(script: ModuleType) -> None:
    record = script.read_record(script.RECORD)
    tried = {(entry["fault"], entry["try"]) for entry in record}
    assert tried == {(name, number) for name, row in script.FAULTS.items() for number in range(row.tries)}
    assert {entry["lost"] for entry in record} == {"nothing"}
    assert all(entry["saw"] and "Traceback" not in entry["saw"] for entry in record)


def test_page_is_made_from_the_record(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "faults.md"
    page.write_text(script.PAGE.read_text())
    monkeypatch.setattr(script, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["fault_table.py", "table"])
    assert script.main() == 0
    assert page.read_text() == (ROOT / "docs" / "faults.md").read_text()
