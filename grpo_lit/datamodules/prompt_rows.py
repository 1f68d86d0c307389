"""Rows with their rendered prompts, and how rows are numbered, split and collated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_lit.datamodules.loader import PromptBatch
from grpo_lit.datamodules.readers import Row


class Prompt:
    """A row with its rendered text and token ids."""

    __slots__ = ("ids", "row", "text")

    def __init__(self, text: str, ids: list[int], row: Row) -> None:
        self.text = text
        self.ids = ids
        self.row = row


def collate(prompts: Sequence[Prompt], positions: Sequence[int]) -> PromptBatch:
    """The batch of the prompts at the given positions."""
    chosen = [prompts[position] for position in positions]
    columns = sorted({column for prompt in chosen for column in prompt.row} - {"index"})
    return PromptBatch(
        prompts=[prompt.text for prompt in chosen],
        prompt_ids=[prompt.ids for prompt in chosen],
        indices=[prompt.row["index"] for prompt in chosen],
        columns={column: [prompt.row.get(column) for prompt in chosen] for column in columns},
    )


def numbered(rows: Sequence[Row]) -> list[Row]:
    """The rows with their number in the dataset as ``index``."""
    return [{**row, "index": index} for index, row in enumerate(rows)]


def split_rows(rows: Sequence[Row], num_val: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows into training and validation, without overlap of questions.

    Rows with the same question stay on the same side. Each row gets its number in the dataset as ``index``.

    Args:
        rows: all rows.
        num_val: rows wanted for validation.
        seed: of the draw.

    Returns:
        Training and validation rows, each in the order of the dataset.
    """
    all_rows = numbered(rows)
    questions = list(dict.fromkeys(row["question"] for row in all_rows))
    generator = np.random.Generator(np.random.Philox(key=[seed % 2**63, 2**62]))
    held_out = {questions[i] for i in generator.permutation(len(questions))[:num_val]}
    train = [row for row in all_rows if row["question"] not in held_out]
    val = [row for row in all_rows if row["question"] in held_out][:num_val]
    return train, val
