"""Rows end at their first whole answer, in every engine alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from grpo_lit.lora import LoRAConfig
from grpo_lit.policy import PolicyConfig, load_policy
from grpo_lit.rollout import HFEngine, SamplingConfig, row_keys
from grpo_lit.rollout.graph import GraphEngine
from grpo_lit.rollout.stops import AnswerStop, answer_complete


@pytest.mark.parametrize(
    ("text", "boxed", "tag"),
    [
        ("", False, False),
        (r"\boxed{4", False, False),
        (r"\boxed{4}", True, False),
        (r"\boxed {4}.", True, False),
        (r"\boxed{\frac{1}{2}", False, False),
        (r"\boxed{\{1\}}", True, False),
        (r"\boxed{\{1\}", False, False),
        (r"<think>\boxed{4}", False, False),
        (r"<think>\boxed{4}</think>", False, False),
        (r"<think>\boxed{4}</think> \boxed{5}", True, False),
        (r"\boxed{4}</answer>", True, True),
        ("<think></answer></think> <answer>", False, False),
    ],
)
def test_what_is_a_whole_answer(text: str, boxed: bool, tag: bool) -> None:
    assert answer_complete(text, "boxed") is boxed
    assert answer_complete(text, "answer_tag") is tag


def _tokenizer() -> PreTrainedTokenizerFast:
    """Many tokens open a box, close a brace or end thinking, so that random rows hold answers."""
    vocab = {"<pad>": 0, "<eos>": 1, "}": 2, "{": 3, "\\boxed{": 4, "</think>": 5, "<think>": 6}
    for index in range(len(vocab), 46):
        head = {2: "\\boxed{", 3: "}", 4: "</think>"}.get(index // 10, "")
        vocab[head + chr(ord("A") + index)] = index
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def test_the_token_that_completes_it_is_found_whenever_one_looks() -> None:
    stop = AnswerStop(_tokenizer(), "boxed")
    ids = [9, 4, 3, 10, 2, 2, 11, 4, 2]
    assert stop.length(ids, 0) == 6
    assert stop.length(ids[:7], 5) == 6
    assert stop.length(ids[:5], 0) is None
    assert stop.length([4, 9, 2, 6, 9], 0) == 3  # what comes later hides nothing
    assert stop.length([9, 4, 10, 5, 4, 2, 8], 0, thinking=True) == 6
    assert stop.length([9, 4, 2], 0, thinking=True) is None
    assert stop.thinking([9, 6]) is True
    assert stop.thinking([6, 9, 5]) is False


@pytest.mark.parametrize("check_every", [1, 7])
def test_both_engines_end_rows_there_and_nothing_else_changes(check_every: int, tiny_llama: Path) -> None:
    policy = load_policy(PolicyConfig(str(tiny_llama), dtype="fp32"), LoRAConfig(4))
    tokenizer = _tokenizer()
    count, prompts = 60, [[9, 4, 8], [9, 6]]
    keys = row_keys(0, 0, [0] * count + [1] * count, [*range(count), *range(count)])
    whole, stopped = SamplingConfig(max_completion_length=20), SamplingConfig(max_completion_length=20, stop_at="boxed")
    plain = HFEngine(policy, tokenizer).generate(prompts, [count, count], keys, whole)
    hf = HFEngine(policy, tokenizer, batch_size=50).generate(prompts, [count, count], keys, stopped)
    graph = GraphEngine(policy, tokenizer, batch_size=30, check_every=check_every)
    ours = graph.generate(prompts, [count, count], keys, stopped)
    rule = AnswerStop(tokenizer, "boxed")
    num_stopped, early = 0, 0
    for row, (ids, length) in enumerate(zip(plain.completion_ids.tolist(), plain.lengths.tolist(), strict=True)):
        end = rule.length(ids[:length], 0, thinking=row >= count)
        num_stopped += end is not None
        early = row if end is not None and end < 10 and row < count else early
        for rollout in (hf, ours):
            assert int(rollout.lengths[row]) == (end or length)
            assert bool(rollout.truncated[row]) == (end is None and bool(plain.truncated[row]))
            assert rollout.completion_ids[row].tolist()[: end or length] == ids[: end or length]
            assert not rollout.logprobs[row, end or length :].any()
    assert 3 < num_stopped < 2 * count
    assert torch.allclose(hf.logprobs, ours.logprobs, atol=1e-4)
    assert torch.equal(hf.completion_ids, ours.completion_ids)
    alone = graph.generate(prompts[:1], [1], keys[early : early + 1], stopped)
    assert torch.equal(alone.completion_ids[0], ours.completion_ids[early, : int(alone.lengths[0])])
    assert graph._held is not None
    assert (graph._held[1].state.position == -1).all(), "a row that stopped must not go on in its freed pages"
