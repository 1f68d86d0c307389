"""Rollouts: sampling completions from the policy, reproducibly, with any engine."""

from grpo_lit.rollout.base import Rollout, RolloutConfig, RolloutEngine, SamplingConfig, build_engine
from grpo_lit.rollout.hf import HFEngine
from grpo_lit.rollout.sampling import SeededSampler, row_keys, sample_tokens, uniforms

__all__ = [
    "HFEngine",
    "Rollout",
    "RolloutConfig",
    "RolloutEngine",
    "SamplingConfig",
    "SeededSampler",
    "build_engine",
    "row_keys",
    "sample_tokens",
    "uniforms",
]
