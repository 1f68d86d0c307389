"""One decision, to go on or to stop, repeated up to eight times: what the length weight does to the update.

```
step 1 --continue 0.7--> step 2 --continue 0.7--> ... step 8 --continue--> ends at length 8
   \\--EOS 0.3--> length 1   \\--EOS 0.3--> length 2        \\--EOS--> length 8
```
One logit is shared by all steps, so there are nine completions. Reward 1 for length 5 or more: the mean
reward is q^4. The update that GRPO makes in expectation, with the token weights of the alpha family
(2607.23364), is

    E[R w S] - E[R] E[w S],   w = L^(alpha - 1),   S = d log p(completion) / d logit,

the covariance of reward and weighted score. Only at alpha = 1 is it the derivative of the expected reward:
there E[S] = 0, so the baseline E[R] changes nothing. With alpha < 1 E[w S] is not 0, and the baseline itself
biases the update on top of the weight.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from grpo_lit.loss import LossConfig, grpo_loss
from grpo_lit.toy.generators import MersenneTwister

_CHUNK_GROUPS = 8_192


class LengthRow(NamedTuple):
    """One line of the table.

    Args:
        alpha: exponent of the length weight.
        exact: expected update, by enumeration.
        sampled: mean update over the sampled groups, times G / (G - 1).
        standard_error: of `sampled`.
        long_share: weight of a completion of the longest length against one of length 2, in [0, 1].
    """

    alpha: float
    exact: float
    sampled: float
    standard_error: float
    long_share: float


class LengthPolicy(nn.Module):
    """The one logit, log(q / (1 - q)).

    Args:
        continue_probability: q at the start.
        max_length: steps at most.
        min_rewarded: shortest length with reward 1.
    """

    def __init__(self, continue_probability: float = 0.7, max_length: int = 8, min_rewarded: int = 5) -> None:
        super().__init__()
        start = torch.logit(torch.tensor(continue_probability, dtype=torch.float64))
        self.logit = nn.Parameter(start)
        self.max_length = max_length
        self.min_rewarded = min_rewarded

    def logprobs(self, continued: Tensor) -> Tensor:
        """Log-prob of going on (True) or stopping (False); `continued` and result (N, T)."""
        return torch.where(continued, nn.functional.logsigmoid(self.logit), nn.functional.logsigmoid(-self.logit))

    def outcomes(self) -> tuple[Tensor, Tensor]:
        """The completions, longest last: (continued, mask), both (max_length + 1, max_length) bool."""
        steps = torch.arange(self.max_length)
        num_continued = torch.arange(self.max_length + 1)[:, None]
        return steps < num_continued, steps <= num_continued

    def rewards(self, mask: Tensor) -> Tensor:
        """(N,) 1 for completions that are long enough."""
        return (mask.sum(dim=1) >= self.min_rewarded).double()

    def expected_reward(self) -> Tensor:
        """Exact mean reward, with its graph."""
        continued, mask = self.outcomes()
        logprobs = torch.where(mask, self.logprobs(continued), 0)
        return (logprobs.sum(dim=1).exp() * self.rewards(mask)).sum()

    def exact_update(self, alpha: float) -> float:
        """E[R w S] - E[R] E[w S]: minus the gradient of `grpo_loss` over all completions by probability."""
        continued, mask = self.outcomes()
        logprobs = self.logprobs(continued)
        probability = torch.where(mask, logprobs.detach(), 0).sum(dim=1).exp()
        rewards = self.rewards(mask)
        # the rows are not a sample of equal weights: 1 / R gives way to the probability
        weights = mask.sum(dim=1).double().pow(alpha - 1)[:, None] * mask * probability[:, None]
        advantages = rewards - (probability * rewards).sum()
        output = grpo_loss(logprobs, logprobs.detach(), advantages, weights, mask)
        (gradient,) = torch.autograd.grad(output.loss, self.logit)
        return -float(gradient)


def sample_lengths(policy: LengthPolicy, num_rows: int, seed: int) -> Tensor:
    """Number of continues of each row, drawn step by step from std::mt19937 as grpo.cpp does. (N,)

    A step goes on where its uniform number is below q. The draws of all rows form one stream: a row ends at
    its first stop or at `max_length` continues, and the next row takes over at the next draw.
    """
    uniforms = MersenneTwister(seed)
    probability = float(torch.sigmoid(policy.logit.detach()))
    continues: list[np.ndarray] = []
    found, pending = 0, 0
    while found < num_rows:
        stream = uniforms.uniforms(1_000_000) < probability
        stops = np.flatnonzero(~stream)
        runs = np.diff(stops, prepend=-1) - 1  # continues before each stop
        runs[0] += pending
        pending = len(stream) - 1 - stops[-1]
        # a run of 19 with at most 8 a row: two rows of 8, then a row of 3 and its stop
        full, rest = np.divmod(runs, policy.max_length)
        rows = np.full(int(full.sum()) + len(rest), policy.max_length)
        rows[np.cumsum(full + 1) - 1] = rest
        continues.append(rows)
        found += len(rows)
    return torch.from_numpy(np.concatenate(continues)[:num_rows])


def length_tradeoff(
    alphas: tuple[float, ...] = (0.0, 0.5, 1.0),
    *,
    groups: int = 100_000,
    group_size: int = 8,
    seed: int = 12345,
    policy: LengthPolicy | None = None,
) -> list[LengthRow]:
    """Exact and sampled update for each alpha.

    The sampled one is the mean over groups of the gradient of `grpo_loss` with mean-centred advantages,
    ratio 1 and no KL. A group's own mean contains the row it is subtracted from, which shrinks the
    expectation by (G - 1) / G; the factor G / (G - 1) undoes that.

    Args:
        alphas: exponents in [0, 1].
        groups: groups drawn, the same ones for every alpha.
        group_size: completions in each.
        seed: of std::mt19937.
        policy: the standard one if left out.
    """
    policy = policy or LengthPolicy()
    continues = sample_lengths(policy, groups * group_size, seed).view(groups, group_size)
    rows = []
    for alpha in alphas:
        chunks = [_group_updates(policy, part, alpha) for part in continues.split(_CHUNK_GROUPS)]
        updates = torch.cat(chunks) * group_size / (group_size - 1)
        long, short = float(policy.max_length) ** alpha, 2.0**alpha
        rows.append(
            LengthRow(
                alpha=alpha,
                exact=policy.exact_update(alpha),
                sampled=float(updates.mean()),
                standard_error=float(updates.std()) / groups**0.5,
                long_share=long / (long + short),
            )
        )
    return rows


def _group_updates(policy: LengthPolicy, continues: Tensor, alpha: float) -> Tensor:
    """(groups,) minus the gradient of each group's own loss with respect to the logit, float64.

    In float32 up to each token's share, as a language model's loss is; only the sums are in float64.
    """
    groups, group_size = continues.shape
    config = LossConfig(reduction="alpha", alpha=alpha, advantage_scale="none")
    steps = torch.arange(policy.max_length)
    flat = continues.reshape(-1, 1)
    continued, mask = steps < flat, steps <= flat  # (groups * group_size, max_length)
    group_ids = torch.arange(groups).repeat_interleave(group_size)
    advantages = config.group_advantages(policy.rewards(mask).float(), group_ids)
    # Any divisor will do, it is taken out again below; a power of two leaves the float32 weights unrounded.
    divisor = 1 << (groups * group_size).bit_length()
    weights = config.token_weights(mask, group_ids, num_rows=divisor)
    logprobs = policy.logprobs(continued).detach().float().requires_grad_()
    output = grpo_loss(logprobs, logprobs.detach(), advantages, weights, mask, config=config)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    probability = torch.sigmoid(policy.logit.detach())
    score = torch.where(continued, 1 - probability, -probability).float()  # d logprob / d logit
    per_group = (gradient * score).double().view(groups, -1).sum(dim=1)
    return -per_group * (divisor / group_size)
