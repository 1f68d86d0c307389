"""The datasets of an evaluation: rows, prompts, judges, and which of them may not select a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_lit.datamodules.datasets import ALIASES, DATASETS, dataset_spec, load_rows
from grpo_lit.datamodules.readers import Row
from grpo_lit.errors import UserError, typed_names
from grpo_lit.evaluation.config import FINAL_TESTS, TIERS, DatasetEntry, EvaluateConfig, ModelEntry, safe_name
from grpo_lit.evaluation.models import best_checkpoint, read_run_config
from grpo_lit.prompts import PromptEncoder, prefilled_tail
from grpo_lit.rewards import resolve_reward


@dataclass
class Task:
    """One dataset, ready to be rendered for any tokenizer."""

    label: str
    rows: list[Row]
    """With question, answer and ``index``, the row's number in its dataset."""
    template: str
    system_prompt: str | None
    chat_template: bool | None
    judge: str
    format: str | None
    final_test: bool
    source: str
    """In words."""
    sampling_of_run: dict[str, Any] = field(default_factory=dict)
    """How the run whose held-out prompts these are answers them in its validation."""
    render_of_run: Callable[[Row, PromptEncoder], str] | None = None
    """How that run renders a prompt, chats among them; None: by template, system prompt and chat template."""
    reward_timeout_s: float | None = None
    """Longest time for a judge of the user's on the samples of one problem."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What the prompts depend on; part of the fingerprint of results."""

    def render(self, row: Row, encoder: PromptEncoder) -> str:
        """The prompt text of a row."""
        if self.render_of_run is not None:
            return self.render_of_run(row, encoder)
        user = self.template.replace("{question}", row["question"])
        use_chat = encoder.has_chat_template if self.chat_template is None else self.chat_template
        if not use_chat:
            return user if self.system_prompt is None else f"{self.system_prompt}\n\n{user}"
        if not encoder.has_chat_template:
            raise UserError("chat_template", True, "null or false: this tokenizer has no chat template")
        system = [] if self.system_prompt is None else [{"role": "system", "content": self.system_prompt}]
        return encoder.render_chat([*system, {"role": "user", "content": user}])

    def format_of(self, prompt: str) -> str | None:
        """The reward function that judges the format of answers to a prompt."""
        if self.format is not None:
            return self.format
        if prefilled_tail(prompt):
            return "think_format"
        return "boxed_format" if "\\boxed" in self.template else None


def complete_config(config: EvaluateConfig) -> EvaluateConfig:
    """Add what ``run`` and ``tier`` stand for to the models and datasets, and check the names.

    Raises:
        UserError: nothing to evaluate, or a name that can't be one.
    """
    if config.run is not None:
        for which in ("base", "final", "best"):
            if which != "best" or has_best(config.run):
                config.models.setdefault(which, ModelEntry(run=config.run, which=which))
        config.datasets.setdefault("held_out", DatasetEntry(run=config.run))
    elif not config.datasets and config.tier is not None:
        names = [name for name in TIERS[config.tier].datasets if name in DATASETS]
        config.datasets = {name: DatasetEntry() for name in names}
    if not config.models:
        raise UserError("models", {}, "at least one model, or run: a run folder")
    if not config.datasets:
        raise UserError("datasets", {}, f"at least one dataset, a run folder, or tier: {', '.join(TIERS)}")
    for label in config.models:
        safe_name(label, "models")
    for label in config.datasets:
        safe_name(label, "datasets")
    return config


def has_best(run: str) -> bool:
    """Whether a run kept its best checkpoint: one without held-out prompts has none."""
    try:
        best_checkpoint(Path(run), argument="run")
    except UserError:
        return False
    return True


def load_tasks(config: EvaluateConfig) -> list[Task]:
    """Read every dataset.

    Raises:
        UserError: a missing file or a bad row.
        SystemFault: the hub can't be reached.
    """
    if config.data_dir is not None and not Path(config.data_dir).is_dir():
        raise UserError("data_dir", config.data_dir, "an existing folder")
    tasks = []
    for label, entry in config.datasets.items():
        own = {"data.dataset": "name", "data.dataset_options": "options", "data": ""}
        with typed_names(
            {known: f"datasets.{safe_name(label, 'datasets')}.{name}".rstrip(".") for known, name in own.items()}
        ):
            tasks.append(_load_task(config, label, entry))
    for task in tasks:
        task.reward_timeout_s = config.reward_timeout_s
        resolve_reward(task.judge, argument=f"datasets.{task.label}.judge")
        if task.format is not None:
            resolve_reward(task.format, argument=f"datasets.{task.label}.format")
        if not task.rows:
            raise UserError(f"datasets.{task.label}", task.source, "at least one row")
    return tasks


