"""The shipped tiny model: loads offline, is small, and adds as badly as its card says."""

from __future__ import annotations

import importlib.util
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo_lit
from grpo_lit.datamodules.arithmetic import arithmetic_rows
from grpo_lit.datamodules.math import MathDataModule, split_rows

PACKAGE = Path(grpo_lit.__file__).resolve().parent
FOLDER = PACKAGE / "assets" / "tiny_arithmetic"
SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "make_tiny_arithmetic.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny_arithmetic", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def held_out(script: ModuleType) -> list[dict[str, Any]]:
    return split_rows(arithmetic_rows(terms=3), script.NUM_HELD_OUT, script.SPLIT_SEED)[1]


@pytest.fixture(scope="module")
def answer(model: Any, tokenizer: Any) -> Callable[..., tuple[list[str], torch.Tensor]]:
    """Complete sums as transformers does it; texts and token ids (N, T)."""

    def complete(questions: list[str], **sampling: Any) -> tuple[list[str], torch.Tensor]:
        batch = tokenizer([f"{question}=" for question in questions], return_tensors="pt", padding=True)
        torch.manual_seed(0)
        ids = model.generate(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=4, **sampling
        )[:, batch.input_ids.shape[1] :]
        return tokenizer.batch_decode(ids, skip_special_tokens=True), ids

    return complete


def share_right(rows: list[dict[str, Any]], texts: list[str]) -> float:
    return sum(row["answer"] == text for row, text in zip(rows, texts, strict=True)) / len(rows)


def card_number(pattern: str) -> float:
    found = re.search(pattern, (FOLDER / "README.md").read_text(encoding="utf-8").replace("\n", " "))
    assert found is not None, pattern
    return float(found[1].replace(",", ""))


def test_loads_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert all(p.dtype == torch.float32 and bool(p.isfinite().all()) for p in model.parameters())
    assert model.config.vocab_size == len(tokenizer) == 100
    assert model.num_parameters() == card_number(r"A Llama of ([\d,]+) weights")


def test_folder_is_at_most_2_mb() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= 2 * 1024**2


def test_special_tokens_are_four_different_ones_and_known_to_the_model(tokenizer: Any, model: Any) -> None:
    ids = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id]
    assert sorted(ids) == [0, 1, 2, 3]
    for config in (model.config, model.generation_config):
        assert [config.pad_token_id, config.bos_token_id, config.eos_token_id] == ids[:3]
    assert tokenizer.chat_template is None
    assert tokenizer.padding_side == "left"


def test_one_bos_then_one_token_per_character_and_back(tokenizer: Any) -> None:
    text = "Add up: 12 + 3\n(please!) =~ "
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids
    assert len(ids) == 1 + len(text)
    assert tokenizer(text, add_special_tokens=False).input_ids == ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer("é").input_ids == [tokenizer.bos_token_id, tokenizer.unk_token_id]


def test_a_quarter_of_sampled_answers_is_right_on_held_out_sums(
    held_out: list[dict[str, Any]], answer: Callable[..., tuple[list[str], torch.Tensor]]
) -> None:
    rows = held_out * 8  # 2000 answers: the standard error is 1 percentage point
    texts, _ = answer([row["question"] for row in rows], do_sample=True, temperature=1.0, top_k=0)
    accuracy = share_right(rows, texts)
    assert 0.15 <= accuracy <= 0.35
    assert accuracy == pytest.approx(card_number(r"them ([\d.]+)% of the answers sampled") / 100, abs=0.04)


def test_greedy_answers_are_no_better_so_there_is_something_to_learn(
    held_out: list[dict[str, Any]], answer: Callable[..., tuple[list[str], torch.Tensor]]
) -> None:
    texts, _ = answer([row["question"] for row in held_out], do_sample=False)
    accuracy = share_right(held_out, texts)
    assert accuracy <= 0.5
    assert accuracy == pytest.approx(card_number(r"and ([\d.]+)% of the greedy ones") / 100, abs=0.03)


def test_completions_are_digits_then_eos_within_three_tokens(
    held_out: list[dict[str, Any]], tokenizer: Any, answer: Callable[..., tuple[list[str], torch.Tensor]]
) -> None:
    questions = [row["question"] for row in held_out] + [row["question"] for row in arithmetic_rows()]
    texts, ids = answer(questions, do_sample=True, temperature=1.0, top_k=0)
    well_formed = [
        re.fullmatch(r"\d\d?", text) is not None and tokenizer.eos_token_id in row[: len(text) + 1]
        for text, row in zip(texts, ids.tolist(), strict=True)
    ]
    assert sum(well_formed) / len(well_formed) > 0.99


def test_script_makes_a_loadable_folder_like_the_shipped_one(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["make", "--out", str(tmp_path), "--steps", "2", "--batch_size", "4"])
    with torch.random.fork_rng():
        script.main()
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in FOLDER.iterdir()}
    shipped = (FOLDER / "tokenizer.json").read_text(encoding="utf-8")
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == shipped
    made = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert made.config.to_diff_dict() == AutoModelForCausalLM.from_pretrained(FOLDER).config.to_diff_dict()


def test_script_teaches_what_its_card_says(script: ModuleType) -> None:
    lessons = script.Lessons(
        script.make_tokenizer(), [{"question": "0+0", "answer": "0"}, {"question": "4+5", "answer": "9"}]
    )
    texts = [
        script.make_tokenizer().decode(ids[counts]) for ids, counts in zip(lessons.ids, lessons.is_answer, strict=True)
    ]
    assert texts == [f"{number}<eos>" for number in (0, 0, 1, 2, 8, 9, 10, 11)]


def test_quick_start_holds_out_the_sums_that_were_never_taught(script: ModuleType) -> None:
    config = yaml.safe_load((PACKAGE / "configs" / "quickstart.yaml").read_text(encoding="utf-8"))
    data = MathDataModule(**config["data"])
    assert (data.val_prompts, data.seed) == (script.NUM_HELD_OUT, script.SPLIT_SEED)
    assert data.prompt_template == script.TEMPLATE
    assert data.load() == split_rows(arithmetic_rows(terms=3), script.NUM_HELD_OUT, script.SPLIT_SEED)
