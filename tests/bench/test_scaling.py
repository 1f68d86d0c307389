"""Waiting of ranks by layout: steps are sorted, warm-up is left out, shares are of the whole step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_lit.bench import scaling
from grpo_lit.bench.ragged import (
    FIELDS,
    LAYOUTS,
    RaggedLengths,
    expected_wait,
    read_waits,
)
from grpo_lit.errors import UserError
from grpo_lit.rollout import row_keys


def test_steps_are_sorted_by_layout_and_the_first_of_each_left_out(tmp_path: Path) -> None:
    steps = [
        {
            "step": step + 1,
            "perf/step_s": 10.0 + step,
            "perf/tokens_per_sec": 100.0,
            "perf/rollout_s": 5.0 + step,
            "perf/rank_wait_rollout_s": 0.5 * step,
            "perf/rank_wait_train_s": 0.25,
        }
        for step in range(6)
    ]
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"step": 0, "val/accuracy": 0.0}, *steps]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups, queue = read_waits(metrics, ["groups", "queue"], True, warm_up=1)
    assert (groups.layout, groups.steps) == ("groups", 2)
    assert (groups.step_s, groups.rollout_s, groups.rollout_wait_s) == (13.0, 8.0, 1.5)  # of steps 2 and 4 from 0
    assert (queue.step_s, queue.rollout_wait_s, queue.train_wait_s) == (14.0, 2.0, 0.25)
    assert groups.waited_share == pytest.approx(1.75 / 13)
    assert groups.tokens_per_s == pytest.approx(100.0)
    assert list(queue.row()) == list(FIELDS)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--ragged", "0"],
        ["--rows_in_flight", "4"],
        ["--rows_in_flight", "0", "--ragged", "8"],
        ["--layouts", "queue"],
        ["--by_prompt"],
        ["--layouts", "rows", "--ragged", "8"],
        ["--layout", "split", "--ragged", "8"],
        ["--layout", "queue"],
        ["--devices", "0"],
        ["--devices", "1", "--ragged", "8"],
        ["--group_size", "1"],
        ["--steps", "0"],
    ],
)
def test_an_option_that_would_do_nothing_is_named(arguments: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        scaling._parse(arguments)
    assert str(refused.value).startswith(f"{arguments[0]}="), refused.value


class Stub:  # what the callback reads and writes of a module
    def __init__(self) -> None:
        model = type("M", (), {"get_input_embeddings": lambda _: torch.nn.Embedding(512, 2)})()
        self.live_policy = type("P", (), {"model": model})()
        self.engine = type("E", (), {"eos_token_ids": [2], "generate": lambda _, prompts, counts, keys: keys})()
        self.rollout_config = type("C", (), {"layout": "groups"})()
        self.rollout_step = 4


def test_every_token_may_end_a_completion() -> None:
    module: Any = Stub()
    callback = RaggedLengths(64, ["groups", "split", "queue", "longest"])
    callback.on_train_start(None, module)  # type: ignore[arg-type]
    module.prompt_lengths.observe([3], [40])
    found = []
    for module.rollout_step in range(4, 8):
        callback.on_train_batch_start(None, module, None, 0)  # type: ignore[arg-type]
        found.append((module.rollout_config.layout, module.prompt_lengths.expected([3])))
    assert found == [("groups", [0.0]), ("split", [0.0]), ("queue", [0.0]), ("queue", [40.0])]
    assert module.engine.eos_token_ids == list(range(8))


def test_rows_as_long_as_their_prompt_says_draw_its_numbers_in_every_step() -> None:
    found = {}
    for by_prompt in (False, True):
        module: Any = Stub()
        RaggedLengths(64, ["groups"], by_prompt).on_train_start(None, module)  # type: ignore[arg-type]
        own = [row_keys(7, step, [5, 5, 6], [0, 1, 0]) for step in (0, 1)]
        found[by_prompt] = [module.engine.generate([[1, 2], [3]], [2, 1], keys).tolist() for keys in own]
    assert found[False] == [keys.tolist() for keys in own]
    first, second = found[True]
    assert first == second
    assert first[0] == first[1] != first[2]


def test_a_queue_waits_less_the_more_prompts_there_are() -> None:
    def wait(layout: str, prompts: int) -> float:
        return expected_wait(layout, 2, prompts, group_size=4, in_flight=8, mean_length=192, limit=768)[0]

    assert wait("groups", 16) == pytest.approx(0.188, abs=0.01)  # found with other draws
    assert wait("split", 16) == pytest.approx(0.186, abs=0.01)
    assert wait("queue", 16) == pytest.approx(0.166, abs=0.01)
    assert wait("groups", 64) == pytest.approx(0.093, abs=0.01)
    assert wait("queue", 64) == pytest.approx(0.053, abs=0.01)


def test_the_longest_first_is_shorter_where_lengths_go_by_prompt() -> None:
    def rollouts(by_prompt: float) -> list[tuple[float, float]]:
        return [expected_wait(layout, 2, 16, 4, 8, 192, 768, by_prompt) for layout in LAYOUTS]

    (_, groups), _, (waited, queue), (waited_less, longest) = rollouts(1.0)
    assert longest < 0.93 * queue < queue < groups
    assert waited_less < 0.5 * waited
    (_, _, (_, queue), (_, longest)) = rollouts(0.0)
    assert longest == pytest.approx(queue, rel=0.02), "nothing to know"
