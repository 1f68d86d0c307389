"""The paged KV cache: storage on the device, bookkeeping on the host.

A page holds `PAGE` positions of one row in every layer. The full pages of a prompt are written once and shared by all
rows of its group; the last, partly filled one is a template that each row gets a copy of. A row's pages for its
whole completion are set aside when it is admitted, so a rollout never runs out of pages half-way::

    prompt of 150 tokens, 149 of them prefilled          row a   0 1 | 7 8 9      pages 0, 1: shared
    full pages 0, 1; page 2 is the template              row b   0 1 | 4 5 6      pages 7, 4: copies of 2

Paging as in vLLM (Kwon et al. 2023, 2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_lit.kernels.paged_attention import PAGE


def pages_for(num_tokens: int) -> int:
    """Pages that hold this many positions.

    >>> pages_for(0), pages_for(64), pages_for(65)
    (0, 1, 2)
    """
    return -(-num_tokens // PAGE)


@dataclass(frozen=True)
class CacheShape:
    """What a page weighs: layers, key-value heads and head size of the model.

    Attributes:
        num_layers: L.
        num_kv_heads: Hkv.
        head_dim: D.
        dtype: of keys and values.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        return 2 * self.num_layers * self.num_kv_heads * PAGE * self.head_dim * self.dtype.itemsize


class KVCache:
    """Keys and values of all layers in pages.

    Args:
        shape: of the model.
        num_pages: pages to hold. Page 0 is nobody's: page tables are padded with it.
        device: where.
    """

    def __init__(self, shape: CacheShape, num_pages: int, device: torch.device) -> None:
        size = (shape.num_layers, 2, num_pages, shape.num_kv_heads, PAGE, shape.head_dim)
        self.storage = torch.empty(size, dtype=shape.dtype, device=device)  # (L, 2, pages, Hkv, PAGE, D)
        self.shape = shape

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """k_pages and v_pages of a layer, (num_pages, Hkv, PAGE, D) each."""
        return self.storage[index, 0], self.storage[index, 1]

    def write(self, layer: int, pages: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write whole pages of a batch of prompts.

        Args:
            layer: number of the layer.
            pages: (n, p) long, page numbers of n rows; 0 where a row has fewer pages.
            keys: (n, Hkv, S, D) with S at most p PAGE.
            values: like keys.
        """
        num_rows, num_pages = pages.shape
        for which, source in enumerate((keys, values)):
            missing = num_pages * PAGE - source.shape[2]
            padded = torch.nn.functional.pad(source, (0, 0, 0, missing)) if missing else source
            split = padded.unflatten(2, (num_pages, PAGE)).transpose(1, 2)  # (n, p, Hkv, PAGE, D)
            self.storage[layer, which].index_copy_(
                0, pages.flatten(), split.reshape(num_rows * num_pages, *split.shape[2:]).to(self.storage.dtype)
            )

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy pages (n,) long to pages (n,) long in every layer."""
        self.storage.index_copy_(2, target, self.storage.index_select(2, source))


class PagePool:
    """Free pages of a `KVCache`, by number.

    >>> pool = PagePool(4)
    >>> pool.take(2), pool.num_free
    ([1, 2], 1)
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, 0, -1))  # page 0 is the padding of page tables

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages."""
        assert count <= len(self._free), "the plan reserves enough pages for every slot"
        return [self._free.pop() for _ in range(count)]

    def give(self, pages: Sequence[int]) -> None:
        """Take pages back."""
        self._free.extend(pages)


@dataclass
class GroupPages:
    """Pages of a prompt that its rows share.

    Attributes:
        prompt_length: tokens of the prompt; all but the last are prefilled, the last one is fed by the first step.
        not_admitted: rows of the group still waiting.
        not_done: rows of the group waiting or running.
        full: pages filled to the last position, shared.
        template: the partly filled page, if any.
        ready: whether the prompt was prefilled.
    """

    prompt_length: int
    not_admitted: int
    not_done: int
    full: list[int] = field(default_factory=list)
    template: int | None = None
    ready: bool = False

    @property
    def num_full(self) -> int:
        """Full pages of the prefilled part."""
        return (self.prompt_length - 1) // PAGE

    @property
    def num_shared(self) -> int:
        """Pages of the prefilled part, the template included."""
        return pages_for(self.prompt_length - 1)

    def num_private(self, max_new_tokens: int) -> int:
        """Pages a row needs beside the full ones: the last sampled token is never fed, so it needs no place."""
        return pages_for(self.prompt_length - 1 + max_new_tokens) - self.num_full

    def take_shared(self, pool: PagePool) -> list[int]:
        """Set pages aside for the prompt; returns them in the order of positions."""
        pages = pool.take(self.num_shared)
        self.full, self.ready = pages[: self.num_full], True
        self.template = pages[-1] if len(pages) > self.num_full else None
        return pages

    def release_shared(self, pool: PagePool) -> None:
        """Give the prompt's pages back, after its last row."""
        pool.give(self.full)
        if self.template is not None:
            pool.give([self.template])
        self.full, self.template = [], None
