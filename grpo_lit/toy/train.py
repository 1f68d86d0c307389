"""Training the echo policy with GRPO: 100 updates, several passes over each rollout."""

from __future__ import annotations

from typing import NamedTuple

import torch

from grpo_lit.loss import LossConfig, grpo_loss
from grpo_lit.toy.echo import EchoPolicy, EchoRollout, Uniforms
from grpo_lit.toy.generators import MersenneTwister, TorchUniforms

TOY_LOSS = LossConfig(epsilon_low=0.2, epsilon_high=0.2, beta=0.01, advantage_eps=1e-8, advantage_eps_inside_root=True)


class ToyRun(NamedTuple):
    """What a toy run ended with.

    Args:
        success: exact probability of the right answer, mean over prompts.
        curve: the same after every update; the first entry is the start.
        greedy_right: the most probable completions are right.
        policy: the trained policy.
    """

    success: float
    curve: list[float]
    greedy_right: bool
    policy: EchoPolicy


def train_toy(
    seed: int,
    exact: bool = True,
    passes: int = 4,
    *,
    updates: int = 100,
    group_size: int = 16,
    learning_rate: float = 0.5,
    config: LossConfig = TOY_LOSS,
) -> ToyRun:
    """Trains an `EchoPolicy` from 1/16 with plain SGD, clip 0.2, and k3 KL 0.01 to the uniform start.

    Args:
        seed: of the sampler.
        exact: draw as grpo.cpp does (std::mt19937), which repeats its figures to six digits; otherwise from
            torch's generator.
        passes: gradient steps on each rollout; the ratios leave 1 from the second one on.
        updates: rollouts.
        group_size: completions per prompt; three prompts.
        learning_rate: of SGD.
        config: the loss.
    """
    policy = EchoPolicy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=learning_rate)
    uniforms: Uniforms = MersenneTwister(seed) if exact else TorchUniforms(seed)
    curve = [policy.success()]
    for _ in range(updates):
        rollout = policy.sample(uniforms, group_size)
        update(policy, optimizer, rollout, passes=passes, config=config)
        curve.append(policy.success())
    return ToyRun(curve[-1], curve, policy.is_greedy_right(), policy)


def update(
    policy: EchoPolicy,
    optimizer: torch.optim.Optimizer,
    rollout: EchoRollout,
    *,
    passes: int,
    config: LossConfig,
) -> None:
    """`passes` optimizer steps on one rollout; the reference is the uniform policy."""
    advantages = config.group_advantages(rollout.rewards, rollout.group_ids)
    weights = config.token_weights(rollout.mask, rollout.group_ids, max_completion_length=rollout.mask.shape[1])
    old_logprobs = policy.logprobs(rollout.states, rollout.actions).detach()
    ref_logprobs = EchoPolicy(policy.logits.dtype).logprobs(rollout.states, rollout.actions).detach()
    for _ in range(passes):
        output = grpo_loss(
            policy.logprobs(rollout.states, rollout.actions),
            old_logprobs,
            advantages,
            weights,
            rollout.mask,
            ref_logprobs=ref_logprobs,
            config=config,
        )
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
