"""The benchmark of the untrained policy."""

from __future__ import annotations

from typing import Any

from grpo_lit.callbacks.vllm_evaluation import VLLMEvaluation


class BaselineEvaluation(VLLMEvaluation):
    """`VLLMEvaluation` before the first step only; a resumed run finds it in its folder and skips it.

    Args:
        datasets: by name, the settings of `grpo_lit.evaluation.config.DatasetEntry`.
        options: any further setting of `VLLMEvaluation`.
    """

    def __init__(self, datasets: dict[str, dict[str, Any]], options: dict[str, Any] | None = None) -> None:
        super().__init__(datasets, None, before_training=True, at_end=False, **(options or {}))
