from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_lit.datamodules import MathDataModule, load_rows
from grpo_lit.datamodules.datasets import gsm8k_answer
from grpo_lit.datamodules.prompt_rows import split_rows
from grpo_lit.errors import UserError
from grpo_lit.model_source import resolve_model_source
from grpo_lit.prompts import PromptEncoder, load_tokenizer


@pytest.fixture
def encoder(tiny_llama: Path) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(resolve_model_source(str(tiny_llama))))


def connected(encoder: PromptEncoder, **kwargs: object) -> MathDataModule:
    options = {"prompts_per_step": 4, "val_prompts": 10, "prompt_template": "{question}=", **kwargs}
    data = MathDataModule("arithmetic", **options)  # type: ignore[arg-type]
    data.connect(encoder)
    return data


def test_gsm8k_rows_keep_their_columns_and_get_a_gold_answer(shared_data: Path) -> None:
    rows = load_rows("gsm8k", path=str(shared_data / "gsm8k_train.jsonl"))
    assert len(rows) == 2000
    assert rows[0]["question"].startswith("Natalia sold clips")
    assert rows[0]["answer"] == "72"
    assert all(row["answer"].replace("-", "").replace(".", "").isdigit() for row in rows)


def test_parquet_equals_jsonl(shared_data: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    source = shared_data / "gsm8k_train.jsonl"
    raw = [json.loads(line) for line in source.read_text().splitlines()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(raw), tmp_path / "rows.parquet")
    assert load_rows("gsm8k", path=str(tmp_path / "rows.parquet")) == load_rows("gsm8k", path=str(source))


@pytest.mark.parametrize(
    ("text", "answer"),
    [("so 3. #### 1,234", "1234"), ("#### -5 ", "-5"), ("#### 0.5\n", "0.5"), ("no mark", None), ("####", None)],
)
def test_gsm8k_answer(text: str, answer: str | None) -> None:
    assert gsm8k_answer(text) == answer


def test_split_has_no_overlap_and_is_the_seed_s() -> None:
    rows = [{"question": f"q{i % 40}", "answer": "1"} for i in range(50)]  # ten questions stand twice
    train, val = split_rows(rows, 12, seed=1)
    assert not {row["question"] for row in train} & {row["question"] for row in val}
    assert len(val) == 12
    assert (train, val) == split_rows(rows, 12, seed=1)
    assert val != split_rows(rows, 12, seed=2)[1]


def test_epochs_serve_every_prompt_once_in_an_order_of_the_seed(encoder: PromptEncoder) -> None:
    data = connected(encoder, seed=3)
    loader = data.train_dataloader()
    first, second = ([i for batch in loader for i in batch.indices] for _ in range(2))
    assert sorted(first) == sorted(second)
    assert len(set(first)) == len(first) == 90
    assert first != second
    assert first == [i for batch in connected(encoder, seed=3).train_dataloader() for i in batch.indices]
    assert first != [i for batch in connected(encoder, seed=4).train_dataloader() for i in batch.indices]
    plain = [i for batch in connected(encoder, shuffle=False).train_dataloader() for i in batch.indices]
    assert plain == sorted(plain)


@pytest.mark.parametrize("stop", [1, 5, 22, 23, 30])
def test_cursor_resumes_without_loss_or_repetition(encoder: PromptEncoder, stop: int) -> None:
    def serve(loader: object, batches: int) -> list[int]:
        served: list[int] = []
        while batches:
            for batch in loader:  # type: ignore[attr-defined]
                served += batch.indices
                batches -= 1
                if not batches:
                    break
        return served

    whole = serve(connected(encoder).train_dataloader(), 40)
    loader = connected(encoder).train_dataloader()
    before = serve(loader, stop)
    resumed = connected(encoder).train_dataloader()
    resumed.load_state_dict(loader.state_dict())
    assert before + serve(resumed, 40 - stop) == whole


def test_last_batch_is_smaller_and_columns_follow(encoder: PromptEncoder) -> None:
    batches = list(connected(encoder).train_dataloader())
    assert [len(batch) for batch in batches] == [4] * 22 + [2]
    for batch in batches:
        for prompt, question, answer in zip(
            batch.prompts, batch.columns["question"], batch.columns["answer"], strict=True
        ):
            assert prompt == f"{question}="
            assert eval(question) == int(answer)


def test_long_prompts_are_listed_and_not_lost_in_silence(
    encoder: PromptEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    data = MathDataModule(
        "arithmetic",
        dataset_options={"high": 12, "terms": 2},
        val_prompts=0,
        prompt_template="{question}=",
        max_prompt_length=5,  # BOS, two digits, two signs
    )
    data.connect(encoder)
    long = [i for i, row in enumerate(load_rows("arithmetic", options={"high": 12})) if len(row["question"]) > 3]
    assert data.too_long == long
    assert f"{len(long)} of 169 training prompts" in caplog.text
    assert data.num_train_prompts == 169 - len(long)
    held_out = MathDataModule(
        "arithmetic", dataset_options={"high": 12}, val_prompts=60, prompt_template="{question}=", max_prompt_length=5
    )
    held_out.connect(encoder)
    assert set(held_out.too_long_held_out) == set(long) - set(held_out.too_long)
    assert f"{len(held_out.too_long_held_out)} of 60 held-out prompts" in caplog.text


def test_templates_with_braces_are_literal(encoder: PromptEncoder) -> None:
    data = MathDataModule("arithmetic", prompt_template="{question} in \\boxed{}: {answer}")
    assert data.render("1+1", encoder) == "1+1 in \\boxed{}: {answer}"


def test_val_path_rows_are_taken_out_of_training(tmp_path: Path, shared_data: Path) -> None:
    lines = (shared_data / "gsm8k_train.jsonl").read_text().splitlines()[:50]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    (tmp_path / "val.jsonl").write_text("\n".join(lines[:7]))
    data = MathDataModule("gsm8k", path=str(tmp_path / "train.jsonl"), val_path=str(tmp_path / "val.jsonl"))
    train, val = data.load()
    assert (len(train), len(val)) == (43, 7)


def test_unknown_option_of_a_generated_dataset() -> None:
    with pytest.raises(UserError, match="data.dataset_options"):
        load_rows("arithmetic", options={"digits": 3})
