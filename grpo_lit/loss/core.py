"""The loss: sum over tokens of weight x (policy term + beta KL - entropy bonus)."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_lit.loss import objectives
from grpo_lit.loss.batch import LossBatch, as_rows, check_needs, check_shapes, loss_batch
from grpo_lit.loss.config import LossConfig
from grpo_lit.loss.corrections import off_policy_keep
from grpo_lit.loss.divergences import MAX_LOG_RATIO, k3_kl
from grpo_lit.loss.metrics import LossOutput
from grpo_lit.loss.report import loss_totals
from grpo_lit.loss.tokens import TokenSelection, select_tokens

_DEFAULT = LossConfig()


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    completion_mask: Tensor,
    *,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    selection: TokenSelection | None = None,
    config: LossConfig = _DEFAULT,
) -> LossOutput:
    """Sum over counted tokens of w_t [policy_t(config.objective) + beta k3_t - entropy_coef H_t].

    Add the losses of the micro-batches up: `weights` (from `token_weights`) hold the divisor of the whole
    batch. Runs in float32, or in float64 if given float64. Masked tokens get a gradient of exactly 0 even
    where their log-probs are infinite or NaN.

    The KL is in the loss, not in the reward, and acts on every weighted token, also where the advantage is 0:
    groups without spread still feel the reference.

    Args:
        logprobs: (N, T) of the policy, with graph, at the sampling temperature.
        old_logprobs: (N, T) of the policy that is the ratio's denominator.
        advantages: (N,) one a row, or (N, T) one a token.
        weights: (N, T) from `token_weights`. 0 takes a token's own terms out; its log-ratio still counts in
            the mean of a sequence ratio.
        completion_mask: (N, T) bool, True where the token counts.
        ref_logprobs: (N, T) of the reference; needed if beta > 0.
        entropy: (N, T) nats. With graph when entropy_coef is not 0; otherwise only logged.
        rollout_logprobs: (N, T) as the rollout engine reported them; needed for rollout_correction, otherwise
            only their distance is logged.
        selection: tokens picked by `select_tokens` on the whole batch. Picked from these rows alone if left
            out, which is only right when these rows are the whole batch.
        config: the choices.

    Returns:
        loss and metrics, see `LossOutput`.

    Raises:
        UserError: for shapes that don't match, or a tensor that the config needs and that is missing.
    """
    optional = {"ref_logprobs": ref_logprobs, "entropy": entropy, "rollout_logprobs": rollout_logprobs}
    check_shapes(logprobs, advantages, (old_logprobs, weights, completion_mask), optional)
    check_needs(optional, config)
    batch = loss_batch(logprobs, old_logprobs, advantages, weights, completion_mask, rollout_logprobs, config)
    policy = _policy_term(batch, config)
    if config.token_rule != "none":
        if selection is None:
            selection = select_tokens(batch.logprobs, as_rows(advantages), batch.mask, entropy=entropy, config=config)
        policy = _apply_selection(policy, selection, batch)
    kl = _reference_kl(batch, ref_logprobs, config)
    parts = _weighted_sums(batch, policy, kl, weights, entropy, config)
    loss = torch.stack(list(parts.values())).sum()
    means = {"ref_kl": kl, "entropy": entropy, "rollout_correction": batch.correction}
    totals = loss_totals(batch, {"loss": loss, **parts}, means, config)
    return LossOutput(loss=loss, totals=totals)


def _policy_term(batch: LossBatch, config: LossConfig) -> Tensor:
    """(N, T) policy loss per token, corrected for the rollout engine and for old rows."""
    advantages = batch.advantages
    if config.off_policy_threshold is not None:
        keep = off_policy_keep(batch.logprobs, batch.behaviour, advantages, batch.mask, config.off_policy_threshold)
        advantages = torch.where(keep, advantages, 0)
    if batch.correction is not None and config.objective != "vespo":
        # As a factor of the advantage: being positive it changes no sign, and 0 drops the token.
        advantages = advantages * batch.correction
    log_ratio, logp, low, high = batch.log_ratio, batch.logprobs, config.epsilon_low, config.epsilon_high
    if config.objective == "clip":
        return objectives.clip_objective(log_ratio, advantages, epsilon_low=low, epsilon_high=high, delta=config.delta)
    if config.objective in ("unclipped", "gmpo"):  # gmpo's log-ratio is clipped already
        return objectives.unclipped_objective(log_ratio, advantages)
    if config.objective == "cispo":
        return objectives.cispo_objective(log_ratio, logp, advantages, cap=config.cispo_cap)
    if config.objective == "sapo":
        return objectives.sapo_objective(
            log_ratio,
            advantages,
            tau_positive=config.sapo_tau_positive,
            tau_negative=config.sapo_tau_negative,
        )
    if config.objective == "reinforce":
        return objectives.reinforce_objective(logp, advantages)
    phi = objectives.vespo_weights(
        logp - batch.old,
        advantages,
        batch.mask,
        log_correction=None if batch.correction is None else batch.correction.log(),
        k_positive=config.vespo_k_positive,
        lambda_positive=config.vespo_lambda_positive,
        k_negative=config.vespo_k_negative,
        lambda_negative=config.vespo_lambda_negative,
    )
    return objectives.vespo_objective(phi, logp, advantages)


def _apply_selection(policy: Tensor, selection: TokenSelection, batch: LossBatch) -> Tensor:
    policy = torch.where(selection.policy_mask, policy, policy.detach())
    coef = selection.old_kl_coef.to(policy.dtype)
    moved = torch.where(batch.live & (coef != 0), batch.logprobs - batch.old, 0)
    return policy + coef * moved.abs()


def _reference_kl(batch: LossBatch, ref_logprobs: Tensor | None, config: LossConfig) -> Tensor | None:
    if config.beta == 0 or ref_logprobs is None:
        return None
    ref = torch.where(batch.live, ref_logprobs.detach().to(batch.logprobs.dtype), 0)
    kl = k3_kl(torch.where(batch.live, batch.logprobs, 0), ref)
    if config.kl_weighted:
        # the ratio itself, not what an objective made of it
        log_ratio = objectives.leveled_log_ratio(batch.logprobs, batch.old, batch.mask, config.ratio)
        kl = kl * torch.where(batch.live, log_ratio, 0).clamp(max=MAX_LOG_RATIO).exp()
    return kl


def _weighted_sums(
    batch: LossBatch, policy: Tensor, kl: Tensor | None, weights: Tensor, entropy: Tensor | None, config: LossConfig
) -> dict[str, Tensor]:
    """The parts of the loss, by the names of their metrics."""
    weight = torch.where(batch.live, weights.to(batch.logprobs.dtype), 0)
    parts = {"policy_loss": (weight * policy).sum()}
    if kl is not None:
        parts["kl_loss"] = config.beta * (weight * kl).sum()
    if entropy is not None and config.entropy_coef != 0:
        nats = torch.where(batch.live, entropy.to(batch.logprobs.dtype), 0)
        parts["entropy_loss"] = -config.entropy_coef * (weight * nats).sum()
    return parts
