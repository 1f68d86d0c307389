"""Compares grpo_lit.loss with the loss of an installed TRL: same tensors, loss and gradient side by side.

TRL is no dependency. Try it in a throwaway folder:

    pip install --no-deps --target /tmp/trl trl accelerate
    PYTHONPATH=/tmp/trl python scripts/compare_trl_loss.py

TRL's own `GRPOTrainer._compute_loss` runs, on a trainer built without its constructor; only the model's
forward is replaced, by the log-probs and entropies of the case. Exit code 1 if a line is neither equal nor
marked as a choice, or if an option changes nothing. docs/loss.md names the choices.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_lit.loss import LossConfig, grpo_loss, multi_reward_advantages, rollout_weights

LENGTHS = (5, 3, 7, 1, 6, 7, 2, 4)
N, T = len(LENGTHS), max(LENGTHS)
MAX_COMPLETION_LENGTH = 9
GROUP_IDS = torch.arange(N) // 4
TOLERANCE = 1e-6
EQUAL_TYPES = ("bnpo",)  # with one micro-batch the same as dapo

LOSS_TYPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "bnpo": {"reduction": "token_mean"},
    "dr_grpo": {"reduction": "fixed_length"},
    "dapo": {"reduction": "token_mean"},
    "cispo": {"objective": "cispo", "reduction": "token_mean", "cispo_cap": 1.2},
    "sapo": {"objective": "sapo"},
    "vespo": {"objective": "vespo", "reduction": "token_mean"},
    "luspo": {"reduction": "alpha", "alpha": 1.0},
}


@dataclass
class Case:
    """One line: TRL's options, ours, and the choice that sets them apart, if any."""

    name: str
    loss_type: str
    trl: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    choice: str = ""
    masked_row: int | None = None


def cases() -> list[Case]:
    """Every loss type by ratio level and KL, then the options one by one."""
    found = []
    levels = ("token", "sequence")
    kls = (
        ("", {}, {}),
        (" beta", {"beta": 0.04}, {"beta": 0.04}),
        (
            " weighted KL",
            {"beta": 0.04, "use_bias_correction_kl": True},
            {"beta": 0.04, "kl_weighted": True},
        ),
    )
    for (loss_type, options), level, (label, trl, ours) in itertools.product(LOSS_TYPES.items(), levels, kls):
        if loss_type == "vespo" and level == "sequence":
            continue  # VESPO forms its own sequence weight at any level
        ratio = {"importance_sampling_level": level}
        name = f"{loss_type} {level}{label}"
        found.append(Case(name, loss_type, trl | ratio, options | ours | {"ratio": level}))
    clip_higher = {"epsilon_high": 0.28}
    found.append(Case("dapo clip-higher", "dapo", clip_higher, LOSS_TYPES["dapo"] | clip_higher))
    found.append(Case("grpo delta 1.5", "grpo", {"delta": 1.5}, {"delta": 1.5}))
    off = {"off_policy_mask_threshold": 0.02}
    found.append(Case("grpo off-policy mask", "grpo", off, {"off_policy_threshold": 0.02}))
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
        correction = {"rollout_correction": mode, "rollout_correction_cap": 1.2}
        found.append(Case(f"grpo rollout {mode}", "grpo", {"rollout": mode}, correction))
        if mode.startswith("token"):
            ours = LOSS_TYPES["vespo"] | correction
            found.append(Case(f"vespo rollout {mode}", "vespo", {"rollout": mode}, ours))
    bonus = {"entropy_coef": 0.01}
    found.append(Case("dapo entropy bonus", "dapo", bonus, LOSS_TYPES["dapo"] | bonus))
    found.append(Case("grpo entropy bonus", "grpo", bonus, bonus, choice="the bonus has the reduction's weights"))
    empty = "rows without tokens are out of the divisor"
    found.append(Case("grpo, a masked row", "grpo", choice=empty, masked_row=2))
    fixed = LOSS_TYPES["dr_grpo"]
    found.append(Case("dr_grpo, a masked row", "dr_grpo", {}, fixed, choice=empty, masked_row=2))
    found.append(Case("dapo, a masked row", "dapo", {}, LOSS_TYPES["dapo"], masked_row=2))
    return found


