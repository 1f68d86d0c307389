"""Rewards: the math verifier, the built-in reward functions, and how a step's rewards are put together."""

from grpo_lit.rewards.compute import RewardError, RewardOutput, compute_rewards
from grpo_lit.rewards.extract import Extraction, final_answer
from grpo_lit.rewards.functions import (
    BUILT_IN_REWARDS,
    MathAccuracy,
    RewardFunction,
    RewardResult,
    boxed_format,
    math_accuracy,
    resolve_reward,
    think_format,
)
from grpo_lit.rewards.gym import gym_score
from grpo_lit.rewards.latency import latency_histogram
from grpo_lit.rewards.messages import from_messages
from grpo_lit.rewards.policy import VerifierPolicy
from grpo_lit.rewards.verify import (
    VERDICT_KINDS,
    Verdict,
    VerifierPool,
    default_pool,
    explain,
    verify_math,
)

__all__ = [
    "BUILT_IN_REWARDS",
    "VERDICT_KINDS",
    "Extraction",
    "MathAccuracy",
    "RewardError",
    "RewardFunction",
    "RewardOutput",
    "RewardResult",
    "Verdict",
    "VerifierPolicy",
    "VerifierPool",
    "boxed_format",
    "compute_rewards",
    "default_pool",
    "explain",
    "final_answer",
    "from_messages",
    "gym_score",
    "latency_histogram",
    "math_accuracy",
    "resolve_reward",
    "think_format",
    "verify_math",
]
