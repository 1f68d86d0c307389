"""Does vLLM compute with the weights that are being trained?

After each hand-over a few fixed rows are scored by both. Two questions are asked of the differences:

- Is the mean difference within what two implementations in these number formats may have? If not, base or adapter are
  other ones: SystemFault.
- Did vLLM move as the policy moved? Steps can be so small that an adapter left behind still passes the first
  question. So with p, v the log-probs of policy and vLLM now and p', v' those at the last hand-over that was surely
  fresh, the projection::

      followed = <v - v', p - p'> / <p - p', p - p'>

  is 1 for the new weights and 0 for old ones, whatever the constant difference between the two. It is judged only
  where the policy moved by more than the noise between the two; until then p' and v' stay, so that small steps add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_lit.errors import SystemFault
from grpo_lit.policy import Policy
from grpo_lit.rollout.base import SamplingConfig, left_pad
from grpo_lit.rollout.vllm_backend import Adapter, Sampled, VLLMBackend

NUM_ROWS, PROMPT_TOKENS, COMPLETION_TOKENS = 4, 64, 16
_CLEARLY = 3.0
"""Times the noise that the policy must have moved before `followed` is judged."""
_FLOOR = 1e-6
"""Least noise of fp32, nats a token."""


@dataclass(frozen=True)
class ProbeReport:
    """What a probe saw, in nats."""

    mean: float
    """Mean absolute difference of a token's log-prob between policy and vLLM."""
    maximum: float
    """Largest."""
    followed: float | None
    """Share of the policy's movement that vLLM made too; None where the policy moved too little to tell."""


class AdapterProbe:
    """Compares policy and vLLM on rows that stay the same for the whole run.

    Args:
        policy: what is trained.
        backend: what samples.
        tolerance: largest mean difference, nats a token.
        stop_ids: tokens that end a completion.
        pad_token_id: for the padding of the rows.

    Attributes:
        temperatures: those at which the log-probs of sampled tokens were found right.
    """

    def __init__(
        self, policy: Policy, backend: VLLMBackend, *, tolerance: float, stop_ids: Sequence[int], pad_token_id: int
    ) -> None:
        self.policy, self.backend, self.tolerance = policy, backend, tolerance
        self.stop_ids, self.pad_token_id = list(stop_ids), pad_token_id
        self.prompts: list[list[int]] = []
        self.completions: list[list[int]] = []
        self._fresh: tuple[Tensor, Tensor] | None = None
        self.temperatures: set[float] = set()

    def check(self, prompts: Sequence[Sequence[int]], adapter: Adapter | None, sampling: SamplingConfig) -> ProbeReport:
        """Compare once; the first call takes its rows from these prompts.

        Raises:
            SystemFault: vLLM's weights are not the policy's, or its log-probs not at the sampling temperature.
        """
        if sampling.temperature not in self.temperatures:
            self._check_temperature(prompts, adapter, sampling)
        ours, theirs = self._policy_logprobs(self.completions, 1.0), self._vllm_logprobs(adapter)
        number = 0 if adapter is None else adapter.number
        followed = self._followed(ours, theirs)
        if followed is not None and followed < 0.5:
            raise SystemFault(
                f"vLLM samples with stale weights: after hand-over {number} its log-probs made {followed:.0%} "
                "of the policy's movement; the adapter was not taken over"
            )
        difference = (ours - theirs).abs()
        mean, maximum = float(difference.mean()), float(difference.max())
        if not mean <= self.tolerance:
            raise SystemFault(
                f"vLLM's weights are not the policy's: log-probs of {len(ours)} tokens differ by {mean:.2g} nats on "
                f"average after hand-over {number}, at most {self.tolerance:.2g} is accepted "
                "(model.rollout.vllm.probe_tolerance); is its base the same model in the same number format?"
            )
        return ProbeReport(mean, maximum, followed)

    def _followed(self, ours: Tensor, theirs: Tensor) -> float | None:
        if self._fresh is None:
            self._fresh = (ours, theirs)
            return None
        ours_before, theirs_before = self._fresh
        moved, noise = ours - ours_before, (ours_before - theirs_before).norm() + _FLOOR * len(ours) ** 0.5
        if float(moved.norm()) <= _CLEARLY * float(noise):
            return None
        followed = float((theirs - theirs_before) @ moved / (moved @ moved))
        if followed >= 0.5:
            self._fresh = (ours, theirs)
        return followed

    def _check_temperature(
        self, prompts: Sequence[Sequence[int]], adapter: Adapter | None, sampling: SamplingConfig
    ) -> None:
        """Sample a few tokens and see that the log-probs which come with them are those of the tempered policy."""
        if not self.prompts:
            self.prompts = [list(prompt[-PROMPT_TOKENS:]) for prompt in prompts[:NUM_ROWS]]
        plain = SamplingConfig(sampling.temperature, max_completion_length=COMPLETION_TOKENS)
        sampled = self._sample(adapter, plain)
        ours = self._policy_logprobs([row.ids for row in sampled], sampling.temperature or 1.0)
        theirs = torch.tensor([value for row in sampled for value in row.logprobs], dtype=torch.float64)
        mean = float((ours - theirs).abs().mean())
        limit = self.tolerance / min(sampling.temperature or 1.0, 1.0)
        if not mean <= limit:
            raise SystemFault(
                f"vLLM's log-probs differ by {mean:.2g} nats a token from the policy's at temperature "
                f"{sampling.temperature:g}, at most {limit:.2g} is accepted: another base or number format, or a "
                "server without --logprobs-mode processed_logprobs"
            )
        self.temperatures.add(sampling.temperature)
        if not self.completions:
            self.completions = [row.ids for row in sampled]

    def _sample(self, adapter: Adapter | None, sampling: SamplingConfig) -> list[Sampled]:
        rows: dict[int, Sampled] = {}
        seeds = list(range(len(self.prompts)))
        self.backend.sample(self.prompts, seeds, sampling, self.stop_ids, adapter, None, rows.__setitem__)
        return [rows[index] for index in range(len(self.prompts))]

    def _policy_logprobs(self, completions: list[list[int]], temperature: float) -> Tensor:
        """Log-probs of all completion tokens one after the other, float64 on the CPU."""
        device = self.policy.device
        prompt_ids, prompt_mask = left_pad(self.prompts, self.pad_token_id)
        width = max(map(len, completions))
        lengths = torch.tensor([len(ids) for ids in completions])
        mask = torch.arange(width) < lengths[:, None]
        ids = torch.tensor([ids + [self.pad_token_id] * (width - len(ids)) for ids in completions])
        tensors = (prompt_ids, prompt_mask, ids, mask)
        with torch.no_grad():
            scores = self.policy.score(*(tensor.to(device) for tensor in tensors), temperature=temperature)
        return scores.logprobs.cpu()[mask].double()

    def _vllm_logprobs(self, adapter: Adapter | None) -> Tensor:
        rows = [prompt + ids for prompt, ids in zip(self.prompts, self.completions, strict=True)]
        scores = self.backend.score(rows, adapter)
        tails = [score[-len(ids) :] for score, ids in zip(scores, self.completions, strict=True)]
        return torch.tensor([value for tail in tails for value in tail], dtype=torch.float64)
