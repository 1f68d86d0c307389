from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from grpo_lit import gguf_files
from grpo_lit.errors import UserError
from grpo_lit.model_source import load_model_config, resolve_model_source
from grpo_lit.prompts import PromptEncoder, load_tokenizer, prefilled_tail

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}="


@pytest.fixture
def encoder(tiny_llama: Path) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(resolve_model_source(str(tiny_llama))))


def test_exactly_one_bos_for_raw_and_templated_prompts(encoder: PromptEncoder) -> None:
    """The template writes a BOS and the tokenizer adds one: DeepSeek-R1-Distill's case."""
    bos = encoder.tokenizer.bos_token_id
    raw = encoder.encode("1+1=")
    encoder.tokenizer.chat_template = TEMPLATE
    text = encoder.render_chat([{"role": "user", "content": "1+1"}])
    assert text.startswith("<bos>")
    assert encoder.encode(text) == raw
    assert raw.count(bos) == 1
    assert raw[0] == bos


def test_tokenizer_that_adds_no_bos_gets_none(smollm2: str) -> None:
    encoder = PromptEncoder(load_tokenizer(resolve_model_source(smollm2)))
    assert encoder.tokenizer.bos_token_id not in encoder.encode("What is 1+1?")
    chat = encoder.encode(encoder.render_chat([{"role": "user", "content": "What is 1+1?"}]))
    assert chat[0] == encoder.tokenizer.bos_token_id
    assert chat[1] != encoder.tokenizer.bos_token_id


def test_eos_that_a_tokenizer_appends_is_taken_off(encoder: PromptEncoder) -> None:
    from tokenizers import processors

    plain = encoder.encode("1+1=")
    encoder.tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert encoder.encode("1+1=") == plain


@pytest.mark.parametrize(
    ("prompt", "tail"),
    [("x<think>\n", "<think>\n"), ("x<think>", "<think>"), ("<think>a</think>", ""), ("2+2=", ""), ("<think> x", "")],
)
def test_prefilled_tail(prompt: str, tail: str) -> None:
    assert prefilled_tail(prompt) == tail


def test_decode_leaves_special_tokens_out(encoder: PromptEncoder) -> None:
    ids = encoder.encode("12+3")
    assert encoder.decode([*ids, encoder.tokenizer.eos_token_id]) == "12+3"


def test_a_gguf_file_names_its_special_tokens(smollm2: str) -> None:
    tokenizer = load_tokenizer(resolve_model_source(smollm2))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_a_gguf_file_is_read_once(smollm2: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    readers = []

    class Counted(gguf.gguf_reader.GGUFReader):  # type: ignore[misc]
        def __init__(self, *args: object) -> None:
            readers.append(args[0])
            super().__init__(*args)

    gguf_files._reader.cache_clear()
    monkeypatch.setattr(gguf.gguf_reader, "GGUFReader", Counted)
    source = resolve_model_source(smollm2)
    assert load_model_config(source).vocab_size == len(load_tokenizer(source)) == 49152
    assert len(readers) == 1
    assert gguf.GGUFReader is not gguf_files._shared_reader  # what others load is their own affair


def test_a_gguf_file_needs_a_transformers_that_reads_it_right(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    monkeypatch.setattr(transformers, "__version__", "5.17.0")
    for path in (file, tmp_path):
        assert resolve_model_source(str(path)).gguf_file == "model.gguf"
    monkeypatch.setattr(transformers, "__version__", "5.16.1")
    for path in (file, tmp_path):
        with pytest.raises(UserError, match=r"transformers 5\.17 or newer \(5\.16\.1 is installed\)"):
            resolve_model_source(str(path))
