"""From messages to token ids: chat template, exactly one BOS, and the tail a template prefills."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from grpo_lit.errors import UserError
from grpo_lit.gguf_files import read_once, special_tokens
from grpo_lit.hub import offline_if_unreachable
from grpo_lit.model_source import ModelSource, unreachable

Message = dict[str, str]
_PREFILLED_THINK = re.compile(r"<think>\s*\Z")


def load_tokenizer(source: ModelSource, *, argument: str = "model.policy.path") -> PreTrainedTokenizerBase:
    """Load a tokenizer and make sure that it can pad and stop.

    Raises:
        UserError: there is no tokenizer, or it has neither a pad nor an EOS token.
    """
    if not source.is_local:
        offline_if_unreachable()
    try:
        with read_once(source.gguf_file):
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.location, **source.kwargs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if (fault := unreachable(source, argument, error)) is not None:
            raise fault from error
        raise UserError(argument, source.spec, "a model with a tokenizer") from error
    if source.gguf_file:
        for name, number in special_tokens(Path(source.location) / source.gguf_file).items():
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))
    if tokenizer.eos_token_id is None:
        raise UserError(argument, source.spec, "a tokenizer with an EOS token: a rollout could never stop")
    if tokenizer.pad_token_id is None:
        # Safe here because masks come from the position of the first EOS, never from `ids == pad`.
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


class PromptEncoder:
    """Render prompts as the model expects them and turn them into token ids.

    Args:
        tokenizer: the model's tokenizer.
        chat_template_kwargs: extra variables for the chat template, such as ``enable_thinking``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs = chat_template_kwargs or {}

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer brings a chat template."""
        return bool(self.tokenizer.chat_template)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The text of a conversation up to where the assistant speaks, as the chat template writes it."""
        text = self.tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True, **self.chat_template_kwargs
        )
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> list[int]:
        """Token ids of a rendered prompt, with one BOS where the tokenizer uses one, never two, and no EOS.

        A chat template often writes the BOS itself and the tokenizer then adds another (DeepSeek-R1-Distill
        shows 151646 twice); a raw prompt has none of its own. So the rule looks at the result.
        """
        ids: list[int] = list(self.tokenizer(text, add_special_tokens=True).input_ids)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        while bos is not None and len(ids) > 1 and ids[0] == bos and ids[1] == bos:
            ids.pop(0)
        if ids and ids[-1] == eos and self.tokenizer(text, add_special_tokens=False).input_ids[-1:] != [eos]:
            ids.pop()
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion, without special tokens."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def prefilled_tail(prompt: str) -> str:
    r"""The opening think tag that a template put at the end of the prompt, or an empty string.

    Such a completion never contains ``<think>`` itself; rewards get tail + completion, so that a format
    reward sees the whole thought.

    >>> prefilled_tail("<|Assistant|><think>\n")
    '<think>\n'
    >>> prefilled_tail("2+2=")
    ''
    """
    match = _PREFILLED_THINK.search(prompt)
    return match.group() if match else ""
