"""The SENT cache's file: what it refuses, what a torn one keeps, and how the DataModule uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_lit.datamodules import MathDataModule
from grpo_lit.datamodules.order import SamplerConfig
from grpo_lit.datamodules.sent_cache import SentCacheWriter, SentEntry, read_sent_cache, rows_fingerprint
from grpo_lit.datamodules.sent_report import markdown
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.model_source import resolve_model_source
from grpo_lit.prompts import PromptEncoder, load_tokenizer

MODEL = {"path": "tiny", "dtype": "fp32", "quantization": None}


@pytest.fixture
def encoder(tiny_llama: Path) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(resolve_model_source(str(tiny_llama))))


def entry(index: int, entropy: float = 0.0, rate: float | None = 1.0) -> SentEntry:
    return SentEntry(index, entropy, [0, 0], rate, ["1", None])


def data_module(**more: Any) -> MathDataModule:
    options = {"prompt_template": "{question}=", "dataset_options": {"high": 3}, "val_prompts": 4, **more}
    return MathDataModule("arithmetic", prompts_per_step=2, **options)


def write_cache(path: Path, encoder: PromptEncoder, leave_out: int = 0) -> Path:
    """Sums 0..3: entropy falls with the row, except that the first two tie."""
    writer = SentCacheWriter(path, {**data_module().sent_key(encoder), "model": MODEL, "sampling": {}}, {})
    rows = range(leave_out, 16)
    writer.add([entry(i, 0.9 if i < 2 else 1 - i / 20, 0.5 if i == 0 else 0.75) for i in rows])
    writer.finish()
    return path


@pytest.mark.faults
def test_torn_and_half_written_batches_are_sampled_again(tmp_path: Path) -> None:
    path = tmp_path / "c" / "sent.jsonl"
    writer = SentCacheWriter(path, {"a": 1}, {})
    writer.add([entry(0), entry(1)])
    writer.add([entry(2)])
    whole = writer.partial.read_bytes()
    with pytest.raises(UserError, match="no other process samples into"):
        SentCacheWriter(path, {"a": 1}, {})
    writer.close()
    for cut in range(len(whole) + 1):
        if cut <= whole.index(b"\n"):
            continue  # the first line is written in one move: never torn
        writer.partial.write_bytes(whole[:cut])
        again = SentCacheWriter(path, {"a": 1}, {})
        assert len(again.entries) == (3 if cut == len(whole) else 2 if whole[:cut].count(b"\n") == 2 else 0)
        known = len(again.entries)
        again.add([entry(7)])  # right behind what was whole, not behind a torn line
        again.close()
        last = SentCacheWriter(path, {"a": 1}, {})
        assert [e.index for e in last.entries] == [0, 1, 2][:known] + [7]
        last.close()
    with pytest.raises(UserError, match=r"sent\.output.*a=1 instead of 2"):
        SentCacheWriter(path, {"a": 2}, {})
    first, _, rest = whole.split(b"\n", 2)
    writer.partial.write_bytes(damaged := first + b'\n[{"index": 0\n' + rest)
    with pytest.raises(SystemFault, match=r"sent\.jsonl\.partial, line 2 is damaged"):
        SentCacheWriter(path, {"a": 1}, {})
    assert writer.partial.read_bytes() == damaged, "the batches after it are not lost"


@pytest.mark.faults
def test_unfinished_missing_and_damaged_caches_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sent.jsonl"
    with pytest.raises(UserError, match=r"data\.sent_cache.*a file of grpo-lit sent"):
        read_sent_cache(path)
    writer = SentCacheWriter(path, {}, {})
    writer.add([entry(0), entry(1, 0.5)])
    with pytest.raises(UserError, match="run grpo-lit sent again"):
        read_sent_cache(path)
    writer.finish()
    assert [e.index for e in read_sent_cache(path).entries] == [0, 1]
    assert not writer.partial.exists()
    good = path.read_bytes()
    other = json.dumps({"sent_cache": 99, "key": {}, "status": "complete", "num_prompts": 2}).encode()
    without_last = good[: good.rstrip(b"\n").rindex(b"\n") + 1]
    for bad in (good[:-20], without_last, good.replace(b'"complete"', b'"in_progress"'), b"{}\n", b"x", other):
        path.write_bytes(bad)
        with pytest.raises(UserError, match=r"data\.sent_cache"):
            read_sent_cache(path)


def test_stages_follow_the_epochs_and_pass_rate_breaks_ties(tmp_path: Path, encoder: PromptEncoder) -> None:
    path = str(write_cache(tmp_path / "sent.jsonl", encoder))
    data = data_module(sent_cache=path, sent_stages=3, sent_epochs_per_stage=2, val_prompts=0)
    data.connect(encoder, MODEL)
    order = [*range(15, 2, -1), 1, 2, 0]
    assert [data.epoch_order(e) for e in range(7)] == [order[:5]] * 2 + [order[5:10]] * 2 + [order[10:]] * 3
    assert len(data.train_dataloader()) == 3
    one = data_module(sent_cache=path, sent_stages=3, sent_stage=2, val_prompts=0)
    one.connect(encoder, MODEL)
    assert [one.epoch_order(e) for e in (0, 5)] == [order[5:10]] * 2
    batch = next(iter(one.train_dataloader()))
    assert batch.columns["sent_rank"] == [5, 6]


def test_a_held_out_row_leaves_its_place_in_the_order(tmp_path: Path, encoder: PromptEncoder) -> None:
    data = data_module(sent_cache=str(write_cache(tmp_path / "sent.jsonl", encoder)), sent_stages=1)
    data.connect(encoder, MODEL)
    served = [index for batch in data.train_dataloader() for index in batch.indices]
    assert len(served) == 12
    assert served[:3] == sorted(served[:3], reverse=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dataset_options": {"high": 4}}, "dataset.fingerprint="),
        ({"prompt_template": "{question} = "}, "template.prompt_template='{question}='"),
        ({"system_prompt": "Think."}, "template.system_prompt=None"),
        ({"model": {**MODEL, "dtype": "bf16"}}, "model.dtype='fp32' instead of 'bf16'"),
        ({"leave_out": 2, "val_prompts": 0}, "it lacks 2"),
        ({"sent_stages": 17, "val_prompts": 0}, "data.sent_stages=17"),
    ],
)
def test_a_cache_of_something_else_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path, encoder: PromptEncoder
) -> None:
    model = change.pop("model", MODEL)
    path = write_cache(tmp_path / "sent.jsonl", encoder, change.pop("leave_out", 0))
    with pytest.raises(UserError) as caught:
        data_module(sent_cache=str(path), **change).connect(encoder, model)
    assert words in str(caught.value)


def test_pass_rates_of_a_cache_serve_a_sampler(tmp_path: Path, encoder: PromptEncoder) -> None:
    path = str(write_cache(tmp_path / "sent.jsonl", encoder))
    data = data_module(sent_cache=path, sampler=SamplerConfig("weighted", fraction=0.5))
    data.connect(encoder, MODEL)
    assert len(data.epoch_order(0)) == 6
    assert data.epoch_order(0) != data.epoch_order(1)


def test_fingerprint_is_of_questions_answers_and_their_order() -> None:
    rows = [{"question": "1?", "answer": "1"}, {"question": "2?", "answer": "2"}]
    others = [rows[::-1], rows[:1], [{**rows[0], "question": "3?"}, rows[1]], [{**rows[0], "answer": "3"}, rows[1]]]
    assert len({rows_fingerprint(found) for found in [rows, *others]}) == 5
    assert rows_fingerprint([{**row, "other": 1} for row in rows]) == rows_fingerprint(rows)


def test_table_counts_every_prompt(tmp_path: Path, encoder: PromptEncoder) -> None:
    table = markdown(read_sent_cache(write_cache(tmp_path / "sent.jsonl", encoder)), 2)
    rows = [line.split("|") for line in table.splitlines()[4:]]
    assert sum(int(row[2]) for row in rows) == 16
    assert "| 0.9000 | 3 | 0.188 | 1 | 0.667 | 0 | 0 |" in table
