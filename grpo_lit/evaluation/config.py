"""Settings of ``grpo-lit evaluate``: which models answer which questions, and how."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from grpo_lit.errors import UserError, typed_names
from grpo_lit.rollout import SamplingConfig
from grpo_lit.rollout.vllm_config import VLLMConfig

Which = Literal["base", "final", "best", "last"]
Protocol = Literal["deterministic", "sampled"]
Tier = Literal["minimal", "strong", "maximal"]
DEFAULT_TEMPLATE = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class TierSpec:
    """What a tier asks of every model."""

    datasets: tuple[str, ...]
    """Registered datasets, answered when no dataset is named."""
    max_completion_length: int
    protocol: Literal["deterministic", "sampled", "both"]
    samples: int
    """Samples per problem in the sampled protocol."""
    samples_of_small: int
    """Samples per problem of the small sets of competition problems."""


_MINIMAL = ("gsm8k", "gsm_plus", "math500", "aime24", "amc23")
_STRONG = (*_MINIMAL, "aime25", "minerva_math")
TIERS: dict[Tier, TierSpec] = {
    "minimal": TierSpec(_MINIMAL, 8192, "deterministic", 4, 4),
    "strong": TierSpec(_STRONG, 16384, "both", 8, 8),
    "maximal": TierSpec((*_STRONG, "olympiadbench"), 32768, "both", 16, 32),
}
SMALL_DATASETS = ("aime24", "aime25", "amc23")
FINAL_TESTS = (*TIERS["maximal"].datasets,)
"""Datasets that report how good a chosen model is, and may not choose it."""


def _expand_home(settings: object, name: str) -> None:
    """``~`` of a path, which no shell expands behind a ``=`` or in a file."""
    if (path := getattr(settings, name)) is not None:
        setattr(settings, name, os.path.expanduser(path))


@dataclass
class ModelEntry:
    """One model to evaluate: a base or merged model, an adapter over its base, or weights of a run."""

    path: str | None = None
    """Base or merged model: hub id, folder, .gguf file, or package:NAME[/path]. With adapter or ckpt_path: the base."""
    adapter: str | None = None
    """PEFT LoRA folder; names its base itself, unless path does."""
    ckpt_path: str | None = None
    """Checkpoint of grpo-lit fit; needs path."""
    run: str | None = None
    """Run folder of grpo-lit fit, whose config names base and number format; which says what weights of it."""
    which: Which = "final"
    """Of a run: base, the final adapter, the best checkpoint by validation, or the last checkpoint."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Number format; null: as trained for a run, else bf16 (fp32 on a CPU)."""
    quantization: Literal["nf4", "none"] | None = None
    """nf4 or none; null: as trained for a run, else none."""

    def __post_init__(self) -> None:
        for name in ("path", "adapter", "ckpt_path", "run"):
            _expand_home(self, name)


@dataclass
class DatasetEntry:
    """One dataset to answer."""

    name: str | None = None
    """Name in the registry of datasets, or a hub id; null: the entry's own name."""
    path: str | None = None
    """Local file in the dataset's schema, instead of the hub."""
    split: str | None = None
    """Split on the hub; null: test where there is one, else the first."""
    columns: dict[str, str] | None = None
    """Columns of question and answer, where they differ from the registry's."""
    options: dict[str, Any] | None = None
    """Options of a generated dataset."""
    run: str | None = None
    """Run folder: its held-out prompts, rendered and judged as in its validation."""
    limit: int | None = None
    """Take the first so many rows; null: the general limit."""
    samples: int | None = None
    """Samples per problem in the sampled protocol; null: the general number."""
    max_completion_length: int | None = None
    """Tokens; null: the general length."""
    prompt_template: str | None = None
    """Text of the user's turn, {question} is replaced; null: the general template."""
    judge: str | None = None
    """Reward function that decides what is right; null: math_accuracy."""
    format: str | None = None
    """Reward function that decides whether the format is kept, such as boxed_format; null: boxed_format where the
    template asks for a box, think_format where the prompt ends with <think>, else no rate."""
    final_test: bool | None = None
    """Whether the dataset may not select a model; null: what the registry says."""


