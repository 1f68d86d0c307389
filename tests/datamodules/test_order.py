"""Orders of an epoch: weights, pools, SENT stages, and prompts that a step takes beyond its batch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_lit.datamodules import MathDataModule
from grpo_lit.datamodules.loader import PromptBatch, PromptLoader
from grpo_lit.datamodules.order import SamplerConfig, epoch_generator, pool_order, weighted_order
from grpo_lit.datamodules.sent import sent_order, stage_slice
from grpo_lit.errors import UserError
from grpo_lit.model_source import resolve_model_source
from grpo_lit.prompts import PromptEncoder, load_tokenizer


def test_weights_prefer_prompts_that_are_sometimes_right() -> None:
    rates = [0.0] * 50 + [0.5] * 50 + [1.0] * 50
    served: Counter[float] = Counter()
    for epoch in range(40):
        order = weighted_order(rates, 0.2, 0.05, epoch_generator(1, epoch))
        assert len(order) == len(set(order)) == 30
        served.update(rates[position] for position in order)
    # first draws come with weight 0.3 against 0.05: six to one, less as the pool empties
    assert served[0.5] > 2 * (served[0.0] + served[1.0])
    assert served[0.0] > 50
    assert abs(served[0.0] - served[1.0]) < 0.3 * served[0.0]


def test_first_draw_has_exactly_the_weights() -> None:
    rates, floor = [0.0, 0.5, 0.9], 0.05
    weights = np.array([p * (1 - p) + floor for p in rates])
    first = Counter(weighted_order(rates, 1.0, floor, epoch_generator(2, epoch))[0] for epoch in range(3000))
    for position, share in enumerate(weights / weights.sum()):
        assert first[position] / 3000 == pytest.approx(share, abs=4 * (share * (1 - share) / 3000) ** 0.5)


def test_pools_are_mixed_in_every_stretch_and_the_epoch_ends_with_the_first_empty_one() -> None:
    rates = [0.1] * 10 + [0.5] * 40 + [0.75] * 4 + [0.9] * 20
    order = pool_order(rates, [0.25, 0.75], [1, 2, 1], epoch_generator(0, 0))
    kinds = ["hard" if rates[p] <= 0.25 else "middle" if rates[p] <= 0.75 else "easy" for p in order]
    assert len(order) == len(set(order))
    assert 40 <= len(order) <= 43
    for start in range(0, 40, 4):
        assert Counter(kinds[start : start + 4]) == {"hard": 1, "middle": 2, "easy": 1}
    assert order != pool_order(rates, [0.25, 0.75], [1, 2, 1], epoch_generator(0, 1))
    with pytest.raises(UserError, match=r"pool 1, which is empty.*\[0, 2, 0\]"):
        pool_order([0.5, 0.6], [0.25, 0.75], [1, 1, 1], epoch_generator(0, 0))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"fraction": 0}, "fraction"),
        ({"floor": 0.0}, "floor"),
        ({"pool_edges": [0.5, 0.2]}, "pool_edges"),
        ({"pool_shares": [1.0]}, "pool_shares"),
        ({"pool_shares": [0, 0, 0]}, "pool_shares"),
        ({"fraction": 0.25}, "fraction"),  # without the name that it belongs to
        ({"name": "pools", "floor": 0.1}, "floor"),
        ({"name": "weighted", "pool_shares": [1.0, 1.0, 1.0]}, "pool_shares"),
    ],
)
def test_sampler_mistakes_are_named(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(UserError, match=rf"data\.sampler\.{name}="):
        SamplerConfig(**settings)


def test_ties_go_by_pass_rate_then_by_row() -> None:
    nan = float("nan")
    assert sent_order([0.5, 0, 0, 0.5, nan, 0], [0.25, 0, 1.0, 0.5, 1.0, None]) == [2, 1, 5, 3, 0, 4]


@pytest.mark.parametrize(("count", "stages", "sizes"), [(10, 2, [5, 5]), (11, 2, [5, 6]), (7, 3, [2, 2, 3])])
def test_stages_cover_everything_once(count: int, stages: int, sizes: list[int]) -> None:
    slices = [stage_slice(count, stages, stage) for stage in range(1, stages + 1)]
    assert [len(part) for part in slices] == sizes
    assert [position for part in slices for position in part] == list(range(count))
    with pytest.raises(UserError, match=r"data\.sent_stage=0"):
        stage_slice(count, stages, 0)


def loader(lengths: list[int], batch: int) -> PromptLoader:
    """Epoch e serves lengths[e] rows, numbered 100 e, 100 e + 1, ..."""

    def collate(rows: Any) -> PromptBatch:
        return PromptBatch([str(row) for row in rows], [[row] for row in rows], list(rows), {})

    longest = max(-(-length // batch) for length in lengths)
    return PromptLoader(
        batch, lambda e: [100 * e + i for i in range(lengths[min(e, len(lengths) - 1)])], collate, longest
    )


def test_epochs_of_different_length_have_their_own_number_of_batches() -> None:
    served = loader([5, 9], 4)
    assert len(served) == 3, "before the first: the longest"
    first = [batch.indices for batch in served]
    assert (first, len(served)) == ([[0, 1, 2, 3], [4]], 2)
    iterator = iter(served)
    assert len(served) == 3, "Lightning asks before it takes the first batch"
    assert [batch.indices for batch in iterator] == [[100, 101, 102, 103], [104, 105, 106, 107], [108]]


def test_refilled_prompts_count_as_consumed_and_never_cross_an_epoch() -> None:
    served = loader([10, 10], 4)
    seen = []
    for batch in served:
        seen += batch.indices
        assert batch.refill is not None
        more = batch.refill(3)
        seen += more.indices if more is not None else []
        if len(seen) >= 7:
            break
    state = served.state_dict()
    again = loader([10, 10], 4)
    again.load_state_dict(state)
    rest = [batch.indices for batch in again]
    assert (seen, rest) == (list(range(7)), [[7, 8, 9]])
    last = next(iter(again))
    assert last.indices == [100, 101, 102, 103]
    batch = next(iter(loader([4], 4)))
    assert batch.refill is not None
    assert batch.refill(2) is None


@pytest.fixture
def encoder(tiny_llama: Path) -> PromptEncoder:
    return PromptEncoder(load_tokenizer(resolve_model_source(str(tiny_llama))))


def test_a_column_of_pass_rates_is_enough_for_a_sampler(tmp_path: Path, encoder: PromptEncoder) -> None:
    rows = [{"question": f"{i}+1", "answer": i + 1, "pass_rate": (i % 5) / 4} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common: dict[str, Any] = {"path": str(tmp_path / "rows.jsonl"), "val_prompts": 0, "prompts_per_step": 4}
    data = MathDataModule("custom", sampler=SamplerConfig("pools"), **common)
    data.connect(encoder)
    for batch in list(data.train_dataloader())[:4]:
        assert sorted(rate > 0.25 and 1 + (rate > 0.75) for rate in batch.columns["pass_rate"]) == [0, 1, 1, 2]
    weighted = MathDataModule("custom", sampler=SamplerConfig("weighted", fraction=0.25), **common)
    weighted.connect(encoder)
    assert [len(batch) for batch in weighted.train_dataloader()] == [4, 4, 2]
    with pytest.raises(UserError, match="data.sampler.name='weighted'"):
        MathDataModule("arithmetic", sampler=SamplerConfig("weighted"), val_prompts=5).connect(encoder)
