"""Token rules: which tokens are picked, what happens to them, and that splitting the batch doesn't matter."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from grpo_lit.errors import UserError
from grpo_lit.loss import (
    LossConfig,
    TokenSelection,
    grpo_loss,
    merge_metrics,
    select_tokens,
    token_covariance,
)
from grpo_lit.loss import token_weights as weights_of

MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], dtype=torch.bool)
ADVANTAGES = torch.tensor([2.0, -1.0, 0.5])
LOGPROBS = torch.tensor(
    [[-0.1, -3.0, -1.0, -0.2, 99.0], [-0.1, -4.0, -0.5, -2.0, -1.0], [-0.3, -0.9, 99.0, 99.0, 99.0]]
)
ENTROPY = torch.tensor([[0.1, 2.0, 1.9, 0.2, 0], [0.3, 1.8, 0.4, 0.5, 0.6], [0.7, 0.8, 0, 0, 0]])


def covariance_by_hand() -> Tensor:
    """Over the 11 counted tokens."""
    tokens = [(float(ADVANTAGES[i]), float(LOGPROBS[i, t])) for i, t in MASK.nonzero().tolist()]
    mean_a = sum(a for a, _ in tokens) / len(tokens)
    mean_l = sum(logp for _, logp in tokens) / len(tokens)
    result = torch.zeros(3, 5, dtype=torch.float64)
    for (i, t), (a, logp) in zip(MASK.nonzero().tolist(), tokens, strict=True):
        result[i, t] = (a - mean_a) * (logp - mean_l)
    return result


def test_covariance() -> None:
    torch.testing.assert_close(token_covariance(ADVANTAGES, LOGPROBS, MASK), covariance_by_hand())
    per_token = ADVANTAGES[:, None].expand(3, 5)
    torch.testing.assert_close(token_covariance(per_token, LOGPROBS, MASK), covariance_by_hand())


def test_kl_cov_picks_the_largest_covariances() -> None:
    config = LossConfig(token_rule="kl_cov", token_rule_share=0.28, token_rule_coef=0.5, objective="unclipped")
    selection = select_tokens(LOGPROBS, ADVANTAGES, MASK, config=config)
    best = covariance_by_hand().where(MASK, torch.tensor(float("-inf"))).flatten().topk(3).indices
    expected = torch.zeros(15).index_fill(0, best, 0.5).view(3, 5)
    assert torch.equal(selection.old_kl_coef, expected)
    assert selection.policy_mask.all()


def test_at_least_one_token_is_picked() -> None:
    config = LossConfig(token_rule="kl_cov")  # a share of 2e-4 of 11 tokens
    assert int((select_tokens(LOGPROBS, ADVANTAGES, MASK, config=config).old_kl_coef > 0).sum()) == 1


def test_clip_cov_stops_the_gradient_of_tokens_in_the_band() -> None:
    config = LossConfig(token_rule="clip_cov", token_rule_share=1.0, clip_cov_low=0.5, clip_cov_high=2.0)
    selection = select_tokens(LOGPROBS, ADVANTAGES, MASK, config=config)
    covariance = covariance_by_hand()
    band = MASK & (covariance > 0.5) & (covariance < 2.0)
    assert 0 < int(band.sum()) < int((covariance > 0.5).sum())
    assert torch.equal(~selection.policy_mask, band)
    one = LossConfig(token_rule="clip_cov", clip_cov_low=0.5, clip_cov_high=2.0)
    picked = ~select_tokens(LOGPROBS, ADVANTAGES, MASK, config=one).policy_mask
    assert covariance[picked].tolist() == [float(covariance[band].max())]


def test_clip_cov_leaves_the_kl_alone() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    config = LossConfig(token_rule="clip_cov", beta=0.1)
    nothing = TokenSelection(torch.zeros_like(MASK), torch.zeros(3, 5))
    weights = weights_of(MASK, torch.zeros(3, dtype=torch.long))
    output = grpo_loss(
        logprobs,
        LOGPROBS,
        ADVANTAGES,
        weights,
        MASK,
        ref_logprobs=LOGPROBS + 0.3,
        selection=nothing,
        config=config,
    )
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    torch.testing.assert_close(gradient, -0.1 * torch.expm1(torch.tensor(0.3)) * weights)


def test_sent_looks_at_calm_tokens_only() -> None:
    """80 % of 11 tokens are 8: the three of entropy 1.8 and more are out, and means are over the eight."""
    config = LossConfig(token_rule="sent", token_rule_share=0.25, token_rule_coef=0.5)
    selection = select_tokens(LOGPROBS, ADVANTAGES, MASK, entropy=ENTROPY, config=config)
    calm = MASK & (ENTROPY < 1.8)
    assert int(calm.sum()) == 8
    covariance = token_covariance(ADVANTAGES, LOGPROBS, calm)
    order = covariance[calm].sort().values
    assert covariance[selection.old_kl_coef == 1.0].sort().values.tolist() == order[-2:].tolist()
    assert covariance[selection.old_kl_coef == 0.25].sort().values.tolist() == order[:2].tolist()
    assert int((selection.old_kl_coef > 0).sum()) == 4
    assert selection.policy_mask.all()


def test_sent_where_both_picks_overlap_keeps_the_stronger() -> None:
    mask = torch.tensor([[True]])
    config = LossConfig(token_rule="sent", token_rule_coef=0.5)
    logprobs = torch.tensor([[-1.0]])
    selection = select_tokens(logprobs, torch.tensor([1.0]), mask, entropy=torch.ones(1, 1), config=config)
    assert selection.old_kl_coef.item() == 1.0


def test_sent_without_entropy_is_refused() -> None:
    with pytest.raises(UserError, match="entropy"):
        select_tokens(LOGPROBS, ADVANTAGES, MASK, config=LossConfig(token_rule="sent"))


@pytest.mark.parametrize("rule", ["clip_cov", "kl_cov", "sent"])
def test_nothing_counts_nothing_is_picked(rule: str) -> None:
    config = LossConfig(token_rule=rule)
    mask = torch.zeros_like(MASK)
    selection = select_tokens(LOGPROBS, ADVANTAGES, mask, entropy=ENTROPY, config=config)
    assert selection.policy_mask.all()
    assert not selection.old_kl_coef.any()


@pytest.mark.parametrize("rule", ["clip_cov", "kl_cov", "sent"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_ranks_pick_what_one_would(rule: str, cut: int) -> None:
    """Rows dealt to two ranks, of which one may have none, and the third counts no token."""
    config = LossConfig(token_rule=rule, token_rule_share=0.3, clip_cov_low=0.1)
    mask = MASK & torch.tensor([[True], [True], [False]])
    whole = select_tokens(LOGPROBS, ADVANTAGES, mask, entropy=ENTROPY, config=config)
    assert not whole.policy_mask.all() or whole.old_kl_coef.any()
    parts, met, handed_in = [slice(0, cut), slice(cut, 3)], Barrier(2, timeout=10), [torch.empty(0)] * 2

    def select(rank: int) -> TokenSelection:
        def gather(own: Tensor) -> tuple[Tensor, slice]:
            handed_in[rank] = own
            met.wait()
            start = sum(map(len, handed_in[:rank]))
            return torch.cat(handed_in), slice(start, start + len(own))

        rows = parts[rank]
        return select_tokens(
            LOGPROBS[rows], ADVANTAGES[rows], mask[rows], entropy=ENTROPY[rows], config=config, gather=gather
        )

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(select, range(2)))
    for field in range(2):
        assert torch.equal(torch.cat([rank[field] for rank in ranks]), whole[field])


def test_the_distance_to_the_old_policy_pulls_both_ways_and_not_at_ratio_one() -> None:
    logprobs = torch.tensor([[-0.5, -1.5, -1.0]], requires_grad=True)
    old = torch.full((1, 3), -1.0)
    mask = torch.ones(1, 3, dtype=torch.bool)
    selection = TokenSelection(mask, torch.full((1, 3), 0.75))
    config = LossConfig(token_rule="kl_cov", objective="unclipped")
    output = grpo_loss(logprobs, old, torch.zeros(1), torch.ones(1, 3), mask, selection=selection, config=config)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    assert gradient.tolist() == [[0.75, -0.75, 0.0]]
    assert float(output.loss.detach()) == pytest.approx(0.75)


@pytest.mark.parametrize("rule", ["clip_cov", "kl_cov", "sent"])
def test_picks_made_once_make_splits_equal(rule: str) -> None:
    config = LossConfig(token_rule=rule, token_rule_share=0.3, clip_cov_low=0.1)
    old = LOGPROBS + 0.1 * torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    selection = select_tokens(old, ADVANTAGES, MASK, entropy=ENTROPY, config=config)
    weights = weights_of(MASK, torch.zeros(3, dtype=torch.long))

    def gradient(parts: list[slice]) -> tuple[Tensor, dict[str, float]]:
        logprobs = LOGPROBS.clone().requires_grad_()
        outputs = []
        for part in parts:
            output = grpo_loss(
                logprobs[part],
                old[part],
                ADVANTAGES[part],
                weights[part],
                MASK[part],
                entropy=ENTROPY[part],
                selection=selection.rows(part),
                config=config,
            )
            output.loss.backward()
            outputs.append(output)
        assert logprobs.grad is not None
        return logprobs.grad, merge_metrics(outputs)

    whole, metrics = gradient([slice(0, 3)])
    split, split_metrics = gradient([slice(0, 1), slice(1, 3)])
    assert torch.equal(whole, split)
    assert split_metrics == pytest.approx(metrics, rel=1e-6)
    plain = LossConfig()
    logprobs = LOGPROBS.clone().requires_grad_()
    grpo_loss(logprobs, old, ADVANTAGES, weights, MASK, config=plain).loss.backward()
    assert logprobs.grad is not None
    assert not torch.allclose(logprobs.grad, whole)
