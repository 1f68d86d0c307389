"""LossConfig: what it accepts, what it refuses and by which name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from grpo_lit.errors import UserError
from grpo_lit.loss import LossConfig, group_advantages, token_weights


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"epsilon_low": 1.0}, "epsilon_low"),
        ({"epsilon_low": -0.1}, "epsilon_low"),
        ({"epsilon_low": float("nan")}, "epsilon_low"),
        ({"epsilon_high": -0.1}, "epsilon_high"),
        ({"epsilon_high": float("inf")}, "epsilon_high"),
        ({"beta": -0.1}, "beta"),
        ({"beta": float("nan")}, "beta"),
        ({"entropy_coef": float("inf")}, "entropy_coef"),
        ({"ratio": "row"}, "ratio"),
        ({"objective": "ppo"}, "objective"),
        ({"reduction": "mean"}, "reduction"),
        ({"advantage_scale": "std"}, "advantage_scale"),
        ({"advantage_std": "n"}, "advantage_std"),
        ({"advantage_eps": -1e-4}, "advantage_eps"),
        ({"cispo_cap": 0.0}, "cispo_cap"),
        ({"sapo_tau_positive": 0.0}, "sapo_tau_positive"),
        ({"vespo_k_negative": -1.0}, "vespo_k_negative"),
        ({"rollout_correction": "tis"}, "rollout_correction"),
        ({"rollout_correction_cap": 0.0}, "rollout_correction_cap"),
        ({"token_rule": "cov"}, "token_rule"),
        ({"token_rule_share": 0.0}, "token_rule_share"),
        ({"sent_entropy_share": 1.1}, "sent_entropy_share"),
        ({"clip_cov_low": 5.0}, "clip_cov_high"),
        ({"off_policy_threshold": -1.0}, "off_policy_threshold"),
        # combinations
        ({"delta": 1.2}, "delta"),
        ({"delta": 1.25, "epsilon_high": 0.3}, "delta"),
        ({"delta": float("inf")}, "delta"),
        ({"delta": 4.0, "objective": "cispo"}, "delta"),
        ({"alpha": 0.5}, "alpha"),
        ({"reduction": "alpha"}, "alpha"),
        ({"reduction": "alpha", "alpha": 1.1}, "alpha"),
        ({"objective": "cispo", "ratio": "sequence_token"}, "ratio"),
        ({"objective": "vespo", "ratio": "sequence"}, "ratio"),
        ({"objective": "gmpo"}, "ratio"),
        ({"objective": "reinforce", "ratio": "sequence"}, "ratio"),
        ({"kl_weighted": True}, "kl_weighted"),
        ({"kl_weighted": True, "beta": 0.1, "objective": "reinforce"}, "kl_weighted"),
        ({"objective": "vespo", "rollout_correction": "sequence_mask"}, "rollout_correction"),
        ({"token_rule": "kl_cov", "objective": "cispo"}, "objective"),
        ({"token_rule": "clip_cov", "objective": "unclipped"}, "objective"),
        ({"token_rule": "sent", "ratio": "sequence"}, "ratio"),
    ],
)
def test_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        LossConfig(**options)
    assert caught.value.argument == f"model.loss.{named}"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"epsilon_low": 0.0, "epsilon_high": 0.0},
        {"epsilon_low": 3e-4, "epsilon_high": 4e-4, "ratio": "sequence"},
        {"epsilon_high": 10.0},
        {"delta": 4.0},
        {"reduction": "alpha", "alpha": 0.0},
        {"reduction": "alpha", "alpha": 1.0},
        {"objective": "gmpo", "ratio": "sequence", "epsilon_low": 1.5},
        {"objective": "vespo", "rollout_correction": "token_mask"},
        {"token_rule": "sent", "objective": "unclipped"},
        {"entropy_coef": -0.01},
    ],
)
def test_accepted(options: dict[str, Any]) -> None:
    config = LossConfig(**options)
    for name, value in options.items():
        assert getattr(config, name) == value


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossConfig().beta = 0.1  # type: ignore[misc]


def test_what_it_needs() -> None:
    assert not LossConfig().needs_reference
    assert LossConfig(beta=0.1).needs_reference
    assert not LossConfig().needs_entropy
    assert LossConfig(token_rule="sent").needs_entropy
    assert not LossConfig(token_rule="sent").needs_entropy_gradient
    assert LossConfig(entropy_coef=0.1).needs_entropy_gradient


def test_its_choices_reach_advantages_and_weights() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 2.0])
    ids = torch.tensor([0, 0, 0, 1])
    config = LossConfig(
        advantage_scale="batch",
        advantage_eps=0.1,
        advantage_eps_inside_root=True,
        advantage_std="sample",
        leave_one_out=True,
        reduction="alpha",
        alpha=0.25,
    )
    expected = group_advantages(
        rewards, ids, scale="batch", eps=0.1, eps_inside_root=True, leave_one_out=True, correction=1
    )
    assert torch.equal(config.group_advantages(rewards, ids), expected)
    defaults = group_advantages(rewards, ids)
    assert torch.equal(LossConfig().group_advantages(rewards, ids), defaults)
    assert not torch.allclose(defaults, expected)
    mask = torch.tensor([[True, True], [True, False], [True, False], [False, False]])
    wanted = token_weights(mask, ids, reduction="alpha", alpha=0.25, num_rows=5)
    assert torch.equal(config.token_weights(mask, ids, num_rows=5), wanted)
    fixed = LossConfig(reduction="fixed_length").token_weights(mask, ids, max_completion_length=7)
    assert fixed.max() == pytest.approx(1 / 21)


def test_every_field_has_a_line_of_help() -> None:
    """The line below a field is its help on the command line."""
    import inspect

    source = inspect.getsource(LossConfig)
    for field in dataclasses.fields(LossConfig):
        after = source.split(f"    {field.name}: ", 1)[1].split('"""', 2)
        assert after[1].strip().endswith("."), field.name
        assert "\n" not in after[1], field.name


def test_the_words_of_the_config_are_those_of_the_functions_it_calls() -> None:
    """A new variant is named in the function's table and in the annotation; one alone would be refused by the other."""
    from typing import get_args, get_type_hints

    from grpo_lit.loss.advantages import ADVANTAGE_SCALES
    from grpo_lit.loss.config import _RATIOS
    from grpo_lit.loss.weights import REDUCTIONS

    words = {name: get_args(kind) for name, kind in get_type_hints(LossConfig).items()}
    assert words["advantage_scale"] == ADVANTAGE_SCALES
    assert words["reduction"] == REDUCTIONS
    assert set(words["objective"]) == set(_RATIOS)
    for name in ("advantage_scale", "reduction", "objective", "ratio", "token_rule"):
        with pytest.raises(UserError, match=f"model.loss.{name}='nothing': accepted is {words[name][0]}"):
            LossConfig(**{name: "nothing"})
