"""The objective of GRPO and its relatives, as pure functions on tensors.

```
rewards (N,) -> group_advantages -> advantages (N,) ---+
completion_mask (N, T) -> token_weights -> weights ----+-> grpo_loss -> sum of weight x per-token loss
logprobs, old_logprobs, ref_logprobs (N, T) -----------+
```

`LossConfig` picks the member of the family; docs/loss.md lists them with formulas, papers and TRL's names.
"""

from __future__ import annotations

from grpo_lit.loss.advantages import group_advantages, multi_reward_advantages
from grpo_lit.loss.config import LossConfig
from grpo_lit.loss.core import grpo_loss
from grpo_lit.loss.corrections import off_policy_keep, rollout_weights
from grpo_lit.loss.divergences import MAX_LOG_RATIO, adapt_entropy_coef, k1_kl, k3_kl
from grpo_lit.loss.metrics import LossOutput, merge_metrics, merge_totals, totals_to_metrics
from grpo_lit.loss.objectives import (
    cispo_objective,
    clip_masks,
    clip_objective,
    gmpo_log_ratio,
    leveled_log_ratio,
    reinforce_objective,
    sapo_objective,
    unclipped_objective,
    vespo_objective,
    vespo_weights,
)
from grpo_lit.loss.shaping import length_penalty, soft_overlong_penalty
from grpo_lit.loss.tokens import TokenSelection, select_tokens, token_covariance
from grpo_lit.loss.weights import token_weights

__all__ = [
    "MAX_LOG_RATIO",
    "LossConfig",
    "LossOutput",
    "TokenSelection",
    "adapt_entropy_coef",
    "cispo_objective",
    "clip_masks",
    "clip_objective",
    "gmpo_log_ratio",
    "group_advantages",
    "grpo_loss",
    "k1_kl",
    "k3_kl",
    "length_penalty",
    "leveled_log_ratio",
    "merge_metrics",
    "merge_totals",
    "multi_reward_advantages",
    "off_policy_keep",
    "reinforce_objective",
    "rollout_weights",
    "sapo_objective",
    "select_tokens",
    "soft_overlong_penalty",
    "token_covariance",
    "token_weights",
    "totals_to_metrics",
    "unclipped_objective",
    "vespo_objective",
    "vespo_weights",
]