def tensors(dtype: torch.dtype, masked_row: int | None) -> dict[str, Tensor]:
    """Log-probs whose ratios leave the clip range on both sides."""
    generator = torch.Generator().manual_seed(1)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(N, T, generator=generator, dtype=torch.float64)

    old = -torch.rand(N, T, generator=generator, dtype=torch.float64) * 2 - 0.2
    mask = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
    if masked_row is not None:
        mask[masked_row] = False
    floats = {
        "logprobs": old + normal(0.5),
        "old_logprobs": old,
        "ref_logprobs": old + normal(0.3),
        "rollout_logprobs": old + normal(0.2),
        "entropy": torch.rand(N, T, generator=generator, dtype=torch.float64),
        "advantages": torch.randn(N, generator=generator, dtype=torch.float64),
    }
    return {name: tensor.to(dtype) for name, tensor in floats.items()} | {"completion_mask": mask}


def trl_trainer(case: Case, scores: tuple[Tensor, Tensor]) -> Any:
    """A GRPOTrainer with the case's options, whose model answers with these log-probs and entropies."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    options = case.trl
    correction = "rollout" in options
    high = LOSS_TYPES["cispo"]["cispo_cap"] if case.loss_type == "cispo" else options.get("epsilon_high", 0.2)
    args = SimpleNamespace(
        delta=options.get("delta"),
        use_bias_correction_kl=options.get("use_bias_correction_kl", False),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=1,
    )
    accelerator = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda value: value, reduce=lambda value, reduction: value
    )
    trainer = object.__new__(GRPOTrainer)
    attributes = {
        "loss_type": case.loss_type,
        "importance_sampling_level": options.get("importance_sampling_level", "token"),
        "beta": options.get("beta", 0.0),
        "epsilon_low": 0.2,
        "epsilon_high": high,
        "off_policy_mask_threshold": options.get("off_policy_mask_threshold"),
        "entropy_coef": options.get("entropy_coef", 0.0),
        "_entropy_bonus_enabled": "entropy_coef" in options,
        "use_adaptive_entropy": False,
        "top_entropy_quantile": 1.0,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "use_vllm": correction,
        "vllm_importance_sampling_correction": correction,
        "aux_loss_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "args": args,
        "model": SimpleNamespace(training=True),
        "accelerator": accelerator,
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (*scores, None),
    }
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


def trl_loss(case: Case, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and gradient with respect to log-probs and entropies, by TRL."""
    logprobs, entropy = (data[name].clone().requires_grad_() for name in ("logprobs", "entropy"))
    mask = data["completion_mask"].to(logprobs.dtype)
    inputs = {
        "prompt_ids": torch.zeros(N, 1, dtype=torch.long),
        "prompt_mask": torch.ones(N, 1, dtype=mask.dtype),
        "completion_ids": torch.zeros(N, T, dtype=torch.long),
        "completion_mask": mask,
        "advantages": data["advantages"],
        "old_per_token_logps": data["old_logprobs"],
        "ref_per_token_logps": data["ref_logprobs"],
        "num_items_in_batch": mask.sum(),
    }
    if "rollout" in case.trl:
        inputs["importance_sampling_ratio"] = trl_rollout_ratio(data, case.trl["rollout"])
    loss = trl_trainer(case, (logprobs, entropy))._compute_loss(None, inputs)
    return loss.detach(), gradient_of(loss, logprobs, entropy)