@dataclass
class EvaluateConfig:
    """Models x datasets x protocols."""

    models: dict[str, ModelEntry] = field(default_factory=dict)
    """By the name they have in the report."""
    run: str | None = None
    """Run folder: adds its base, final and best weights to the models, and its held-out prompts to the datasets."""
    datasets: dict[str, DatasetEntry] = field(default_factory=dict)
    """By the name they have in the report."""
    tier: Tier | None = None
    """Preset of datasets (where none is named), length, protocol and samples; whatever is given overrides it."""
    data_dir: str | None = None
    """Folder of local files for registered datasets: NAME.jsonl, NAME_SPLIT.jsonl or .parquet."""
    protocol: Literal["deterministic", "sampled", "both"] | None = None
    """deterministic: greedy, one answer a problem. sampled: several at a temperature. null: the tier's, else both."""
    samples: int | None = None
    """Samples per problem in the sampled protocol; null: the tier's, else 8."""
    temperature: float = 0.6
    """Of the sampled protocol."""
    top_p: float = 0.95
    """Of the sampled protocol."""
    max_completion_length: int | None = None
    """Tokens after which an answer is cut; null: the tier's, else 2048 (a run's held-out prompts: as in the run)."""
    limit: int | None = None
    """Take the first so many rows of each dataset."""
    prompt_template: str = DEFAULT_TEMPLATE
    """Text of the user's turn; {question} is replaced."""
    system_prompt: str | None = None
    """System turn for chat models."""
    chat_template: bool | None = None
    """Render with the tokenizer's chat template; null: where there is one."""
    engine: Literal["auto", "vllm", "graph", "hf"] = "auto"
    """auto: vllm where it is installed and there is a GPU, else graph or hf."""
    vllm: VLLMConfig = field(default_factory=lambda: VLLMConfig(memory_share=0.7))
    """Settings of engine vllm."""
    batch_size: int = 64
    """Answers generated together."""
    stop_at: Literal["boxed", "answer_tag"] | None = None
    """End an answer at its first whole final answer, a closed \\boxed{...} or </answer>; null: no, but a run's held-out
    prompts as in the run."""
    reward_timeout_s: float | None = 1800.0
    """Longest time for a judge of yours on the samples of one problem; null: no limit. The built-in ones have their
    own."""
    device: str | None = None
    """cpu or cuda; null: cuda where there is one."""
    cpu_threads: int | None = None
    """Threads of torch on the CPU; null leaves torch's choice."""
    seed: int = 42
    """Of sampling and bootstrap."""
    confidence: float = 0.95
    """Of every interval."""
    select_by: str | None = None
    """DATASET/METRIC, such as held_out/pass@1: write the best model by it to selection.json."""
    allow_selection_on_test: bool = False
    """Let a final test set select; what it then reports of the chosen model is biased upwards."""
    output: str = "runs/evaluation"
    """Folder of the results; what is there is kept and not computed again."""
    overwrite: bool = False
    """Move earlier results in the folder aside and start anew."""

    def __post_init__(self) -> None:
        for name in ("run", "data_dir"):
            _expand_home(self, name)
        for name in ("samples", "max_completion_length", "limit", "batch_size", "cpu_threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(name, value, "a whole number of at least 1")
        for label, entry in self.datasets.items():
            for name in ("samples", "max_completion_length", "limit"):
                value = getattr(entry, name)
                if value is not None and value < 1:
                    raise UserError(f"datasets.{label}.{name}", value, "a whole number of at least 1")
        with typed_names({"evaluate": ""}):
            SamplingConfig(self.temperature, self.top_p).validate("evaluate")
        if self.temperature == 0:
            raise UserError("temperature", 0.0, "above 0 for the sampled protocol; protocol: deterministic is greedy")
        if self.reward_timeout_s is not None and not 0 < self.reward_timeout_s < math.inf:
            raise UserError("reward_timeout_s", self.reward_timeout_s, "a number of seconds above 0, or null")
        if self.seed < 0:
            raise UserError("seed", self.seed, "a whole number of at least 0")
        if not 0 < self.confidence < 1:
            raise UserError("confidence", self.confidence, "a number between 0 and 1")

    @property
    def protocols(self) -> tuple[Protocol, ...]:
        """The protocols to run, in order."""
        chosen = self.protocol or (TIERS[self.tier].protocol if self.tier else "both")
        return ("deterministic", "sampled") if chosen == "both" else (chosen,)

    def num_samples(self, label: str, protocol: Protocol) -> int:
        """Samples per problem of a dataset."""
        if protocol == "deterministic":
            return 1
        entry = self.datasets[label]
        if entry.samples is not None or self.samples is not None:
            return entry.samples or self.samples or 1
        if self.tier is None:
            return 8
        small = (entry.name or label) in SMALL_DATASETS
        return TIERS[self.tier].samples_of_small if small else TIERS[self.tier].samples

    def sampling(self, label: str, protocol: Protocol, of_run: Mapping[str, Any] | None = None) -> SamplingConfig:
        """How a dataset is answered; length and end are those `of_run` where none are given."""
        of_run = of_run or {}
        given = self.datasets[label].max_completion_length or self.max_completion_length
        length = given or of_run.get("max_completion_length")
        length = length or (TIERS[self.tier].max_completion_length if self.tier else 2048)
        stop_at = self.stop_at or of_run.get("stop_at")
        if protocol == "deterministic":
            return SamplingConfig(temperature=0.0, max_completion_length=length, stop_at=stop_at)
        return SamplingConfig(self.temperature, self.top_p, max_completion_length=length, stop_at=stop_at)


def dataset_entry(label: str, given: Mapping[str, Any] | None) -> DatasetEntry:
    """An entry from settings that no parser has seen.

    Raises:
        UserError: a setting that there is not, or a value of another type.
    """
    kinds = {name: get_args(kind) for name, kind in get_type_hints(DatasetEntry).items()}
    for name, value in (given or {}).items():
        if name not in kinds:
            raise UserError(f"datasets.{label}.{name}", value, f"one of the settings {', '.join(kinds)}")
        classes = [get_origin(kind) or kind for kind in kinds[name]]
        if type(value) not in classes:
            accepted = " or ".join("null" if kind is type(None) else kind.__name__ for kind in classes)
            raise UserError(f"datasets.{label}.{name}", value, accepted)
    return DatasetEntry(**(given or {}))


def safe_name(label: str, argument: str) -> str:
    """A label that can be a key of results and part of a file name.

    Raises:
        UserError: it holds something else than letters, digits and . _ - @.
    """
    if not label or any(not (c.isalnum() or c in "._-@") for c in label):
        raise UserError(argument, label, "a name of letters, digits and . _ - @")
    return label
