"""Math questions as prompts: split, template, order and batches."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningDataModule

from grpo_lit.datamodules.datasets import dataset_spec, load_rows
from grpo_lit.datamodules.loader import FixedBatches, PromptBatch, PromptLoader
from grpo_lit.datamodules.order import SamplerConfig, epoch_generator, pool_order, shuffled, weighted_order
from grpo_lit.datamodules.prompt_rows import Prompt, collate, numbered, split_rows
from grpo_lit.datamodules.readers import Row
from grpo_lit.datamodules.sent import stage_slice
from grpo_lit.datamodules.sent_cache import SentCache, first_difference, model_key, read_sent_cache, rows_fingerprint
from grpo_lit.errors import UserError
from grpo_lit.prompts import PromptEncoder

_log = logging.getLogger(__name__)

DEFAULT_TEMPLATE = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


class MathDataModule(LightningDataModule):
    """Serves training prompts in a deterministic order and held-out prompts for validation.

    Args:
        dataset: name of a dataset in `grpo_lit.datamodules.DATASETS`, ``custom`` with ``path``, or a hub id.
        path: local .jsonl, .json, .csv or .parquet file in the dataset's original schema, instead of the hub; or a
            folder with such a file for each split, with shards of a copy from the hub, or saved by `datasets`.
        split: of the hub or the folder; the dataset's first by default.
        columns: of ``question``, ``answer`` (null: none is needed) and ``context``, where they differ from the entry's.
        val_dataset: dataset of the validation rows, where it is another.
        val_path: local file with the validation rows; without it or another split they are split off the training
            rows.
        val_split: split with the validation rows.
        dataset_options: options of a generated dataset, such as arithmetic's terms.
        prompts_per_step: prompts per rollout step, over all ranks.
        val_prompts: held-out rows; 0 switches validation off.
        val_on_train: validate on the training prompts themselves, for tasks of a few fixed prompts.
        val_batch_size: prompts generated together in validation.
        prompt_template: text of the user's turn; ``{question}`` is replaced, all else is literal.
        messages: what becomes of a prompt that is a chat in the dataset: kept as_is, or its question alone goes into
            the template.
        system_prompt: system turn for chat models; none by default.
        chat_template: render with the tokenizer's chat template; None uses it where there is one.
        max_prompt_length: tokens; longer prompts are left out, counted and listed.
        shuffle: a new order each epoch, drawn from the seed; False keeps the dataset's order.
        sampler: which prompts an epoch serves.
        sent_cache: file of ``grpo-lit sent``: epochs go from low to high semantic entropy; with a sampler other than
            all, only its pass rates are used.
        sent_stages: slices of the SENT order, one an epoch; the last one stays.
        sent_stage: serve this slice only, from 1; null goes through the stages.
        sent_epochs_per_stage: epochs that each stage lasts.
        seed: of split and order.
    """

    def __init__(
        self,
        dataset: str = "gsm8k",
        path: str | None = None,
        split: str | None = None,
        columns: dict[str, str | None] | None = None,
        val_dataset: str | None = None,
        val_path: str | None = None,
        val_split: str | None = None,
        dataset_options: dict[str, Any] | None = None,
        prompts_per_step: int = 8,
        val_prompts: int = 200,
        val_on_train: bool = False,
        val_batch_size: int = 64,
        prompt_template: str = DEFAULT_TEMPLATE,
        messages: Literal["as_is", "question"] = "as_is",
        system_prompt: str | None = None,
        chat_template: bool | None = None,
        max_prompt_length: int | None = 512,
        shuffle: bool = True,
        sampler: SamplerConfig = SamplerConfig(),  # noqa: B008
        sent_cache: str | None = None,
        sent_stages: int = 2,
        sent_stage: int | None = None,
        sent_epochs_per_stage: int = 1,
        seed: int = 42,
    ) -> None:
        super().__init__()
        self.dataset, self.path, self.split, self.columns = dataset, path, split, columns
        self.val_dataset, self.val_path, self.val_split = val_dataset, val_path, val_split
        self.dataset_options = dataset_options
        self.prompts_per_step = prompts_per_step
        self.val_prompts = val_prompts
        self.val_on_train = val_on_train
        self.val_batch_size = val_batch_size
        self.prompt_template, self.messages = prompt_template, messages
        self.system_prompt = system_prompt
        self.chat_template = chat_template
        self.max_prompt_length = max_prompt_length
        self.shuffle, self.sampler = shuffle, sampler
        self.sent_cache = sent_cache
        self.sent_stages, self.sent_stage = sent_stages, sent_stage
        self.sent_epochs_per_stage = sent_epochs_per_stage
        self.seed = seed
        self.too_long: list[int] = []
        self.too_long_held_out: list[int] = []
        self.fingerprint = ""
        self._rows: tuple[list[Row], list[Row]] | None = None
        self._train: list[Prompt] = []
        self._val: list[Prompt] = []
        self._sent: list[int] = []
        self._pass_rates: list[float] = []
        self._check_settings()

    def _check_settings(self) -> None:
        """Refuse what can't be, before anything is read."""
        for name, number, least, what in (
            ("prompts_per_step", self.prompts_per_step, 1, "at least 1 prompt"),
            ("val_prompts", self.val_prompts, 0, "0 (no validation) or more held-out rows"),
            ("val_batch_size", self.val_batch_size, 1, "at least 1 prompt"),
            ("sent_stages", self.sent_stages, 1, "at least 1 stage"),
            ("sent_epochs_per_stage", self.sent_epochs_per_stage, 1, "at least 1 epoch"),
        ):
            if number < least:
                raise UserError(f"data.{name}", number, what)
        if self.max_prompt_length is not None and self.max_prompt_length < 1:
            raise UserError("data.max_prompt_length", self.max_prompt_length, "at least 1 token, or null for no limit")
        for name in ("val_path", "val_split", "val_dataset"):
            if self.val_on_train and getattr(self, name):
                raise UserError(f"data.{name}", getattr(self, name), "null with data.val_on_train=true")
        if "{question}" not in self.prompt_template:
            raise UserError("data.prompt_template", self.prompt_template, "a text that contains {question}")
        for name, default in (("sent_stages", 2), ("sent_stage", None), ("sent_epochs_per_stage", 1)):
            value, where = getattr(self, name), "with data.sent_cache and data.sampler.name=all"
            if value != default and (self.sent_cache is None or self.sampler.name != "all"):
                raise UserError(f"data.{name}", value, f"{'null' if default is None else default}, or stages {where}")
        if self.sent_stage is not None and not 1 <= self.sent_stage <= self.sent_stages:
            accepted = f"from 1 to data.sent_stages={self.sent_stages}, or null"
            raise UserError("data.sent_stage", self.sent_stage, accepted)
        dataset_spec(self.dataset, self.columns)

    # ---- rows ---------------------------------------------------------------------------------------------------

    def load(self) -> tuple[list[Row], list[Row]]:
        """Training and validation rows, without tokenizing; read once.

        Raises:
            UserError: missing file, bad row, or too few rows for the split.
        """
        if self._rows is None:
            rows = load_rows(
                self.dataset, split=self.split, path=self.path, options=self.dataset_options, columns=self.columns
            )
            self.fingerprint = rows_fingerprint(rows)
            if self.val_on_train:
                train = numbered(rows)
                val = train[: self.val_prompts]
            elif self.val_path or self.val_split or self.val_dataset:
                val = numbered(self._load_val())[: self.val_prompts]
                questions = {row["question"] for row in val}
                train = [row for row in numbered(rows) if row["question"] not in questions]
            else:
                train, val = split_rows(rows, self.val_prompts, self.seed)
            if not train:
                raise UserError("data.val_prompts", self.val_prompts, f"fewer than the {len(rows)} rows there are")
            self._rows = train, val
        return self._rows

    def _load_val(self) -> list[Row]:
        path = self.val_path or (self.path if self.val_dataset is None else None)
        if self.val_split and path and path == self.path and Path(path).expanduser().is_file():
            raise UserError("data.val_split", self.val_split, "null with one file: data.val_path names another")
        return load_rows(
            self.val_dataset or self.dataset,
            split=self.val_split,
            path=path,
            columns=self.columns if self.val_dataset is None else None,
            argument="data.val_path",
        )

    # ---- prompts ------------------------------------------------------------------------------------------------

    def connect(self, encoder: PromptEncoder, model: Mapping[str, Any] | None = None) -> None:
        """Render and encode every prompt with the model's tokenizer, and fix the order.

        Args:
            encoder: tokenizer and chat template.
            model: see `grpo_lit.datamodules.sent_cache.model_key`; a SENT cache of another model is refused.

        Raises:
            UserError: every prompt is longer than ``max_prompt_length``, or the SENT cache is not of these prompts.
        """
        if self._train:
            return
        train, val = self.load()
        encoded = self._encode(train, encoder, self.too_long)
        self._val = self._encode(val, encoder, self.too_long_held_out)
        for kind, rows, long in (("training", train, self.too_long), ("held-out", val, self.too_long_held_out)):
            if long:
                _log.warning(
                    "%d of %d %s prompts exceed data.max_prompt_length=%s tokens and are left out: rows %s%s",
                    len(long),
                    len(rows),
                    kind,
                    self.max_prompt_length,
                    ", ".join(map(str, long[:10])),
                    ", ... (grpo-lit check lists all)" if len(long) > 10 else "",
                )
        if not encoded:
            raise UserError("data.max_prompt_length", self.max_prompt_length, "a length that some prompt has")
        self._use_difficulty(encoded, encoder, model)
        self._train = encoded
        _ = self.epoch_order(0)  # pools may be empty, stages too many

    def _use_difficulty(self, prompts: list[Prompt], encoder: PromptEncoder, model: Mapping[str, Any] | None) -> None:
        """Order and pass rates from the SENT cache, or pass rates from the rows."""
        rates: dict[int, Any] = {prompt.row["index"]: prompt.row.get("pass_rate") for prompt in prompts}
        if self.sent_cache is not None:
            cache = read_sent_cache(self.sent_cache)
            self._check_cache(cache, encoder, model)
            self._sent = cache.positions([prompt.row["index"] for prompt in prompts])
            rates = dict(cache.pass_rates())
            entropies = {entry.index: entry.entropy for entry in cache.entries}
            for rank, position in enumerate(self._sent):
                row = prompts[position].row
                row["sent_rank"], row["sent_entropy"] = rank, entropies[row["index"]]
        if self.sampler.name == "all":
            return
        try:
            self._pass_rates = [float(rates[prompt.row["index"]]) for prompt in prompts]
        except (KeyError, TypeError, ValueError) as error:
            accepted = "all: weights and pools need a pass rate for each prompt (data.sent_cache or a column pass_rate)"
            raise UserError("data.sampler.name", self.sampler.name, accepted) from error

    def _check_cache(self, cache: SentCache, encoder: PromptEncoder, model: Mapping[str, Any] | None) -> None:
        expected = self.sent_key(encoder) | ({} if model is None else {"model": dict(model)})
        difference = first_difference(expected, {name: cache.key.get(name) for name in expected})
        if difference is not None:
            raise UserError(
                "data.sent_cache", self.sent_cache, f"a cache of these prompts and this model: {difference}"
            )

    def sent_key(self, encoder: PromptEncoder) -> dict[str, Any]:
        """What of a SENT cache's key the data decides: dataset and template."""
        self.load()
        use_chat = self._uses_chat(encoder)
        chat = hashlib.sha256(str(encoder.tokenizer.chat_template).encode()).hexdigest()[:16] if use_chat else None
        return {
            "dataset": {"name": self.dataset, "fingerprint": self.fingerprint},
            "template": {
                "prompt_template": self.prompt_template,
                "messages": self.messages,
                "system_prompt": self.system_prompt,
                "chat_template": chat,
            },
        }

    def setup(self, stage: str) -> None:
        """Connect to the trainer's model; Lightning calls this before the model is built."""
        del stage
        assert self.trainer is not None
        module: Any = self.trainer.lightning_module
        self.connect(module.encoder, model_key(module.policy_config))

    @property
    def num_train_prompts(self) -> int:
        """Training prompts there are."""
        return len(self._train)

    @property
    def longest_prompts(self) -> tuple[int, int]:
        """Tokens of the longest training and of the longest held-out prompt; 0 where there is none."""
        train, val = (max((len(prompt.ids) for prompt in side), default=0) for side in (self._train, self._val))
        return train, val

    # ---- batches ------------------------------------------------------------------------------------------------

    def stage_of(self, epoch: int) -> int:
        """The SENT stage that an epoch serves, from 1."""
        return self.sent_stage or min(epoch // self.sent_epochs_per_stage + 1, self.sent_stages)

    def epoch_order(self, epoch: int) -> list[int]:
        """Positions of the training prompts in the order that an epoch serves them."""
        generator, count = epoch_generator(self.seed, epoch), len(self._train)
        if self.sampler.name == "weighted":
            return weighted_order(self._pass_rates, self.sampler.fraction, self.sampler.floor, generator)
        if self.sampler.name == "pools":
            return pool_order(self._pass_rates, self.sampler.pool_edges, self.sampler.pool_shares, generator)
        if self.sent_cache is not None:
            return [self._sent[rank] for rank in stage_slice(count, self.sent_stages, self.stage_of(epoch))]
        return shuffled(count, generator) if self.shuffle else list(range(count))

    def train_batch(self, positions: Sequence[int]) -> PromptBatch:
        """The training prompts at the given positions of the dataset's order."""
        return collate(self._train, positions)

    def train_dataloader(self) -> PromptLoader:
        """Batches of ``prompts_per_step`` prompts."""
        stages = self.sent_stages * self.sent_epochs_per_stage if self.sent_cache and self.sent_stage is None else 1
        longest = max(len(self.epoch_order(epoch)) for epoch in {0, stages - 1})
        return PromptLoader(
            self.prompts_per_step,
            self.epoch_order,
            self.train_batch,
            num_batches=-(-longest // self.prompts_per_step),
        )

    def val_dataloader(self) -> FixedBatches:
        """Batches of held-out prompts, always in the same order."""
        order, size = range(len(self._val)), self.val_batch_size
        return FixedBatches([collate(self._val, order[start : start + size]) for start in order[::size]])

    def _uses_chat(self, encoder: PromptEncoder) -> bool:
        use_chat = encoder.has_chat_template if self.chat_template is None else self.chat_template
        if use_chat and not encoder.has_chat_template:
            raise UserError("data.chat_template", True, "null or false: this tokenizer has no chat template")
        return use_chat

    def render(self, question: str, encoder: PromptEncoder) -> str:
        """The prompt text of a question."""
        user = self.prompt_template.replace("{question}", question)
        return self.render_messages([{"role": "user", "content": user}], encoder)

    def render_messages(self, messages: list[dict[str, str]], encoder: PromptEncoder) -> str:
        """The prompt text of a chat; the configured system prompt goes in front where the chat has none."""
        if self.system_prompt is not None and all(message["role"] != "system" for message in messages):
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        if self._uses_chat(encoder):
            return encoder.render_chat([{"role": m["role"], "content": m["content"]} for m in messages])
        return "\n\n".join(message["content"] for message in messages)

    def render_row(self, row: Row, encoder: PromptEncoder) -> str:
        """The prompt text of a row: its chat as it is, or its question in the template."""
        if "messages" in row and self.messages == "as_is":
            return self.render_messages(list(row["messages"]), encoder)
        return self.render(row["question"], encoder)

    def _encode(self, rows: list[Row], encoder: PromptEncoder, too_long: list[int]) -> list[Prompt]:
        prompts = []
        for row in rows:
            text = self.render_row(row, encoder)
            ids = encoder.encode(text)
            if self.max_prompt_length is not None and len(ids) > self.max_prompt_length:
                too_long.append(row["index"])
                continue
            prompts.append(Prompt(text, ids, dict(row)))
        return prompts
