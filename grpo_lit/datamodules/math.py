"""Math questions as prompts: split, template, order and batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule

from grpo_lit.datamodules.datasets import Row, load_rows
from grpo_lit.datamodules.loader import FixedBatches, PromptBatch, PromptLoader
from grpo_lit.errors import UserError
from grpo_lit.prompts import PromptEncoder

_log = logging.getLogger(__name__)

DEFAULT_TEMPLATE = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


class MathDataModule(LightningDataModule):
    """Serves training prompts in a deterministic order and held-out prompts for validation.

    Args:
        dataset: name of a dataset in `grpo_lit.datamodules.DATASETS`.
        path: local .jsonl or .parquet file in the dataset's original schema, instead of the hub.
        val_path: local file with the validation rows; without it they are split off the training rows.
        dataset_options: options of a generated dataset, such as arithmetic's terms.
        prompts_per_step: prompts per rollout step, over all ranks.
        val_prompts: held-out rows; 0 switches validation off.
        val_on_train: validate on the training prompts themselves, for tasks of a few fixed prompts.
        val_batch_size: prompts generated together in validation.
        prompt_template: text of the user's turn; ``{question}`` is replaced, all else is literal.
        system_prompt: system turn for chat models; none by default.
        chat_template: render with the tokenizer's chat template; None uses it where there is one.
        max_prompt_length: tokens; longer prompts are left out, counted and listed.
        shuffle: a new order each epoch, drawn from the seed; False keeps the dataset's order.
        seed: of split and order.
    """

    def __init__(
        self,
        dataset: str = "gsm8k",
        path: str | None = None,
        val_path: str | None = None,
        dataset_options: dict[str, Any] | None = None,
        prompts_per_step: int = 8,
        val_prompts: int = 200,
        val_on_train: bool = False,
        val_batch_size: int = 64,
        prompt_template: str = DEFAULT_TEMPLATE,
        system_prompt: str | None = None,
        chat_template: bool | None = None,
        max_prompt_length: int | None = 512,
        shuffle: bool = True,
        seed: int = 42,
    ) -> None:
        super().__init__()
        if prompts_per_step < 1:
            raise UserError("data.prompts_per_step", prompts_per_step, "at least 1 prompt")
        if val_prompts < 0:
            raise UserError("data.val_prompts", val_prompts, "0 (no validation) or more held-out rows")
        if val_batch_size < 1:
            raise UserError("data.val_batch_size", val_batch_size, "at least 1 prompt")
        if max_prompt_length is not None and max_prompt_length < 1:
            raise UserError("data.max_prompt_length", max_prompt_length, "at least 1 token, or null for no limit")
        if val_on_train and val_path is not None:
            raise UserError("data.val_path", val_path, "null with data.val_on_train=true")
        if "{question}" not in prompt_template:
            raise UserError("data.prompt_template", prompt_template, "a text that contains {question}")
        self.dataset = dataset
        self.path = path
        self.val_path = val_path
        self.dataset_options = dataset_options
        self.prompts_per_step = prompts_per_step
        self.val_prompts = val_prompts
        self.val_on_train = val_on_train
        self.val_batch_size = val_batch_size
        self.prompt_template = prompt_template
        self.system_prompt = system_prompt
        self.chat_template = chat_template
        self.max_prompt_length = max_prompt_length
        self.shuffle = shuffle
        self.seed = seed
        self.too_long: list[int] = []
        self._rows: tuple[list[Row], list[Row]] | None = None
        self._train: list[_Prompt] = []
        self._val: list[_Prompt] = []

    def load(self) -> tuple[list[Row], list[Row]]:
        """Training and validation rows, without tokenizing; read once.

        Raises:
            UserError: missing file, bad row, or too few rows for the split.
        """
        if self._rows is None:
            rows = load_rows(self.dataset, path=self.path, options=self.dataset_options)
            if self.val_on_train:
                train = numbered(rows)
                val = train[: self.val_prompts]
            elif self.val_path is not None:
                val = numbered(load_rows(self.dataset, path=self.val_path))[: self.val_prompts]
                questions = {row["question"] for row in val}
                train = [row for row in numbered(rows) if row["question"] not in questions]
            else:
                train, val = split_rows(rows, self.val_prompts, self.seed)
            if not train:
                raise UserError("data.val_prompts", self.val_prompts, f"fewer than the {len(rows)} rows there are")
            self._rows = train, val
        return self._rows

    def connect(self, encoder: PromptEncoder) -> None:
        """Render and encode every prompt with the model's tokenizer.

        Raises:
            UserError: every prompt is longer than ``max_prompt_length``.
        """
        if self._train:
            return
        train, val = self.load()
        self._train = self._encode(train, encoder, list_too_long=True)
        self._val = self._encode(val, encoder, list_too_long=False)
        if self.too_long:
            _log.warning(
                "%d of %d training prompts exceed data.max_prompt_length=%s tokens and are left out: rows %s%s",
                len(self.too_long),
                len(train),
                self.max_prompt_length,
                ", ".join(map(str, self.too_long[:10])),
                ", ..." if len(self.too_long) > 10 else "",
            )
        if not self._train:
            raise UserError("data.max_prompt_length", self.max_prompt_length, "a length that some prompt has")

    def setup(self, stage: str) -> None:
        """Connect to the trainer's model; Lightning calls this before the model is built."""
        del stage
        assert self.trainer is not None
        self.connect(self.trainer.lightning_module.encoder)  # type: ignore[arg-type]

    @property
    def num_train_prompts(self) -> int:
        """Training prompts per epoch."""
        return len(self._train)

    @property
    def longest_prompts(self) -> tuple[int, int]:
        """Tokens of the longest training and of the longest held-out prompt; 0 where there is none."""
        train, val = (max((len(prompt.ids) for prompt in side), default=0) for side in (self._train, self._val))
        return train, val

    def epoch_order(self, epoch: int) -> list[int]:
        """Positions of the training prompts in the order that an epoch serves them."""
        if not self.shuffle:
            return list(range(len(self._train)))
        generator = np.random.Generator(np.random.Philox(key=[self.seed % 2**63, epoch]))
        return [int(index) for index in generator.permutation(len(self._train))]

    def train_dataloader(self) -> PromptLoader:
        """Batches of ``prompts_per_step`` prompts."""
        return PromptLoader(
            len(self._train), self.prompts_per_step, self.epoch_order, lambda rows: _collate(self._train, rows)
        )

    def val_dataloader(self) -> FixedBatches:
        """Batches of held-out prompts, always in the same order."""
        starts = range(0, len(self._val), self.val_batch_size)
        return FixedBatches(
            [_collate(self._val, range(len(self._val))[start : start + self.val_batch_size]) for start in starts]
        )

    def render(self, question: str, encoder: PromptEncoder) -> str:
        """The prompt text of a question."""
        user = self.prompt_template.replace("{question}", question)
        use_chat = encoder.has_chat_template if self.chat_template is None else self.chat_template
        if not use_chat:
            return user if self.system_prompt is None else f"{self.system_prompt}\n\n{user}"
        if not encoder.has_chat_template:
            raise UserError("data.chat_template", True, "null or false: this tokenizer has no chat template")
        messages = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        return encoder.render_chat([*messages, {"role": "user", "content": user}])

    def _encode(self, rows: list[Row], encoder: PromptEncoder, *, list_too_long: bool) -> list[_Prompt]:
        prompts = []
        for row in rows:
            text = self.render(row["question"], encoder)
            ids = encoder.encode(text)
            if self.max_prompt_length is not None and len(ids) > self.max_prompt_length:
                if list_too_long:
                    self.too_long.append(row["index"])
                continue
            prompts.append(_Prompt(text, ids, row))
        return prompts


class _Prompt:
    """A row with its rendered text and token ids."""

    __slots__ = ("ids", "row", "text")

    def __init__(self, text: str, ids: list[int], row: Row) -> None:
        self.text = text
        self.ids = ids
        self.row = row


def _collate(prompts: Sequence[_Prompt], rows: Sequence[int]) -> PromptBatch:
    chosen = [prompts[row] for row in rows]
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
