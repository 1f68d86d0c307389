"""What every rollout engine takes and gives: `SamplingConfig`, `Rollout`, the `RolloutEngine` protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from grpo_lit.errors import UserError
from grpo_lit.rollout.vllm_config import VLLMConfig

Progress = Callable[[int, int], None]
"""Called with (rows finished, tokens sampled so far)."""
Claim = Callable[[], int | None]
"""Gives the position of the next prompt to take, None when there is no more; see `RolloutConfig.layout`."""


@dataclass
class SamplingConfig:
    """How tokens are drawn."""

    temperature: float = 1.0
    """Logits are divided by it before sampling, and in scoring too; 0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1.0 is off."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 is off."""
    min_p: float = 0.0
    """Drop tokens below this share of the most probable one's probability; 0.0 is off."""
    max_completion_length: int = 256
    """Tokens after which a completion is cut; one that is cut has no EOS and counts as truncated."""
    stop_at: Literal["boxed", "answer_tag"] | None = None
    """End a completion at its first whole final answer, outside <think>: boxed at a closed \\boxed{...}, answer_tag at
    </answer>. It then counts as ended, not as truncated, and saves what would be sampled after the answer."""

    def validate(self, argument: str) -> None:
        """Check every range.

        Raises:
            UserError: naming the field under `argument`.
        """
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"{argument}.temperature", self.temperature, "a finite number of at least 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"{argument}.top_p", self.top_p, "a number above 0 and at most 1")
        if self.top_k < 0:
            raise UserError(f"{argument}.top_k", self.top_k, "a whole number of at least 0")
        if not 0 <= self.min_p < 1:
            raise UserError(f"{argument}.min_p", self.min_p, "a number of at least 0 and below 1")
        if self.max_completion_length < 1:
            raise UserError(f"{argument}.max_completion_length", self.max_completion_length, "at least 1 token")


@dataclass
class RolloutConfig:
    """How many completions a prompt gets in training, how they are sampled and by which engine."""

    group_size: int = 8
    """Completions per prompt."""
    engine: Literal["auto", "graph", "hf", "vllm"] = "auto"
    """graph: our decode loop in CUDA graphs, in the weights that are trained, adapters live. hf: transformers'
    generate in the same weights. vllm: a vLLM engine with weights of its own. auto: graph on CUDA for the families it
    knows, else hf; one log line says why."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Temperature, truncation and length."""
    batch_size: int | None = None
    """Rows generated at once: a memory knob that changes no draw. None takes all rows of a step together."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    """Settings of engine=vllm; no other engine reads them."""
    allocator: Literal["uniform", "vigor"] = "uniform"
    """uniform: group_size completions for every prompt. vigor: rounds that give more to prompts whose rewards vary."""
    vigor_initial_count: int = 2
    """Completions of every prompt in VIGOR's first round; doubled in each further round."""
    vigor_rounds: int = 4
    """VIGOR rounds; after each but the last, the half of the prompts with the larger reward variance goes on."""
    vigor_seed: int | None = None
    """Break ties of variance at random with this seed; null prefers the earlier prompt."""
    refill_rounds: int = 0
    """Dynamic sampling (DAPO): up to so many times in a step, prompts whose groups are flat are replaced by further
    prompts of the epoch; 0 is off."""
    layout: Literal["groups", "split", "queue"] = "groups"
    """With several ranks. groups: whole groups per rank. split: every group over all ranks. queue: ranks take prompts
    from one queue as their rows end, which needs batch_size, those first that had the longest answers so far; then the
    rows are dealt out so that every rank trains on as many tokens. What rank sampled a row, and when, does not show."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise UserError(
                "model.rollout.group_size", self.group_size, "at least 2: an advantage compares completions of a group"
            )
        if self.batch_size is not None and self.batch_size < 1:
            raise UserError("model.rollout.batch_size", self.batch_size, "at least 1 row, or null for all")
        if self.refill_rounds < 0 or (self.refill_rounds and self.allocator != "uniform"):
            accepted = "0 (off) or more rounds" if self.refill_rounds < 0 else "0 with the allocator vigor"
            raise UserError("model.rollout.refill_rounds", self.refill_rounds, accepted)
        for name in ("vigor_initial_count", "vigor_rounds"):
            if getattr(self, name) < 1:
                raise UserError(f"model.rollout.{name}", getattr(self, name), "at least 1")
        if self.engine == "vllm":
            self.vllm.check_installed()
        self.sampling.validate("model.rollout.sampling")
        if self.sampling.temperature == 0:
            raise UserError(
                "model.rollout.sampling.temperature", 0.0, "a number above 0: greedy groups are all the same"
            )
        for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
            value = getattr(self.sampling, name)
            if value != off:
                raise UserError(
                    f"model.rollout.sampling.{name}",
                    value,
                    f"{off} in training: log-probs are scored over the whole vocabulary, so the ratio would be wrong",
                )


@dataclass(frozen=True)
class Rollout:
    """Sampled completions, a row each.

    Rows of one group lie together; groups may differ in size. Padding: prompts on the left, completions on the right.
    """

    prompt_ids: Tensor
    """(N, P) long."""
    prompt_mask: Tensor
    """(N, P) bool, True at real tokens."""
    completion_ids: Tensor
    """(N, T) long."""
    completion_mask: Tensor
    """(N, T) bool, True up to and including the first EOS."""
    group_ids: Tensor
    """(N,) long, the position of each row's prompt in the call."""
    logprobs: Tensor
    """(N, T) float32, the engine's log-prob of each sampled token; 0 where the mask is False."""
    truncated: Tensor
    """(N,) bool, True where the length limit came before an EOS."""

    @property
    def num_rows(self) -> int:
        """N."""
        return self.completion_ids.shape[0]

    @property
    def lengths(self) -> Tensor:
        """(N,) long, tokens of each completion, EOS included."""
        return self.completion_mask.sum(dim=1)

    @staticmethod
    def concat(parts: Sequence[Rollout]) -> Rollout:
        """The rows of several rollouts of the same prompts, one after the other."""
        prompt_width = max(part.prompt_ids.shape[1] for part in parts)
        width = max(part.completion_ids.shape[1] for part in parts)

        def left(tensor: Tensor) -> Tensor:
            return nn.functional.pad(tensor, (prompt_width - tensor.shape[1], 0))

        def right(tensor: Tensor) -> Tensor:
            return nn.functional.pad(tensor, (0, width - tensor.shape[1]))

        return Rollout(
            torch.cat([left(part.prompt_ids) for part in parts]),
            torch.cat([left(part.prompt_mask) for part in parts]),
            torch.cat([right(part.completion_ids) for part in parts]),
            torch.cat([right(part.completion_mask) for part in parts]),
            torch.cat([part.group_ids for part in parts]),
            torch.cat([right(part.logprobs) for part in parts]),
            torch.cat([part.truncated for part in parts]),
        )

    def select(self, rows: Tensor) -> Rollout:
        """The given rows (M,) long, maybe none, with padding columns that none of them needs cut off."""
        prompt_mask, completion_mask = self.prompt_mask[rows], self.completion_mask[rows]
        prompt_start = self.prompt_ids.shape[1] - max([1, *prompt_mask.sum(dim=1).tolist()])
        completion_end = max([1, *completion_mask.sum(dim=1).tolist()])
        return Rollout(
            self.prompt_ids[rows][:, prompt_start:],
            prompt_mask[:, prompt_start:],
            self.completion_ids[rows][:, :completion_end],
            completion_mask[:, :completion_end],
            self.group_ids[rows],
            self.logprobs[rows][:, :completion_end],
            self.truncated[rows],
        )


