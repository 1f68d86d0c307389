"""Engines by name. `build_engine` imports only the one that a configuration names."""

from __future__ import annotations

import logging
from collections.abc import Callable

from grpo_lit.errors import UserError
from grpo_lit.policy import Policy
from grpo_lit.prompts import PromptEncoder
from grpo_lit.rollout.base import RolloutConfig, RolloutEngine

_log = logging.getLogger("grpo_lit.rollout")
EngineBuilder = Callable[[RolloutConfig, Policy, PromptEncoder], RolloutEngine]


def _build_hf(config: RolloutConfig, policy: Policy, encoder: PromptEncoder) -> RolloutEngine:
    from grpo_lit.rollout.hf import HFEngine

    return HFEngine(policy, encoder.tokenizer, batch_size=config.batch_size)


def _build_graph(config: RolloutConfig, policy: Policy, encoder: PromptEncoder) -> RolloutEngine:
    from grpo_lit.rollout.graph import GraphEngine
    from grpo_lit.rollout.model_reader import UnsupportedModel

    try:
        return GraphEngine(policy, encoder.tokenizer, batch_size=config.batch_size)
    except UnsupportedModel as reason:
        _log.warning("engine=hf instead of graph: %s", reason)
        return _build_hf(config, policy, encoder)


def _build_vllm(config: RolloutConfig, policy: Policy, encoder: PromptEncoder) -> RolloutEngine:
    from grpo_lit.rollout.vllm import build_vllm_engine

    return build_vllm_engine(config, policy, encoder)


def _build_auto(config: RolloutConfig, policy: Policy, encoder: PromptEncoder) -> RolloutEngine:
    if policy.device.type == "cuda":
        return _build_graph(config, policy, encoder)
    _log.info("engine=hf: no CUDA device")
    return _build_hf(config, policy, encoder)


ENGINES: dict[str, EngineBuilder] = {
    "auto": _build_auto,
    "graph": _build_graph,
    "hf": _build_hf,
    "vllm": _build_vllm,
}


def build_engine(config: RolloutConfig, policy: Policy, encoder: PromptEncoder) -> RolloutEngine:
    """The engine that a configuration names.

    Raises:
        UserError: no engine of that name.
    """
    if config.engine not in ENGINES:
        raise UserError("model.rollout.engine", config.engine, " | ".join(ENGINES))
    engine = ENGINES[config.engine](config, policy, encoder)
    _log.info("rollouts come from the engine %s", engine.name)
    return engine
