"""Which member of the GRPO family to train with, and what the choices accept."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.loss.advantages import group_advantages
from grpo_lit.loss.weights import token_weights

# Which ratio levels an objective can be stated with, and why not the others.
_RATIOS = {
    "clip": (("token", "sequence", "sequence_token"), ""),
    "unclipped": (("token", "sequence", "sequence_token"), ""),
    "sapo": (("token", "sequence", "sequence_token"), ""),
    "cispo": (("token", "sequence"), "its ratio carries no gradient, so 'sequence_token' is 'sequence'"),
    "vespo": (("token",), "it forms its own sequence weight from the token ratios"),
    "gmpo": (("sequence",), "it is a ratio per sequence, the geometric mean"),
    "reinforce": (("token",), "it has no ratio"),
}


@dataclass(frozen=True)
class LossConfig:
    """The objective, its reduction and the advantages in front of it."""

    epsilon_low: float = 0.2
    """Clip below ratio 1 - epsilon_low, in [0, 1); for gmpo below log-ratio -epsilon_low."""
    epsilon_high: float = 0.2
    """Clip above ratio 1 + epsilon_high (DAPO: 0.28); for gmpo above log-ratio epsilon_high."""
    beta: float = 0.0
    """Weight of the k3 KL to the reference policy, added per token to the loss; 0 loads no reference."""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """Level of the probability ratio: per token, or per sequence (GSPO and its token form)."""
    objective: Literal["clip", "unclipped", "cispo", "sapo", "vespo", "gmpo", "reinforce"] = "clip"
    """Policy term, see docs/loss.md."""
    delta: float | None = None
    """Dual clip: bound of the ratio from above where A < 0; above 1 + epsilon_high (INTELLECT-2: 4)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: loss - entropy_coef x weighted sum of token entropies in nats."""
    reduction: Literal["sequence_mean", "token_mean", "alpha", "fixed_length"] = "sequence_mean"
    """How tokens are weighed: GRPO, DAPO, the length family, Dr.GRPO."""
    alpha: float | None = None
    """Exponent in [0, 1] of reduction 'alpha': a row of L tokens weighs L^alpha in all."""
    advantage_scale: Literal["group", "batch", "none"] = "group"
    """Spread the centred rewards are divided by: the group's, the batch's, or none (Dr.GRPO)."""
    advantage_eps: float = 1e-4
    """Added to that spread."""
    advantage_eps_inside_root: bool = False
    """Divide by sqrt(variance + eps) instead of std + eps."""
    advantage_std: Literal["population", "sample"] = "population"
    """Divide the variance by n, or by n - 1 as TRL does."""
    leave_one_out: bool = False
    """Baseline without the row itself (RLOO)."""
    mask_truncated: bool = False
    """Leave completions that hit the length limit out of the loss, its denominator and the group's mean."""
    cispo_cap: float = 5.0
    """Upper bound of CISPO's weight; the bound itself, not 1 + epsilon."""
    sapo_tau_positive: float = 1.0
    """Steepness of SAPO's gate where the advantage is positive."""
    sapo_tau_negative: float = 1.05
    """Steepness of SAPO's gate where the advantage is negative."""
    vespo_k_positive: float = 2.0
    """Power of VESPO's sequence weight where the advantage is not negative."""
    vespo_lambda_positive: float = 3.0
    """Decay of VESPO's sequence weight where the advantage is not negative."""
    vespo_k_negative: float = 3.0
    """Power of VESPO's sequence weight where the advantage is negative."""
    vespo_lambda_negative: float = 2.0
    """Decay of VESPO's sequence weight where the advantage is negative."""
    kl_weighted: bool = False
    """Multiply the k3 KL by the ratio, which makes its gradient unbiased off policy (DeepSeek-V3.2)."""
    off_policy_threshold: float | None = None
    """Drop rows with negative advantage whose mean log-ratio fell by more than this, in nats per token."""
    token_rule: Literal["none", "clip_cov", "kl_cov", "sent"] = "none"
    """Special treatment of a few tokens by covariance of advantage and log-prob (Clip-Cov, KL-Cov, SENT)."""
    token_rule_share: float = 2e-4
    """Share of the tokens that the rule treats, in (0, 1]."""
    token_rule_coef: float = 1.0
    """Weight of abs(log-ratio) on the treated tokens of kl_cov and sent."""
    sent_entropy_share: float = 0.8
    """SENT looks at this share of tokens with the lowest entropy."""
    clip_cov_low: float = 1.0
    """Clip-Cov picks among tokens with a covariance above this."""
    clip_cov_high: float = 5.0
    """Clip-Cov picks among tokens with a covariance below this."""
    rollout_correction: Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = "none"
    """Weigh the policy term by p_old / p_rollout, truncated at the cap or dropped above it."""
    rollout_correction_cap: float = 3.0
    """Largest such weight."""

    def __post_init__(self) -> None:
        for name, accepted in _choices().items():
            value = getattr(self, name)
            if value not in accepted:
                raise _refused(name, value, " | ".join(accepted))
        self._check_ranges()
        self._check_combinations()

    def group_advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """`grpo_lit.loss.group_advantages` with the choices made here."""
        return group_advantages(
            rewards,
            group_ids,
            scale=self.advantage_scale,
            eps=self.advantage_eps,
            eps_inside_root=self.advantage_eps_inside_root,
            leave_one_out=self.leave_one_out,
            correction=1 if self.advantage_std == "sample" else 0,
        )

    def token_weights(
        self,
        completion_mask: Tensor,
        group_ids: Tensor,
        *,
        max_completion_length: int | None = None,
        num_rows: int | Tensor | None = None,
        num_tokens: int | Tensor | None = None,
    ) -> Tensor:
        """`grpo_lit.loss.token_weights` with the choices made here."""
        return token_weights(
            completion_mask,
            group_ids,
            reduction=self.reduction,
            alpha=self.alpha,
            max_completion_length=max_completion_length,
            num_rows=num_rows,
            num_tokens=num_tokens,
        )

    @property
    def needs_reference(self) -> bool:
        """`grpo_loss` wants `ref_logprobs`."""
        return self.beta > 0

    @property
    def needs_entropy(self) -> bool:
        """`grpo_loss` or `select_tokens` wants the entropy of each token."""
        return self.entropy_coef != 0 or self.token_rule == "sent"

    @property
    def needs_entropy_gradient(self) -> bool:
        """The entropy must carry its gradient."""
        return self.entropy_coef != 0

    def _check_ranges(self) -> None:
        infinity = float("inf")
        for name, low, high in (("beta", 0.0, infinity), ("entropy_coef", -infinity, infinity)):
            value = getattr(self, name)
            if not low <= value < high or value == -infinity:
                raise _refused(name, value, "a finite number" + (" >= 0" if low == 0 else ""))
        log_domain = self.objective == "gmpo"
        if not 0 <= self.epsilon_low < (infinity if log_domain else 1):
            accepted = "a finite number >= 0" if log_domain else "in [0, 1)"
            raise _refused("epsilon_low", self.epsilon_low, accepted)
        for name in ("epsilon_high", "advantage_eps", "token_rule_coef"):
            if not 0 <= getattr(self, name) < infinity:
                raise _refused(name, getattr(self, name), "a finite number >= 0")
        positive = (
            "cispo_cap sapo_tau_positive sapo_tau_negative vespo_k_positive vespo_lambda_positive "
            "vespo_k_negative vespo_lambda_negative rollout_correction_cap"
        )
        for name in positive.split():
            if not 0 < getattr(self, name) < infinity:
                raise _refused(name, getattr(self, name), "a finite number > 0")
        for name in ("token_rule_share", "sent_entropy_share"):
            if not 0 < getattr(self, name) <= 1:
                raise _refused(name, getattr(self, name), "in (0, 1]")
        if self.off_policy_threshold is not None and not 0 <= self.off_policy_threshold < infinity:
            raise _refused("off_policy_threshold", self.off_policy_threshold, "a finite number >= 0, or null")
        if not self.clip_cov_low < self.clip_cov_high:
            raise _refused("clip_cov_high", self.clip_cov_high, f"above clip_cov_low={self.clip_cov_low}")

    def _check_combinations(self) -> None:
        ratios, reason = _RATIOS[self.objective]
        if self.ratio not in ratios:
            accepted = f"{' | '.join(ratios)} with objective={self.objective!r}: {reason}"
            raise _refused("ratio", self.ratio, accepted)
        if self.delta is not None:
            if self.objective != "clip":
                accepted = f"null with objective={self.objective!r}: only 'clip' reads it"
                raise _refused("delta", self.delta, accepted)
            if not 1 + self.epsilon_high < self.delta < float("inf"):
                accepted = f"a finite number above 1 + epsilon_high = {1 + self.epsilon_high:g}"
                raise _refused("delta", self.delta, accepted)
        if self.reduction == "alpha":
            if self.alpha is None or not 0 <= self.alpha <= 1:
                raise _refused("alpha", self.alpha, "a number in [0, 1] with reduction='alpha'")
        elif self.alpha is not None:
            accepted = f"null with reduction={self.reduction!r}: only 'alpha' reads it"
            raise _refused("alpha", self.alpha, accepted)
        if self.kl_weighted and self.beta == 0:
            raise _refused("kl_weighted", True, "false with beta=0: there is no KL term to weigh")
        if self.kl_weighted and self.objective == "reinforce":
            raise _refused("kl_weighted", True, "false with objective='reinforce': it has no ratio")
        if self.token_rule != "none":
            self._check_token_rule()
        if self.objective == "vespo" and self.rollout_correction.startswith("sequence"):
            accepted = "none | token_truncate | token_mask with objective='vespo', a product over tokens itself"
            raise _refused("rollout_correction", self.rollout_correction, accepted)

    def _check_token_rule(self) -> None:
        accepted = ("clip",) if self.token_rule == "clip_cov" else ("clip", "unclipped")
        if self.objective not in accepted:
            listed = f"{' | '.join(accepted)} with token_rule={self.token_rule!r}"
            raise _refused("objective", self.objective, listed)
        if self.ratio != "token":
            level = f"token with token_rule={self.token_rule!r}: it acts on tokens"
            raise _refused("ratio", self.ratio, level)


@functools.cache
def _choices() -> dict[str, tuple[str, ...]]:
    """Accepted words of each field that is one of several, as its annotation lists them."""
    kinds = get_type_hints(LossConfig)
    return {name: get_args(kind) for name, kind in kinds.items() if get_origin(kind) is Literal}


def _refused(name: str, value: object, accepted: str) -> UserError:
    return UserError(f"model.loss.{name}", value, accepted)
