"""Rules that treat a few tokens specially, by the covariance of advantage and log-prob.

The picks depend on all tokens of the batch (means, shares), so they are made once, over all ranks and before the
batch is split, by `select_tokens`, and handed to every micro-batch's `grpo_loss`. Made there with the old log-probs:
they are the ones known for the whole batch, and equal to the current ones in the first pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.loss.config import LossConfig

SENT_STRONG = 2.0
SENT_WEAK = 0.5


class TokenSelection(NamedTuple):
    """What `select_tokens` picked.

    Args:
        policy_mask: (N, T) bool, False where the policy term gives no gradient.
        old_kl_coef: (N, T) float32, weight of abs(logp - logp_old) added to the token's loss.
    """

    policy_mask: Tensor
    old_kl_coef: Tensor

    def rows(self, index: Tensor | slice) -> TokenSelection:
        """The selection of some rows, for a micro-batch."""
        return TokenSelection(self.policy_mask[index], self.old_kl_coef[index])


def token_covariance(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """(A_t - mean A)(logp_t - mean logp), means over the tokens of the mask; 0 elsewhere. (N, T) float64.

    Cui et al., 2505.22617: a softmax policy loses entropy at the rate of this covariance.

    Args:
        advantages: (N,), (N, 1) or (N, T).
        logprobs: (N, T); likewise one row of tokens, (T,) with (T,) advantages.
        mask: (N, T) bool.
    """
    rows = advantages if advantages.dim() == mask.dim() else advantages[:, None]
    advantage = torch.where(mask, rows.detach().double(), 0)
    logp = torch.where(mask, logprobs.detach().double(), 0)
    count = mask.sum().clamp(min=1)
    covariance = (advantage - advantage.sum() / count) * (logp - logp.sum() / count)
    return torch.where(mask, covariance, 0)


def select_tokens(
    logprobs: Tensor,
    advantages: Tensor,
    completion_mask: Tensor,
    *,
    entropy: Tensor | None = None,
    config: LossConfig,
    gather: Callable[[Tensor], tuple[Tensor, slice]] | None = None,
) -> TokenSelection:
    """Picks the tokens that `config.token_rule` treats, over all rows of all ranks.

    With n = number of counted tokens and k = max(1, int(share x n)):

    - ``clip_cov`` (2505.22617): k of the tokens whose covariance lies in (clip_cov_low, clip_cov_high) give
      no policy gradient. The paper draws them at random; here they are the k largest, so that a replay or
      another split of the batch picks the same ones.
    - ``kl_cov`` (2505.22617): the k tokens of largest covariance get coef x abs(logp - logp_old).
    - ``sent`` (2512.04359): among the share of tokens with the lowest entropy, the k of largest covariance
      get 2 x coef, the k of smallest covariance 0.5 x coef; k is a share of those tokens.

    The distance to the old policy has no gradient at ratio 1, so the last two do nothing in the first pass.

    Args:
        logprobs: (N, T), those of the old policy when called before the passes.
        advantages: (N,), (N, 1) or (N, T).
        completion_mask: (N, T) bool.
        entropy: (N, T) nats, needed by "sent".
        config: names the rule.
        gather: rows of all ranks from this rank's, and where its own are (`grpo_lit.distributed.gather_rows`); every
            rank has to call then, also one without a token. None: these are all rows.

    Raises:
        UserError: if the rule needs the entropy and there is none.
    """
    if config.token_rule == "sent" and entropy is None:
        raise UserError("entropy", None, "a tensor (N, T), since model.loss.token_rule='sent'")
    mask = completion_mask.bool()
    policy_mask = torch.ones_like(mask)
    coef = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    if config.token_rule != "none":
        rows = advantages[:, None] if advantages.dim() == 1 else advantages
        columns = [rows.expand_as(mask), logprobs, logprobs if entropy is None else entropy]
        tokens = torch.stack([column.detach()[mask].double() for column in columns], dim=1)  # (tokens that count, 3)
        tokens, own = (tokens, slice(None)) if gather is None else gather(tokens)
        silenced, penalty = _picks(tokens, config)
        policy_mask[mask], coef[mask] = ~silenced[own], penalty[own]
    return TokenSelection(policy_mask, coef)


def _picks(tokens: Tensor, config: LossConfig) -> tuple[Tensor, Tensor]:
    """(n,) bool, which tokens give no policy gradient, and (n,) float32, the weight of abs(logp - logp_old).

    Args:
        tokens: (n, 3) advantage, log-prob and entropy of every token that counts.
        config: names the rule.
    """
    advantages, logprobs, entropy = tokens.T
    every = torch.ones_like(logprobs, dtype=torch.bool)
    nothing = torch.zeros_like(logprobs, dtype=torch.float32)
    among = every
    if config.token_rule == "sent":
        among = _top(-entropy, every, _share(config.sent_entropy_share, every))
    covariance = token_covariance(advantages, logprobs, among)
    count = _share(config.token_rule_share, among)
    if config.token_rule == "clip_cov":
        band = (covariance > config.clip_cov_low) & (covariance < config.clip_cov_high)
        return _top(covariance, band, count), nothing
    if config.token_rule == "kl_cov":
        return ~every, torch.where(_top(covariance, every, count), config.token_rule_coef, nothing)
    weak = torch.where(_top(-covariance, among, count), SENT_WEAK * config.token_rule_coef, nothing)
    # the strong half last: with so few tokens that both picks overlap, the larger penalty holds
    return ~every, torch.where(_top(covariance, among, count), SENT_STRONG * config.token_rule_coef, weak)


def _share(share: float, mask: Tensor) -> int:
    return max(1, int(share * int(mask.sum())))


def _top(score: Tensor, among: Tensor, count: int) -> Tensor:
    """(N, T) bool: the `count` largest scores among the tokens of the mask, ties by position."""
    flat = torch.where(among, score, float("-inf")).flatten()
    order = torch.sort(flat, descending=True, stable=True).indices[:count]
    picked = torch.zeros_like(among).flatten()
    picked[order] = True
    return picked.view_as(among) & among
