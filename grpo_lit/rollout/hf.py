"""The plain engine: transformers' ``generate`` with a KV cache, in the weights that are trained."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from grpo_lit.policy import Policy
from grpo_lit.rollout.base import (
    Claim,
    Progress,
    Rollout,
    SamplingConfig,
    check_lengths,
    completion_mask_of,
    left_pad,
)
from grpo_lit.rollout.model_reader import weight_bytes
from grpo_lit.rollout.sampling import SeededSampler, uniforms
from grpo_lit.rollout.stats import RolloutStats, copy_bandwidth
from grpo_lit.rollout.stops import AnswerStop

_Rows = tuple[Tensor, Tensor, list[int | None]]
"""Token ids (n, T) long, log-probs (n, T) float32, and the length of each row that stopped at its answer."""


class HFEngine:
    """Samples with transformers' ``generate``.

    Args:
        policy: the policy; its adapters are live.
        tokenizer: for the pad and EOS tokens.
        batch_size: rows generated at once; None takes all.
    """

    name = "hf"

    def __init__(self, policy: Policy, tokenizer: PreTrainedTokenizerBase, *, batch_size: int | None = None) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.stats = RolloutStats(weight_bytes=weight_bytes(policy))
        self.batch_size: int | None = batch_size
        self.claim: Claim | None = None
        self.eos_token_ids = eos_token_ids(policy, tokenizer)
        self.pad_token_id = int(tokenizer.pad_token_id)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        keys: NDArray[np.uint64],
        sampling: SamplingConfig,
        progress: Progress | None = None,
    ) -> Rollout:
        """Sample; see `RolloutEngine.generate`. All tensors of the result lie on the policy's device.

        Raises:
            UserError: an empty prompt, or a row longer than the model has positions.
        """
        check_lengths(prompts, counts, sampling, max_positions(self.policy))
        begin = time.perf_counter()
        if self.policy.device.type == "cuda" and not self.stats.bandwidth:
            self.stats.bandwidth = copy_bandwidth(self.policy.device)
        groups = [group for group, count in enumerate(counts) for _ in range(count)]
        size = self.batch_size or max(len(groups), 1)
        parts: list[tuple[list[int], _Rows]] = []
        num_rows = num_tokens = 0
        for chunk in self._chunks(groups, size):
            part = self._generate_rows([prompts[groups[row]] for row in chunk], keys[chunk], sampling)
            parts.append((chunk, part))
            if progress is not None:
                num_rows, num_tokens = num_rows + len(chunk), num_tokens + part[0].numel()
                progress(num_rows, num_tokens)
        rollout = self._assemble(prompts, groups, parts)
        self.stats.num_steps += sum(ids.shape[1] for _, (ids, _, _) in parts)
        self.stats.num_tokens += int(rollout.completion_mask.sum())
        self.stats.seconds += time.perf_counter() - begin
        return rollout

    def release(self) -> None:
        """Nothing to free: the cache of a batch goes with it."""

    def weights_changed(self) -> None:
        """Nothing to do: these are the trained weights."""

    def close(self) -> None:
        """Nothing to close."""

    def step_metrics(self) -> dict[str, float]:
        """Achieved share of the weight-read limit since the last call, see `RolloutStats.bandwidth_share`."""
        return self.stats.take_metrics()

    def _chunks(self, groups: Sequence[int], size: int) -> Iterator[list[int]]:
        """Rows to generate together, at most `size`: all of them, or those of the prompts that are claimed."""
        waiting = list(range(len(groups))) if self.claim is None else []
        more = self.claim is not None
        while True:
            while self.claim is not None and more and len(waiting) < size:
                claimed = self.claim()
                more = claimed is not None
                waiting += [row for row, group in enumerate(groups) if group == claimed]
            if not waiting:
                return
            yield waiting[:size]
            waiting = waiting[size:]

    def _generate_rows(
        self, rows: Sequence[Sequence[int]], keys: NDArray[np.uint64], sampling: SamplingConfig
    ) -> _Rows:
        device = self.policy.device
        prompt_ids, prompt_mask = left_pad(rows, self.pad_token_id)
        uniform = uniforms(keys, sampling.max_completion_length).to(device)
        sampler = SeededSampler(
            uniform, prompt_ids.shape[1], sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p
        )
        config = GenerationConfig(
            max_new_tokens=sampling.max_completion_length,
            do_sample=False,
            use_cache=True,
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.pad_token_id,
        )
        stop = None
        if sampling.stop_at is not None:
            stop = _AnswerCriteria(AnswerStop(self.tokenizer, sampling.stop_at), rows, prompt_ids.shape[1])
        with self.policy.generating() as model:
            sequences = model.generate(  # type: ignore[operator]
                input_ids=prompt_ids.to(device),
                attention_mask=prompt_mask.long().to(device),
                generation_config=config,
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=None if stop is None else StoppingCriteriaList([stop]),
            )
        assert isinstance(sequences, Tensor)
        lengths: list[int | None] = [None] * len(rows) if stop is None else stop.lengths
        return sequences[:, prompt_ids.shape[1] :], torch.stack(sampler.logprobs, dim=1), lengths

    def _assemble(
        self, prompts: Sequence[Sequence[int]], groups: list[int], parts: Sequence[tuple[list[int], _Rows]]
    ) -> Rollout:
        device = self.policy.device
        prompt_ids, prompt_mask = left_pad([prompts[group] for group in groups], self.pad_token_id)
        width = max((ids.shape[1] for _, (ids, _, _) in parts), default=1)
        completion_ids = torch.full((len(groups), width), self.pad_token_id, dtype=torch.long, device=device)
        completion_mask = torch.zeros((len(groups), width), dtype=torch.bool, device=device)
        logprobs = torch.zeros((len(groups), width), dtype=torch.float32, device=device)
        truncated = torch.zeros(len(groups), dtype=torch.bool, device=device)
        for chunk, (ids, part_logprobs, stopped) in parts:
            rows, columns = torch.tensor(chunk, device=device), slice(0, ids.shape[1])
            mask, truncated[rows] = completion_mask_of(ids, self.eos_token_ids)
            for row, length in enumerate(stopped):
                if length is not None and int(mask[row].sum()) >= length:
                    mask[row, length:] = False
                    truncated[chunk[row]] = False
            completion_mask[rows, columns] = mask
            completion_ids[rows, columns] = ids.masked_fill(~mask, self.pad_token_id)
            logprobs[rows, columns] = part_logprobs.masked_fill(~mask, 0.0)
        return Rollout(
            prompt_ids.to(device),
            prompt_mask.to(device),
            completion_ids,
            completion_mask,
            torch.tensor(groups, dtype=torch.long, device=device),
            logprobs,
            truncated,
        )


class _AnswerCriteria(StoppingCriteria):
    """Tells ``generate`` which rows have a whole answer; remembers after how many tokens.

    Args:
        stop: the rule.
        prompts: token ids of each row's prompt.
        num_prompt_tokens: length of the padded prompts.
    """

    def __init__(self, stop: AnswerStop, prompts: Sequence[Sequence[int]], num_prompt_tokens: int) -> None:
        self.stop, self.num_prompt_tokens = stop, num_prompt_tokens
        self.thinking = [stop.thinking(prompt) for prompt in prompts]
        self.lengths: list[int | None] = [None] * len(prompts)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """(n,) bool, True where the row is done; input_ids (n, P + T so far) long."""
        del scores, kwargs
        ids = input_ids[:, self.num_prompt_tokens :].tolist()
        for row, length in enumerate(self.lengths):
            if length is None:
                seen = len(ids[row]) - 1
                self.lengths[row] = self.stop.length(ids[row], seen, thinking=self.thinking[row])
        return torch.tensor([length is not None for length in self.lengths], device=input_ids.device)


def eos_token_ids(policy: Policy, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a completion: the tokenizer's EOS and those of the model's generation config."""
    configured = policy.eos_token_ids
    return sorted({int(tokenizer.eos_token_id), *configured})


def max_positions(policy: Policy) -> int | None:
    """Positions that the model has learned; None where they are rotated, which has no end."""
    config: Any = policy.model.config
    return None if getattr(config, "rope_parameters", None) else getattr(config, "max_position_embeddings", None)
