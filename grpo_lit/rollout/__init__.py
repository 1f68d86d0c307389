"""Rollouts: sampling completions from the policy, reproducibly, with any engine."""

from grpo_lit.rollout.base import Rollout, RolloutConfig, RolloutEngine, SamplingConfig
from grpo_lit.rollout.hf import HFEngine
from grpo_lit.rollout.registry import build_engine
from grpo_lit.rollout.sampling import SeededSampler, row_keys, sample_tokens, uniforms
from grpo_lit.rollout.vllm_config import VLLMConfig

__all__ = [
    "HFEngine",
    "Rollout",
    "RolloutConfig",
    "RolloutEngine",
    "SamplingConfig",
    "SeededSampler",
    "VLLMConfig",
    "build_engine",
    "row_keys",
    "sample_tokens",
    "uniforms",
]
