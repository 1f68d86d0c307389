"""entropy_mask: exact threshold, ties, row minimum, degenerate batches, ranks."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_lit.errors import UserError
from grpo_lit.kernels import entropy_mask, keep_row_weight


def _batch(n=7, t=19, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return torch.rand(n, t, generator=gen) * 3, torch.rand(n, t, generator=gen) < 0.7


@pytest.mark.parametrize("keep", [0.01, 0.2, 0.5, 0.77, 0.95])
@pytest.mark.parametrize("seed", range(4))
def test_keeps_exactly_the_top_share(keep, seed):
    entropy, mask = _batch(seed=seed)
    kept = entropy_mask(entropy, mask, keep=keep)
    count = math.ceil(keep * int(mask.sum()))
    assert int(kept.sum()) == count
    assert not (kept & ~mask).any()
    assert entropy[kept].min() > entropy[mask & ~kept].max()


def test_the_count_of_a_round_share_is_not_one_too_many():
    entropy = torch.arange(1.0, 101.0).reshape(4, 25)
    mask = torch.ones_like(entropy, dtype=torch.bool)
    for share in range(1, 100):
        assert int(entropy_mask(entropy, mask, keep=share / 100).sum()) == share


def test_ties_at_the_threshold_stay_together():
    entropy = torch.tensor([[3.0, 1.0, 1.0], [1.0, 0.5, 0.0]])
    kept = entropy_mask(entropy, torch.ones(2, 3, dtype=torch.bool), keep=0.34)  # 3 of 6 wanted
    assert kept.tolist() == [[True, True, True], [True, False, False]]


@pytest.mark.parametrize("value", [0.0, -0.0, 1.25, float("nan")])
def test_an_all_equal_batch_keeps_every_counted_token(value):
    _, mask = _batch()
    assert torch.equal(entropy_mask(torch.full(mask.shape, value), mask, keep=0.1), mask)


def test_a_fully_masked_batch_keeps_nothing():
    entropy, mask = _batch()
    assert not entropy_mask(entropy, torch.zeros_like(mask), keep=0.5, min_tokens=3).any()


def test_a_row_below_the_minimum_gets_its_own_top_tokens():
    entropy = torch.tensor([[9.0, 8.0, 7.0, 6.0], [0.1, 0.4, 0.3, 0.2], [0.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 0]]).bool()
    kept = entropy_mask(entropy, mask, keep=0.3, min_tokens=2)
    assert kept.tolist() == [
        [True, True, True, False],
        [False, True, True, False],
        [False, False, True, False],
    ]


def test_a_share_of_one_is_the_mask():
    entropy, mask = _batch()
    assert torch.equal(entropy_mask(entropy, mask, keep=1.0), mask)


def test_the_threshold_is_that_of_all_ranks():
    entropy, mask = _batch(n=8)
    whole = entropy_mask(entropy, mask, keep=0.3)
    # each rank's sums, gathered by running the ranks one after the other until nothing is missing
    parts = [slice(0, 2), slice(2, 8)]
    known: list[list[torch.Tensor]] = [[], []]
    for step in range(5):
        outputs = []
        for rank, part in enumerate(parts):
            calls = []

            def all_reduce(counts, rank=rank, calls=calls, step=step):
                number = len(calls)
                calls.append(counts.clone())
                if number < step:
                    counts.copy_(sum(per_rank[number] for per_rank in known))

            outputs.append(entropy_mask(entropy[part], mask[part], keep=0.3, all_reduce=all_reduce))
            known[rank] = calls
    assert torch.equal(torch.cat(outputs), whole)
    alone = torch.cat([entropy_mask(entropy[part], mask[part], keep=0.3) for part in parts])
    assert not torch.equal(alone, whole)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, None])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_one_rank_that_counts_is_one_rank_that_sorts(rows, scale):
    entropy, mask = _batch(n=rows)
    if scale is None:  # float32 numbers that follow one another
        entropy = torch.randperm(entropy.numel(), dtype=torch.int32).add(0x3F7FFFC0).view(torch.float32).view_as(mask)
    elif scale == 1:  # ties
        entropy = (entropy * 4).round() / 4
    else:
        entropy = entropy * scale
    for keep in (0.01, 0.3, 0.33, 0.77):
        counted = entropy_mask(entropy, mask, keep=keep, all_reduce=lambda counts: None)
        assert torch.equal(counted, entropy_mask(entropy, mask, keep=keep))
        assert counted.any() == mask.any()


def test_row_weights_are_preserved():
    entropy, mask = _batch()
    weights = torch.where(mask, 1.0 / mask.sum(1, keepdim=True).clamp(min=1), 0.0)
    kept = entropy_mask(entropy, mask, keep=0.3, min_tokens=1)
    scaled = keep_row_weight(weights, kept)
    torch.testing.assert_close(scaled.sum(1), weights.sum(1))
    assert (scaled[~kept] == 0).all()
    assert scaled.sum() > 6  # seven rows of weight 1 each


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"keep": 0.0}, "keep"),
        ({"keep": 1.5}, "keep"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"entropy": torch.zeros(2)}, "entropy"),
    ],
)
def test_mistakes_are_named(change, named):
    entropy, mask = _batch()
    with pytest.raises(UserError, match=named):
        entropy_mask(**({"entropy": entropy, "completion_mask": mask} | change))