class RolloutEngine(Protocol):
    """Samples completions from the current policy.

    Attributes:
        name: what the configuration calls it.
        batch_size: rows in flight at once, None for all; may be changed between calls and changes no draw.

    On an error inside `generate`, running out of memory and Ctrl-C included, the engine releases what it holds and
    lets the error through; the same call again gives the same rows.
    """

    name: str
    batch_size: int | None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        keys: NDArray[np.uint64],
        sampling: SamplingConfig,
        progress: Progress | None = None,
    ) -> Rollout:
        """Sample ``counts[i]`` completions of ``prompts[i]``.

        Args:
            prompts: token ids of each prompt, no padding.
            counts: completions wanted of each prompt; may differ, may be 0.
            keys: (N, 2) uint64 sampling keys, N = sum of counts, prompts outer and completions inner.
            sampling: temperature, truncation, length.
            progress: told about finished rows and tokens as they come.
        """
        ...

    def release(self) -> None:
        """Free what is held between rollouts (KV cache, graphs, a sleeping server's memory); may be called at any time.

        The module calls it after each rollout phase, each validation, and after running out of memory.
        """
        ...

    def weights_changed(self) -> None:
        """Take note that the policy's weights are new; called after each optimizer step."""
        ...

    def close(self) -> None:
        """Give up everything for good: processes, memory, files."""
        ...


def check_lengths(
    prompts: Sequence[Sequence[int]], counts: Sequence[int], sampling: SamplingConfig, max_positions: int | None
) -> None:
    """Refuse what no engine can sample.

    Args:
        prompts: token ids of each prompt.
        counts: completions wanted of each; prompts of which none is are not looked at.
        sampling: for the length of completions.
        max_positions: of the model, None where there is no limit.

    Raises:
        UserError: an empty prompt, or a row longer than the model has positions.
    """
    lengths = {number: len(prompts[number]) for number, count in enumerate(counts) if count}
    for number, length in lengths.items():
        if length < 1:
            raise UserError(f"prompts[{number}]", [], "at least one token")
    longest = max(lengths.values(), default=1)
    room = sampling.max_completion_length if max_positions is None else max_positions + 1 - longest
    if room < 1:
        raise UserError("prompts", f"one of {longest} tokens", f"at most {max_positions}: the model's positions")
    if sampling.max_completion_length > room:
        raise UserError(
            "max_completion_length",
            sampling.max_completion_length,
            f"at most {room}: a prompt has {longest} tokens and the model {max_positions} positions",
        )


def completion_mask_of(completion_ids: Tensor, eos_token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Mask and truncation from the position of the first EOS.

    Never from ``ids == pad``: pad is often EOS, and a model may sample the pad token itself.

    Args:
        completion_ids: (N, T) long.
        eos_token_ids: every token that ends a completion.

    Returns:
        completion_mask (N, T) bool, first EOS included, and truncated (N,) bool.

    >>> mask, truncated = completion_mask_of(torch.tensor([[5, 2, 2], [5, 6, 7]]), [2])
    >>> mask.tolist(), truncated.tolist()
    ([[True, True, False], [True, True, True]], [False, True])
    """
    is_eos = torch.isin(completion_ids, torch.tensor(list(eos_token_ids), device=completion_ids.device))
    eos_before = is_eos.long().cumsum(dim=1) - is_eos.long()
    return eos_before == 0, ~is_eos.any(dim=1)


def left_pad(rows: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Stack token lists to (N, P) long, padded on the left, with their mask (N, P) bool."""
    width = max((len(row) for row in rows), default=1)
    ids = torch.full((len(rows), width), pad_token_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, row in enumerate(rows):
        if row:
            ids[index, width - len(row) :] = torch.tensor(list(row), dtype=torch.long)
            mask[index, width - len(row) :] = True
    return ids, mask
