"""GGUF files read once.

transformers reads a GGUF file's metadata anew for the configuration, the tokenizer and the weights (every entry of the
vocabulary, one numpy call each), and builds the table of tensor names once for every submodule of the model. For a
135M model both together take most of its loading time. Nothing here changes what is read.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np


@contextmanager
def read_once(gguf_file: str | None) -> Iterator[None]:
    """While it lasts, transformers parses the GGUF file and its table of names once.

    Args:
        gguf_file: the file's name; None, for a model in another format, changes nothing.
    """
    if gguf_file is None:
        yield
        return
    gguf: Any = importlib.import_module("gguf")  # slow to import, and of use for such files alone
    # transformers looks both names up in the module each time it loads something.
    reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = _shared_reader, _shared_name_map
    try:
        yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map


def _shared_reader(path: str | os.PathLike[str], mode: str = "r") -> Any:
    state = os.stat(path)
    return _reader(os.fspath(path), mode, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=1)  # a reader maps the file and holds the parsed metadata: some 100 MB for 50,000 tokens
def _reader(path: str, mode: str, changed_ns: int, size: int) -> Any:
    plain: Any = importlib.import_module("gguf.gguf_reader").GGUFReader

    class Reader(plain):  # type: ignore[misc]
        """Slices of plain memory: those of a memmap, a million of them, take three times as long."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    return Reader(path, mode)


@functools.lru_cache(maxsize=4)
def _shared_name_map(architecture: Any, num_layers: int) -> Any:
    return importlib.import_module("gguf.tensor_mapping").get_tensor_name_map(architecture, num_layers)


def special_tokens(path: str | os.PathLike[str]) -> dict[str, int]:
    """Ids that a GGUF file gives its tokenizer's special tokens, by transformers' names (``eos_token``, ...).

    transformers takes most from the file itself, but 5.17 reads SmolLM2's EOS as its BOS.

    Args:
        path: the GGUF file.
    """
    fields = _shared_reader(path).fields
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: fields.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: int(field.contents()) for name, field in found.items() if field is not None}
