r"""Stopping a row at its first complete final answer, where the configuration asks for it.

Text after a closed ``\boxed{...}`` or an ``</answer>`` earns nothing and costs a decode step a token. The rule looks at
decoded text, so it is the same in every engine; tokens sampled past the end of the answer are dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from transformers import PreTrainedTokenizerBase

StopAt = Literal["boxed", "answer_tag"]
_BOXED = re.compile(r"\\boxed\s*\{")
_CLOSERS = {"boxed": "}", "answer_tag": ">"}


def answer_complete(text: str, stop_at: StopAt, *, thinking: bool = False) -> bool:
    r"""Whether a completion holds a whole final answer.

    Nothing inside ``<think>...</think>`` counts.

    Args:
        text: what was sampled so far.
        stop_at: "boxed" wants a closed ``\boxed{...}``, "answer_tag" an ``</answer>``.
        thinking: whether the prompt ends inside a ``<think>``.

    >>> answer_complete(r"so \boxed{\frac{1}{2}}", "boxed"), answer_complete(r"so \boxed{\frac{1}{2}", "boxed")
    (True, False)
    >>> answer_complete(r"\boxed{1}", "boxed", thinking=True)
    False
    """
    _, closed, tail = text.rpartition("</think>")
    if closed:
        text = tail
    elif thinking or "<think>" in text:
        return False
    text = text.partition("<think>")[0]
    if stop_at == "answer_tag":
        return "</answer>" in text
    return any(_closes(text, match.end()) for match in _BOXED.finditer(text))


def _closes(text: str, start: int) -> bool:
    depth = 1
    for index in range(start, len(text)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return True
    return False


class AnswerStop:
    """Finds the token that completes a row's answer.

    Args:
        tokenizer: decodes.
        stop_at: see `answer_complete`.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_at: StopAt) -> None:
        self._decode: Callable[[Sequence[int]], str] = lambda ids: str(
            tokenizer.decode(list(ids), skip_special_tokens=False)
        )
        self.stop_at = stop_at
        self._closer = _CLOSERS[stop_at]

    def thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a ``<think>``."""
        text = self._decode(prompt[-16:])
        return text.rfind("<think>") > text.rfind("</think>")

    def length(self, ids: Sequence[int], num_checked: int, *, thinking: bool = False) -> int | None:
        """Tokens of the completion up to the end of its first complete answer.

        Args:
            ids: tokens sampled so far.
            num_checked: how many of them an earlier call has seen without finding an answer.
            thinking: see `answer_complete`.

        Returns:
            A length from num_checked + 1 to len(ids), or None.
        """
        if self._closer not in self._decode(ids[max(num_checked - 1, 0) :]):
            return None
        if thinking and "</think>" not in self._decode(ids):
            return None
        # Every length that ends an answer, not the last one alone: a later "<think>" or "</think>" would hide an answer
        # already given, and then the result would depend on when one looks. A text decoded whole costs its length.
        for length in range(num_checked + 1, len(ids) + 1):
            closed = self._closer in self._decode(ids[max(length - 2, 0) : length])
            if closed and answer_complete(self._decode(ids[:length]), self.stop_at, thinking=thinking):
                return length
        return None
