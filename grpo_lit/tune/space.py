"""Which changes to a configuration are worth a trial, for the device it runs on."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

Space = dict[str, list[Any]]
"""Dotted key -> values to try, in this order. 2 and 0.5 with a leading x (``x2``, ``x0.5``) multiply what it is."""


def default_space(config: Mapping[str, Any], on_cuda: bool) -> Space:
    """The keys that change speed and nothing else.

    Args:
        config: resolved configuration, nested.
        on_cuda: whether the trial runs on a GPU.
    """
    space: Space = {}
    if on_cuda:
        engines = ["graph", "hf"] + ["vllm"] * (importlib.util.find_spec("vllm") is not None)
        space["model.rollout.engine"] = engines
        space["model.policy.gradient_checkpointing"] = [False, True]
    else:
        cores = os.cpu_count() or 1
        space["model.policy.cpu_threads"] = sorted({1, max(1, cores // 2), cores})
    space["model.micro_batch_size"] = ["x2", "x2", "x0.5"]
    space["model.rollout.batch_size"] = [None, "x0.5"]
    if on_cuda:
        space["model.kernels.linear_logprobs"] = ["triton", "torch"]
    return {key: values for key, values in space.items() if has_key(config, key)}


# Another objective, optimizer or dataset may be faster and is not the same training: what a first step measures can't
# tell them apart, so they are no business of this search.
TRAINING_SECTIONS = (
    "model.loss",
    "model.optimizer",
    "model.lr_schedule",
    "model.rewards",
    "model.reward_weights",
    "model.length_penalty",
    "model.lora",
    "model.ppo_passes",
    "model.max_grad_norm",
    "model.rollout.sampling",
    "model.rollout.group_size",
    "model.rollout.allocator",
    "data.dataset",
    "data.path",
    "data.prompt_template",
    "data.sampler",
    "seed_everything",
)


def changes_training(key: str) -> bool:
    """Whether a dotted key says what is trained rather than how fast.

    >>> changes_training("model.loss.beta"), changes_training("model.micro_batch_size")
    (True, False)
    """
    return any(key == section or key.startswith(f"{section}.") for section in TRAINING_SECTIONS)


def has_key(config: Mapping[str, Any], key: str) -> bool:
    """Whether a dotted key can be set: its section is there."""
    parent, _, last = key.rpartition(".")
    if key.startswith("model.kernels."):
        return lookup(config, "model.kernels", default=False) is not False
    return last in _arguments(lookup(config, parent))


def lookup(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """The value under a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = _arguments(value)
        if part not in value:
            return default
        value = value[part]
    return value


def _arguments(section: Any) -> Mapping[str, Any]:
    """The settings of a section, also where it names a class."""
    if not isinstance(section, Mapping):
        return {}
    arguments = section.get("init_args")
    return arguments if isinstance(arguments, Mapping) else section


def resolve_value(wanted: Any, current: Any, rows: int) -> Any:
    """A value of the space for a configuration: ``x2`` doubles what it is; ``None`` of a row count is all rows.

    >>> resolve_value("x2", 8, 64), resolve_value("x0.5", None, 64), resolve_value("hf", "graph", 64)
    (16, 32, 'hf')
    """
    if isinstance(wanted, str) and wanted.startswith("x"):
        try:
            factor = float(wanted[1:])
        except ValueError:
            return wanted
        return max(1, int((rows if current is None else current) * factor))
    return wanted


def candidates(space: Mapping[str, Sequence[Any]]) -> list[tuple[str, Any]]:
    """Every (key, value) of a space, in order."""
    return [(key, value) for key, values in space.items() for value in values]
