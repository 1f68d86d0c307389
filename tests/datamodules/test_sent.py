from __future__ import annotations

import math

import pytest
import torch

from grpo_lit.datamodules import semantic_entropy, sent_order


@pytest.mark.parametrize(
    ("answers", "entropy"),
    [
        (["4", "4.0", r"\frac{8}{2}", " 4 "], 0.0),
        (["1/2", "0.5", "0.50", "3"], 0.5623),
        (["1", "1", "2", "2.0"], math.log(2)),
        (["1", "1", "2", "3"], 1.0397),
        (["1", "2", "3", "4"], math.log(4)),
        ([None, None, "", "1"], math.log(4)),
        ([None, "1", "1", "1"], 0.5623),
        ([], 0.0),
        (["7"], 0.0),
    ],
)
def test_semantic_entropy_of_hand_worked_clusters(answers: list[str | None], entropy: float) -> None:
    assert semantic_entropy(answers) == pytest.approx(entropy, abs=5e-5)


def test_order_of_answers_changes_nothing() -> None:
    answers = ["1/2", "3", "0.5", None, "3.0", "0.5"]
    assert semantic_entropy(answers) == pytest.approx(semantic_entropy(answers[::-1]))


def test_sent_order_is_ascending_and_stable_with_nan_last() -> None:
    entropies = torch.tensor([0.5, float("nan"), 0.0, 0.5, 0.0, 1.0])
    assert sent_order(entropies) == [2, 4, 0, 3, 5, 1]
