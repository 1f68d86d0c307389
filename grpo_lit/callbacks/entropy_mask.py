"""Train on the tokens where the policy is uncertain, and skip the work for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from grpo_lit.errors import UserError
from grpo_lit.kernels.entropy_mask import entropy_mask, keep_row_weight
from grpo_lit.phases import PhaseListener

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule
    from grpo_lit.step import TrainingBatch


class EntropyMask(PhaseListener, Callback):
    """Keeps the share of tokens with the highest entropy over the global batch (the 80/20 rule, 2506.01939).

    The entropies are those of the policy before the first pass, at the sampling temperature, over all ranks. The other
    tokens leave the loss altogether: no policy term, no KL, no entropy bonus, no gradient, and they are not counted in
    the metrics of the loss. They skip the output layer, and what comes after a row's last kept token is not even run
    through the model. What that saves is paid for with one scoring pass a step.

    Logs ``train/entropy_mask_kept`` (share of tokens kept) and ``train/entropy_mask_threshold`` (smallest entropy
    kept without the minimum's help, in nats).

    Args:
        keep: share of the counted tokens to keep, in (0, 1].
        min_tokens: a row with fewer kept tokens keeps its own most uncertain ones, up to this many.
        row_weight: ``preserve`` scales a row's kept tokens up, so that each row weighs what it did; ``drop`` leaves
            their weights as they are, so that the loss is divided by all tokens, as in the paper.

    Raises:
        UserError: a value out of range, or a loss whose terms join the tokens of a row.
    """

    needs_entropy = True

    def __init__(
        self, keep: float = 0.2, min_tokens: int = 0, row_weight: Literal["preserve", "drop"] = "preserve"
    ) -> None:
        if not 0 < keep <= 1:
            raise UserError("EntropyMask.keep", keep, "a share in (0, 1]")
        if min_tokens < 0:
            raise UserError("EntropyMask.min_tokens", min_tokens, "0 or more tokens")
        if row_weight not in ("preserve", "drop"):
            raise UserError("EntropyMask.row_weight", row_weight, "preserve | drop")
        self.keep, self.min_tokens, self.row_weight = keep, min_tokens, row_weight
        self._metrics: dict[str, float] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse losses in which a dropped token would still act through its row."""
        config = cast("GRPOModule", pl_module).loss_config
        reason = "with EntropyMask: a ratio over a whole row would let dropped tokens act"
        if config.ratio != "token" or config.objective in ("gmpo", "vespo"):
            accepted = f"ratio=token and an objective per token {reason}"
            raise UserError("model.loss.ratio", f"{config.ratio}, objective {config.objective}", accepted)
        if config.rollout_correction.startswith("sequence"):
            raise UserError("model.loss.rollout_correction", config.rollout_correction, f"none | token_* {reason}")
        if config.off_policy_threshold is not None:
            raise UserError("model.loss.off_policy_threshold", config.off_policy_threshold, f"null {reason}")

    @override
    def on_scored(
        self, trainer: Trainer, pl_module: LightningModule, training: TrainingBatch, entropy: Tensor
    ) -> TrainingBatch:
        """The batch with fewer tokens; see the class."""
        counted = training.loss_mask
        reduce: Callable[[Tensor], object] | None = dist.all_reduce if trainer.world_size > 1 else None
        kept = entropy_mask(entropy, counted, keep=self.keep, min_tokens=self.min_tokens, all_reduce=reduce)
        self._metrics = self._describe(entropy, counted, kept, reduce)
        preserve = self.row_weight == "preserve"
        weights = keep_row_weight(training.weights, kept) if preserve else torch.where(kept, training.weights, 0)
        return replace(training, loss_mask=kept, weights=weights)

    def _describe(
        self, entropy: Tensor, counted: Tensor, kept: Tensor, reduce: Callable[[Tensor], object] | None
    ) -> dict[str, float]:
        totals = torch.stack([kept.sum(), counted.sum()])
        if reduce is not None:
            reduce(totals)
        share, threshold = entropy_mask(entropy, counted, keep=self.keep, all_reduce=reduce), entropy.new_full((), -1.0)
        if bool(share.any()):
            threshold = entropy[share].min()
        if reduce is not None:  # a rank may hold none of the kept tokens
            threshold = torch.where(threshold < 0, torch.full_like(threshold, torch.inf), threshold)
            dist.all_reduce(threshold, op=dist.ReduceOp.MIN)
        kept_tokens, all_tokens = totals.tolist()
        return {
            "train/entropy_mask_kept": kept_tokens / max(all_tokens, 1),
            "train/entropy_mask_threshold": max(float(threshold), 0.0),
        }

    @override
    def step_metrics(self) -> dict[str, float]:
        """Share kept and threshold of this step."""
        return dict(self._metrics)
