"""Settings of the vllm engine, importable without vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class VLLMConfig:
    """Settings of ``model.rollout.engine=vllm``."""