def _load_task(config: EvaluateConfig, label: str, entry: DatasetEntry) -> Task:
    limit = entry.limit or config.limit
    if entry.run is not None:
        task = _held_out(label, entry, config)
        task.rows = task.rows[:limit]
        return task
    name = registered_name(entry.name or label)
    spec = dataset_spec(name)
    split = entry.split or ("test" if "test" in spec.splits else spec.splits[0])
    path = entry.path or _local_file(config.data_dir, name, split)
    rows = load_rows(
        name,
        split=split if path is None else entry.split,
        path=path,
        options=entry.options,
        columns=entry.columns,
        argument=f"datasets.{label}.path",
    )
    final_test = name in FINAL_TESTS and not (name == "gsm8k" and split == "train")
    template = entry.prompt_template or config.prompt_template
    if "{question}" not in template:
        where = "prompt_template" if entry.prompt_template is None else f"datasets.{label}.prompt_template"
        raise UserError(where, template, "a text that contains {question}")
    return Task(
        label,
        [{**row, "index": index} for index, row in enumerate(rows)][:limit],
        template,
        config.system_prompt,
        config.chat_template,
        entry.judge or "math_accuracy",
        entry.format,
        final_test if entry.final_test is None else entry.final_test,
        path or f"{spec.hub or name} ({split})",
        settings={"name": name, "split": split, "path": path, "options": entry.options},
    )


def registered_name(name: str) -> str:
    """The registry's name of a dataset that is given by another spelling or by its hub id; others stay as they are.

    >>> registered_name("MATH-500"), registered_name("HuggingFaceH4/MATH-500"), registered_name("mine")
    ('math500', 'math500', 'mine')
    """
    key = name.lower().replace("-", "_")
    key = ALIASES.get(key, key)
    if key in DATASETS:
        return key
    return next((own for own, spec in DATASETS.items() if (spec.hub or "").lower() == name.lower()), name)


def _local_file(folder: str | None, name: str, split: str) -> str | None:
    """File of a dataset in the folder of local files, where there is one."""
    if folder is None:
        return None
    stems = (f"{name}_{split}", name)
    found = [Path(folder) / f"{stem}.{end}" for stem in stems for end in ("jsonl", "json", "parquet")]
    return next((str(path) for path in found if path.is_file()), None)


def _held_out(label: str, entry: DatasetEntry, config: EvaluateConfig) -> Task:
    """The validation prompts of a run, with its template and its first reward function."""
    from grpo_lit.datamodules import MathDataModule

    assert entry.run is not None
    settings = read_run_config(entry.run, argument=f"datasets.{label}.run")
    data = settings["data"].get("init_args", settings["data"])
    if entry.prompt_template is not None:
        data |= {"prompt_template": entry.prompt_template, "messages": "question"}
    datamodule = MathDataModule(**data)
    rows = datamodule.load()[1]
    if not rows:
        raise UserError(f"datasets.{label}.run", entry.run, "a run with held-out prompts (data.val_prompts above 0)")
    validation = settings["model"].get("validation") or {}
    return Task(
        label,
        list(rows),
        datamodule.prompt_template,
        data.get("system_prompt"),
        data.get("chat_template"),
        entry.judge or settings["model"]["rewards"][0],
        entry.format,
        bool(entry.final_test),
        f"held-out prompts of {entry.run}",
        sampling_of_run=validation.get("sampling") or {},
        render_of_run=datamodule.render_row,
        settings={"run_data": data},
    )


def check_lengths(config: EvaluateConfig, tasks: Sequence[Task], encoder: PromptEncoder, positions: int | None) -> None:
    """See that every prompt fits the model together with its answer.

    Args:
        config: lengths of the answers.
        tasks: the prompts.
        encoder: of the model.
        positions: how many tokens the model takes; None where it has no limit.

    Raises:
        UserError: a prompt and its answer may be longer.
    """
    if positions is None:
        return
    for task in tasks:
        given = config.datasets[task.label].max_completion_length
        where = "max_completion_length" if given is None else f"datasets.{task.label}.max_completion_length"
        sampled = [config.sampling(task.label, protocol, task.sampling_of_run) for protocol in config.protocols]
        length = max(sampling.max_completion_length for sampling in sampled)
        texts = [task.render(row, encoder) for row in task.rows]
        # a token is at least a byte, but for the few that the tokenizer puts around a text
        counts = [len(encoder.encode(text)) for text in texts if len(text.encode()) + 8 + length > positions]
        if counts and max(counts) >= positions:
            accepted = f"prompts of fewer tokens than the model's {positions} positions; one has {max(counts)}"
            raise UserError(f"datasets.{task.label}", task.source, accepted)
        if counts and max(counts) + length > positions:
            accepted = f"at most {positions - max(counts)}: the model has {positions} positions, "
            raise UserError(where, length, f"{accepted}the longest prompt of {task.label} {max(counts)} tokens")


def check_selection(select_by: str | None, tasks: Sequence[Task], *, allow_on_test: bool) -> None:
    """Refuse to choose a model by a final test set: its score would no longer be that of an unseen test.

    Raises:
        UserError: ``select_by`` names no dataset of these, or a final test set without the permission.
    """
    if select_by is None:
        return
    label, _, metric = select_by.partition("/")
    chosen = [task for task in tasks if task.label == label]
    if not chosen or not metric:
        accepted = f"DATASET/METRIC with one of {', '.join(task.label for task in tasks)}, such as held_out/pass@1"
        raise UserError("select_by", select_by, accepted)
    if chosen[0].final_test and not allow_on_test:
        accepted = "a validation set: this is a final test set; --allow-selection-on-test selects by it all the same"
        raise UserError("select_by", select_by, accepted)
