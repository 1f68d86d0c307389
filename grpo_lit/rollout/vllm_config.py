"""Settings of the vllm engine, importable without vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class VLLMConfig:
    """Settings of ``model.rollout.engine=vllm``."""

    memory_share: float = 0.3
    """Share of the GPU's memory that vLLM takes while it is awake."""
