"""Which rows of a dataset are worth training on, and for each of the others why it isn't."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from grpo_lit.datamodules.datasets import DatasetSpec, normalise_row
from grpo_lit.datamodules.gold import gold_problems
from grpo_lit.datamodules.overlap import find_duplicates, find_overlap
from grpo_lit.datamodules.readers import Row
from grpo_lit.datamodules.sent_cache import SentCache, rows_fingerprint
from grpo_lit.errors import UserError

Count = Callable[[str], int]


@dataclass
class FilterConfig:
    """What stays; a bound of null is no bound. Each row that goes is listed under the first rule that it breaks."""

    drop_unparsable_gold: bool = True
    """Rows whose gold answer the verifier can't judge."""
    min_length: int | None = None
    """Of the question; tokens where a tokenizer is given, characters otherwise."""
    max_length: int | None = None
    """Likewise."""
    min_pass_rate: float | None = None
    """Inclusive; pass rates are those of the SENT cache or of a column ``pass_rate``."""
    max_pass_rate: float | None = None
    """Inclusive."""
    min_entropy: float | None = None
    """Inclusive, in nats; of the SENT cache or of a column ``semantic_entropy``."""
    max_entropy: float | None = None
    """Inclusive."""
    duplicates: Literal["keep", "equal", "near"] = "equal"
    """Questions of which an earlier row stays: equal ones go, or near ones (n-grams) as well."""

    def __post_init__(self) -> None:
        for name in ("length", "pass_rate", "entropy"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low is not None and high is not None and low > high:
                raise UserError(f"filter.min_{name}", low, f"at most filter.max_{name}={high}")
            for bound, value in (("min", low), ("max", high)):
                if value is not None and not 0 <= value <= (1 if name == "pass_rate" else math.inf):
                    accepted = "a share from 0 to 1" if name == "pass_rate" else "at least 0"
                    raise UserError(f"filter.{bound}_{name}", value, accepted)


@dataclass
class FilterResult:
    """What is left, and what went."""

    kept: list[Row]
    """Rows in the original schema, with ``pass_rate`` and ``semantic_entropy`` where a cache gave them."""
    kept_indices: list[int]
    """Their numbers in the dataset."""
    removed: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """Rule -> (row number, details)."""


def filter_rows(
    raw: Sequence[Row],
    spec: DatasetSpec,
    config: FilterConfig,
    *,
    cache: SentCache | None = None,
    count: Count = len,
    against: Sequence[tuple[str, Sequence[str]]] = (),
) -> FilterResult:
    """Apply every rule in turn.

    Args:
        raw: rows in the dataset's own schema.
        spec: how they are read.
        config: the rules.
        cache: of these rows, for pass rates and entropies.
        count: length of a question.
        against: named lists of questions, such as evaluation sets, that no row may resemble.

    Raises:
        UserError: the cache is of other rows, or a band is asked for and nothing gives the figures.
    """
    result = FilterResult([], [])
    alive: dict[int, Row] = {}

    def remove(index: int, rule: str, details: str) -> None:
        result.removed.setdefault(rule, []).append((index, details))
        alive.pop(index, None)

    for index, row in enumerate(raw):
        try:
            alive[index] = normalise_row(row, spec, f"row {index}")
        except UserError as error:
            remove(index, "unreadable", error.accepted)
    if raw and not alive:
        accepted = f"{result.removed['unreadable'][0][1]} (none of the {len(raw)} rows can be read)"
        raise UserError("path", "row 0", accepted)
    figures = _figures(raw, alive, cache)
    for rule, name in (("pass_rate", "pass_rate"), ("entropy", "semantic_entropy")):
        for bound in (f"min_{rule}", f"max_{rule}"):
            if getattr(config, bound) is not None and not any(name in figures.get(i, {}) for i in alive):
                raise UserError(
                    f"filter.{bound}", getattr(config, bound), f"a SENT cache, or numbers in a column {name}"
                )
    if config.drop_unparsable_gold:
        golds = gold_problems([row["answer"] for row in alive.values()])
        for index, problem in zip(list(alive), golds, strict=True):
            if problem is not None:
                remove(index, "unparsable gold", problem)
    for index, row in list(alive.items()):
        own = {**figures.get(index, {}), "length": float(count(row["question"]))}
        broken = _broken_band(config, own)
        if broken is not None:
            remove(index, *broken)
    _drop_alike(alive, config, against, remove)
    for index in alive:
        result.kept.append({**raw[index], **figures.get(index, {})})
        result.kept_indices.append(index)
    return result


def _figures(raw: Sequence[Row], alive: dict[int, Row], cache: SentCache | None) -> dict[int, dict[str, Any]]:
    """Pass rate and entropy of each row."""
    if cache is None:
        names = ("pass_rate", "semantic_entropy")
        return {i: {name: row[name] for name in names if _is_number(row.get(name))} for i, row in enumerate(raw)}
    found = rows_fingerprint(list(alive.values()))
    made_of = cache.key.get("dataset", {}).get("fingerprint")
    if found != made_of:
        raise UserError("sent_cache", str(cache.path), f"a cache of these rows ({found}), not of {made_of}")
    return {e.index: {"pass_rate": e.pass_rate, "semantic_entropy": e.entropy} for e in cache.entries}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _broken_band(config: FilterConfig, figures: dict[str, Any]) -> tuple[str, str] | None:
    """The first band that a row lies outside of, and where."""
    for rule, name in (("length", "length"), ("pass_rate", "pass_rate"), ("entropy", "semantic_entropy")):
        low, high = getattr(config, f"min_{rule}"), getattr(config, f"max_{rule}")
        if low is None and high is None:
            continue
        value = figures.get(name)
        if value is None or math.isnan(float(value)):
            return rule.replace("_", " "), "not known"
        if low is not None and float(value) < low:
            return rule.replace("_", " "), f"{float(value):g} is below {low:g}"
        if high is not None and float(value) > high:
            return rule.replace("_", " "), f"{float(value):g} is above {high:g}"
    return None


def _drop_alike(
    alive: dict[int, Row],
    config: FilterConfig,
    against: Sequence[tuple[str, Sequence[str]]],
    remove: Callable[[int, str, str], None],
) -> None:
    """Duplicates among the rows that are left, then rows that resemble a list of questions."""
    indices = list(alive)
    if config.duplicates != "keep":
        questions = [alive[index]["question"] for index in indices]
        for pair in find_duplicates(questions, near=config.duplicates == "near"):
            how = "equal" if pair.equal else f"{100 * pair.share:.0f} % alike"
            remove(indices[pair.second], "duplicate", f"{how}, row {indices[pair.first]}")
    for name, held_out in against:
        indices = list(alive)
        pairs = find_overlap(list(held_out), [alive[index]["question"] for index in indices])
        for pair in pairs:
            how = "equal" if pair.equal else f"{100 * pair.share:.0f} % alike"
            remove(indices[pair.second], f"overlap with {name}", f"{how}, row {pair.first} there")