def gradient_of(loss: Tensor, *leaves: Tensor) -> Tensor:
    """(number of leaves, N, T)"""
    return torch.stack(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def trl_rollout_ratio(data: dict[str, Tensor], mode: str, cap: float = 1.2) -> Tensor:
    """TRL prepares this outside its loss; the formula is that of its `_generate_and_score_completions`."""
    difference = (data["old_logprobs"] - data["rollout_logprobs"]) * data["completion_mask"]
    if mode.startswith("sequence"):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = difference.exp()
    return ratio.clamp(max=cap) if mode.endswith("truncate") else ratio.masked_fill(ratio > cap, 0.0)


def our_loss(case: Case, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Loss and gradient with respect to log-probs and entropies, by grpo_lit."""
    config = LossConfig(**case.ours)
    logprobs, entropy = (data[name].clone().requires_grad_() for name in ("logprobs", "entropy"))
    mask = data["completion_mask"]
    weights = config.token_weights(mask, GROUP_IDS, max_completion_length=MAX_COMPLETION_LENGTH)
    loss = grpo_loss(
        logprobs,
        data["old_logprobs"],
        data["advantages"],
        weights,
        mask,
        ref_logprobs=data["ref_logprobs"],
        entropy=entropy,
        rollout_logprobs=data["rollout_logprobs"] if config.rollout_correction != "none" else None,
        config=config,
    ).loss
    return loss.detach(), gradient_of(loss, logprobs, entropy)


def compare_advantages() -> list[tuple[str, float]]:
    """Largest differences of advantages; the formulas are those around TRL's own `nanstd`."""
    from trl.trainer.utils import nanstd

    rewards = torch.rand(N, generator=torch.Generator().manual_seed(1))
    rewards[2] = float("nan")
    grouped = rewards.view(2, 4)
    centred = (grouped - grouped.nanmean(dim=1, keepdim=True)).flatten()
    spreads = {
        "group": nanstd(grouped, dim=1).repeat_interleave(4) + 1e-4,
        "batch": nanstd(rewards) + 1e-4,
        "none": torch.ones(()),
    }
    lines = []
    for scale, spread in spreads.items():
        expected = (centred / spread).nan_to_num(0.0)
        config = LossConfig(advantage_scale=scale, advantage_std="sample")  # type: ignore[arg-type]
        got = config.group_advantages(rewards, GROUP_IDS)
        lines.append((f"scale {scale}", float((got - expected).abs().max())))
    two = torch.rand(N, 2, generator=torch.Generator().manual_seed(2))
    by_function = two.view(2, 4, 2)
    scaled = (by_function - by_function.mean(dim=1, keepdim=True)) / (nanstd(by_function, dim=1, keepdim=True) + 1e-4)
    total = (scaled.view(N, 2) * torch.tensor([1.0, 0.5])).sum(dim=1)
    expected = (total - total.mean()) / (nanstd(total) + 1e-4)
    got = multi_reward_advantages(two, GROUP_IDS, torch.tensor([1.0, 0.5]), correction=1)
    lines.append(("normalize_then_sum", float((got - expected).abs().max())))
    return lines


def main() -> int:
    """Prints the table; 0 if every line is equal or marked."""
    try:
        import trl
    except ImportError:
        print("TRL can't be imported; see the head of this file")
        return 0
    print(f"TRL {trl.__version__}, torch {torch.__version__}, {N} rows of up to {T} tokens")
    print(f"{'':30}{'float32':>27}{'float64':>25}")
    print(f"{'case':30}{'loss':>11}{'|d loss|':>10}{'|d grad|':>10}{'|d loss|':>11}{'|d grad|':>10}")
    failed = 0
    seen: dict[float, str] = {}
    for case in cases():
        differences = []
        for dtype in (torch.float32, torch.float64):
            data = tensors(dtype, case.masked_row)
            (theirs, their_gradient), (loss, gradient) = trl_loss(case, data), our_loss(case, data)
            assert float(their_gradient.abs().max()) > 1e-3
            differences += [float((loss - theirs).abs()), float((gradient - their_gradient).abs().max())]
        key = float(loss) if case.name.split()[0] not in EQUAL_TYPES else 0.0
        if key and key in seen:
            print(f"{case.name!r} and {seen[key]!r} give the same loss: an option was not exercised")
            failed += 1
        seen[key] = case.name
        equal = max(differences) <= TOLERANCE
        failed += not (equal or case.choice)
        verdict = "" if equal else f"  CHOICE: {case.choice}" if case.choice else "  DIFFERENT"
        figures = "".join(f"{value:10.1e}" for value in differences[:2])
        exact = "".join(f"{value:{11 - index}.1e}" for index, value in enumerate(differences[2:]))
        print(f"{case.name:30}{float(loss):11.6f}{figures}{exact}{verdict}")
    for name, difference in compare_advantages():
        failed += difference > TOLERANCE
        print(f"{'advantages, ' + name:38}{difference:10.1e}{'  DIFFERENT' if difference > TOLERANCE else ''}")
    data = tensors(torch.float64, None)
    for mode in ("token_truncate", "sequence_mask"):
        ours = rollout_weights(data["old_logprobs"], data["rollout_logprobs"], data["completion_mask"], mode, 1.2)
        mask = data["completion_mask"]
        difference = float(((ours - trl_rollout_ratio(data, mode)) * mask).abs().max())
        failed += difference > TOLERANCE
        print(f"{'rollout weights, ' + mode:38}{difference:10.1e}")
    print(f"{failed} unexplained")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
