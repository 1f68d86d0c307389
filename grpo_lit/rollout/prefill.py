"""Prefill: each prompt once through the model's own forward, keys and values straight into pages."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from grpo_lit.policy import Policy
from grpo_lit.rollout.pages import GroupPages, KVCache, PagePool, pages_for

PREFILL_TOKENS = 2048
"""Tokens of a forward, padding included: bounds the activations, 8,960 wide in a 1.5B model."""


class _PageWriter(DynamicCache):
    """A cache for one forward from position 0 that keeps nothing and writes what it gets into pages.

    Args:
        cache: where to.
        pages: (n, p) long, pages of each row of the batch; 0 where a row has fewer.
    """

    def __init__(self, cache: KVCache, pages: Tensor) -> None:
        super().__init__()
        self._target, self._pages = cache, pages

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Store keys and values (n, Hkv, S, D) of a layer and hand them back for this forward's attention."""
        del args, kwargs
        self._target.write(layer_idx, self._pages, key_states, value_states)
        return key_states, value_states


def prefill(
    policy: Policy,
    cache: KVCache,
    pool: PagePool,
    groups: Sequence[tuple[Sequence[int], GroupPages]],
    *,
    one_by_one: bool = False,
) -> None:
    """Fill the shared pages of prompts with all their tokens but the last, which the first decode step feeds.

    Rows are padded on the right: causal attention never looks there, so no mask is needed.

    Args:
        policy: its live adapters take part.
        cache: written.
        pool: pages are taken from it.
        groups: token ids and page record of each prompt.
        one_by_one: each prompt in a forward of its own, so that its company cannot change its rounding.
    """
    todo = []
    for prompt, record in groups:
        pages = record.take_shared(pool)
        if pages:
            todo.append((list(prompt[:-1]), pages))
    todo.sort(key=lambda item: len(item[0]))
    for batch in [[item] for item in todo] if one_by_one else _batches(todo):
        width = len(batch[-1][0])
        ids = torch.tensor([row + [0] * (width - len(row)) for row, _ in batch])
        table = torch.tensor([pages + [0] * (pages_for(width) - len(pages)) for _, pages in batch])
        writer = _PageWriter(cache, table.to(policy.device))
        with policy.generating() as model:
            decoder: Any = getattr(model, model.base_model_prefix)
            positions = torch.arange(width, device=policy.device).expand(len(batch), -1)
            named = {_cache_argument(decoder): writer}
            decoder(input_ids=ids.to(policy.device), position_ids=positions, use_cache=True, **named)


def _cache_argument(decoder: Any) -> str:
    """What a decoder calls its cache: `cache` in transformers 5.24, which drops the old name in 5.40."""
    return "cache" if "cache" in inspect.signature(decoder.forward).parameters else "past_key_values"


def _batches(items: list[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Cut a list sorted by length so that rows times longest stay within `PREFILL_TOKENS`."""
    batch: list[tuple[list[int], list[int]]] = []
    for item in items:
        if batch and (len(batch) + 1) * len(item[0]) > PREFILL_TOKENS:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch
