"""One queue of prompts for all ranks: each prompt once, the rows of a share are those of the whole, equal loads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_lit import phases
from grpo_lit.lora import LoRAConfig
from grpo_lit.model_source import resolve_model_source
from grpo_lit.phases import PhaseListener, PhaseRecorder
from grpo_lit.policy import PolicyConfig, load_policy
from grpo_lit.prompt_queue import PromptLengths, PromptQueue, deal_longest_first, generate_from_queue, longest_first
from grpo_lit.prompts import load_tokenizer
from grpo_lit.rollout import HFEngine, Rollout, RolloutEngine, SamplingConfig, row_keys
from grpo_lit.rollout.graph import GraphEngine
from grpo_lit.sampling_step import _generate

PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13], [14, 15, 16, 17, 18], [19, 20]]
COUNTS = [3, 0, 2, 4, 1]
SAMPLING = SamplingConfig(max_completion_length=24)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def test_every_prompt_is_given_out_once_and_a_new_queue_starts_again(store: dist.Store) -> None:
    for number in range(2):
        queue = PromptQueue([4, 2, 7], number, store)
        assert [queue() for _ in range(5)] == [4, 2, 7, None, None]


def test_two_holders_of_a_number_share_the_prompts(store: dist.Store) -> None:
    mine, theirs = (PromptQueue([0, 1, 2, 3], 5, store) for _ in range(2))
    assert [mine(), theirs(), theirs(), mine(), theirs()] == [0, 1, 2, 3, None]


def test_the_longest_come_first_and_the_rest_in_their_order() -> None:
    expected = [30.0, 50.0, 30.0, 90.0, 30.0, 10.0, 50.0, 30.0]
    parts = longest_first([range(4)] * 8, expected, num_ranks=2, in_flight=1)
    assert parts == [(prompt, range(4)) for prompt in (3, 1, 6, 0, 2, 4, 7, 5)], "whole, with four groups a rank"


@pytest.mark.parametrize("in_flight", [1, 5, 100])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_every_row_is_given_out_once_in_parts_of_a_quarter_share_at_most(num_ranks: int, in_flight: int) -> None:
    wanted = [range(2, 18), range(0), range(5), range(3, 4), range(16), range(2)]
    parts = longest_first(wanted, [3.0, 9.0, 2.0, 8.0, 1.0, 7.0], num_ranks, in_flight)
    rows = [(prompt, number) for prompt, numbers in parts for number in numbers]
    assert sorted(rows) == [(prompt, number) for prompt, numbers in enumerate(wanted) for number in numbers]
    share = sum(map(len, wanted)) / num_ranks
    assert max(len(numbers) for _, numbers in parts) == -(-share // 4)
    assert all(len(numbers) >= min(len(wanted[prompt]), (share / 4) // 2) for prompt, numbers in parts), "no crumbs"


def test_what_fills_the_slots_is_dealt_so_that_no_rank_takes_all_that_is_long() -> None:
    expected = [float(length) for length in range(12, 0, -1)]
    order = [prompt for prompt, _ in longest_first([range(2)] * 12, expected, num_ranks=3, in_flight=4)]
    assert order == [0, 3, 1, 4, 2, 5, 6, 7, 8, 9, 10, 11]
    everything = [prompt for prompt, _ in longest_first([range(2)] * 12, expected, num_ranks=3, in_flight=8)]
    loads = [sum(expected[prompt] for prompt in everything[start : start + 4]) for start in (0, 4, 8)]
    assert max(loads) - min(loads) <= 8


def test_lengths_of_prompts() -> None:
    lengths = PromptLengths(most=3)
    assert lengths.expected([4, 5]) == [0.0, 0.0]
    lengths.observe([4, 9, 4, 4], [10, 5, 15, 12])
    assert lengths.expected([9, 1, 4]) == [5.0, 10.0, 15.0], "one never seen is as long as the mean of the others"
    lengths.observe([4], [35])
    assert lengths.expected([4]) == [25.0], "the latest round counts as much as all before"
    lengths.observe([1, 2], [1, 2])
    assert lengths.state_dict() == {4: 25.0, 1: 1.0, 2: 2.0}, "9 was answered longest ago"
    again = PromptLengths()
    again.load_state_dict(lengths.state_dict())
    assert again.expected([2, 4]) == [2.0, 25.0]


class Replays(PhaseListener):
    def on_out_of_memory(self, *args: object) -> bool:
        return True


def test_a_rank_that_fails_before_its_first_claim_stays_in_step(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks, one after the other: both do the first attempt again, but only one of them came to its queue."""

    def rank(fails_early: bool) -> PromptQueue:
        monkeypatch.setattr(phases, "_attempts", itertools.count())  # a process of its own
        votes = iter([True, False])
        world = SimpleNamespace(size=2, any=lambda flag, device: next(votes), gather=lambda value: [value, None])
        engine, trainer = SimpleNamespace(release=lambda: None), SimpleNamespace(callbacks=[Replays()])
        module: Any = SimpleNamespace(
            world=world, device=torch.device("cpu"), engine=engine, policy=None, trainer=trainer
        )
        recorder, tries = PhaseRecorder(module), itertools.count()

        def work() -> PromptQueue:
            if fails_early and next(tries) == 0:
                raise torch.OutOfMemoryError
            queue = PromptQueue([0, 1, 2], recorder.attempt_number, store)
            queue()
            return queue

        return recorder.attempt(work)

    calm, troubled = rank(False), rank(True)
    assert [calm(), troubled()] == [2, None], "each has taken one of this attempt's three prompts"


@pytest.mark.parametrize("build", [HFEngine, GraphEngine])
@pytest.mark.parametrize("batch_size", [None, 1, 3])
def test_shares_of_a_queue_are_the_rows_of_one_rank(
    build: Callable[..., RolloutEngine], batch_size: int | None, tiny_llama: Path, store: dist.Store
) -> None:
    policy = load_policy(PolicyConfig(str(tiny_llama), dtype="fp32"), LoRAConfig(), device="cpu")
    engine = build(policy, load_tokenizer(resolve_model_source(str(tiny_llama))), batch_size=batch_size)
    engine.eos_token_ids = [1, 2, 3, 4, 5]  # type: ignore[attr-defined]  # so that completions end at random
    keys = row_keys(3, 0, [p for p, n in enumerate(COUNTS) for _ in range(n)], [i for n in COUNTS for i in range(n)])

    def generate() -> Rollout:
        return engine.generate(PROMPTS, COUNTS, keys, SAMPLING)

    whole = generate()
    assert len(set(whole.lengths.tolist())) > 2, "ragged"
    seen: list[int] = []
    taken: Sequence[list[int]] = ([3], [], [2, 0, 4])
    for number, prompts in enumerate(taken):
        share, own = generate_from_queue(engine, PromptQueue(prompts, number, store), 4, generate)
        seen += own
        assert share.num_rows == len(own)
        assert sorted(set(share.group_ids.tolist())) == sorted(prompts)
        for row, index in enumerate(own):
            length = int(whole.lengths[index])
            assert int(share.lengths[row]) == length
            assert torch.equal(share.completion_ids[row, :length], whole.completion_ids[index, :length])
            assert torch.allclose(share.logprobs[row, :length], whole.logprobs[index, :length], atol=2e-5, rtol=0)
            assert bool(share.truncated[row]) == bool(whole.truncated[index])
    assert sorted(seen) == list(range(sum(COUNTS)))
    assert engine.batch_size == batch_size, "as before"
    assert torch.equal(generate().completion_ids, whole.completion_ids), "and takes all prompts again"


def test_rows_are_the_same_in_whatever_order_they_are_given_out(
    tiny_llama: Path, store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    policy = load_policy(PolicyConfig(str(tiny_llama), dtype="fp32"), LoRAConfig(), device="cpu")
    engine = GraphEngine(policy, load_tokenizer(resolve_model_source(str(tiny_llama))))
    engine.eos_token_ids = [1, 2, 3, 4, 5]
    batch: Any = SimpleNamespace(indices=[10, 20, 30, 40, 50], prompt_ids=PROMPTS)
    wanted = [range(2, 2 + count) for count in COUNTS]
    found, order = [], []
    for number, longest in enumerate((10, 30, 40)):
        lengths = PromptLengths()
        lengths.observe([longest, 50], [9, 3])
        module: Any = SimpleNamespace(
            engine=engine,
            seed=1,
            rollout_step=0,
            world=SimpleNamespace(size=2),
            phase=SimpleNamespace(hold=lambda *_: None, attempt_number=number, listeners=[]),
            rollout_config=SimpleNamespace(layout="queue", batch_size=2, sampling=SAMPLING),
            prompt_lengths=lengths,
        )
        rollout, numbers = _generate(module, batch, wanted)
        rows = zip(rollout.group_ids.tolist(), numbers, rollout.lengths.tolist(), rollout.completion_ids, strict=True)
        order.append(rollout.group_ids.tolist())
        found.append(sorted((group, row, length, ids[:length].tolist()) for group, row, length, ids in rows))
    assert order[0] != order[1] != order[2]
    assert found[0] == found[1] == found[2]
    assert [row[:2] for row in found[0]] == [(group, row) for group, rows in enumerate(wanted) for row in rows]


def test_the_longest_are_dealt_first() -> None:
    assert deal_longest_first([9, 1, 5, 4, 2], 2) == [[0, 4], [1, 2, 3]]
    assert deal_longest_first([], 2) == [[], []]
    assert deal_longest_first([3, 3], 3) == [[0], [1], []]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.empty(64).exponential_(1 / 200, generator=generator).ceil().long().tolist()
    loads = [sum(tokens[row] for row in rows) for rows in deal_longest_first(tokens, 4)]
    assert max(loads) - min(loads) <= 0.02 * sum(tokens) / 4


def test_a_queue_in_the_store_of_a_process_group(tmp_path: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=(tmp_path / "s").as_uri(), rank=0, world_size=1, timeout=timedelta(seconds=20)
    )
    try:
        queue = PromptQueue([1], 0)
        assert (queue(), queue()) == (1, None)
    finally:
        dist.destroy_process_group()
