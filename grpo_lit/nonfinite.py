"""Steps whose loss or gradient is not finite: skipped, kept on disk, counted, and soon the end of the run."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_lit.errors import SystemFault
from grpo_lit.files import writing
from grpo_lit.step import TrainingBatch

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule

_log = logging.getLogger(__name__)


class NonFiniteGuard:
    """Decides whether an optimizer step may be taken.

    Args:
        limit: skipped steps in a row after which the run stops.

    Attributes:
        skipped: optimizer steps skipped since the start of the run.
        in_a_row: how many of them just now, without a good one between.
    """

    def __init__(self, limit: int = 3) -> None:
        self.limit = limit
        self.skipped = 0
        self.in_a_row = 0

    def check(self, module: GRPOModule, loss: float, grad_norm: float, training: TrainingBatch) -> bool:
        """True where both figures are finite. They are the same on all ranks, so all ranks decide alike.

        Raises:
            SystemFault: this was the last of ``limit`` bad steps in a row.
        """
        if math.isfinite(loss) and math.isfinite(grad_norm):
            self.in_a_row = 0
            return True
        self.skipped += 1
        self.in_a_row += 1
        path = self._keep(module, training)
        _log.warning("loss %s, gradient norm %s: optimizer step skipped, batch kept in %s", loss, grad_norm, path)
        if self.in_a_row >= self.limit:
            raise SystemFault(
                f"{self.in_a_row} optimizer steps in a row had a loss or gradient that is not finite; the batches are "
                f"in {path.parent}. Lower the learning rate, or use model.policy.dtype=fp32"
            )
        return False

    def check_weights(self, parameters: Sequence[Tensor], rollout_step: int) -> None:
        """Refuse to go on from weights that are not finite: saved, they would take the last good checkpoint's place.

        Raises:
            SystemFault: a weight is NaN or infinite.
        """
        if not torch.stack([parameter.detach().isfinite().all() for parameter in parameters]).all():
            raise SystemFault(
                f"the trained weights are no longer finite in rollout step {rollout_step + 1}; that step is not saved. "
                "Resume with --ckpt_path last; where it happens again, lower the learning rate"
            )

    def _keep(self, module: GRPOModule, training: TrainingBatch) -> Path:
        """Write the batch; the file holds plain tensors only."""
        folder = Path(module.trainer.default_root_dir) / "nonfinite"
        path = folder / f"rollout_step_{module.rollout_step:06d}_rank_{module.global_rank}_{self.skipped}.pt"
        rollout = training.rollout
        tensors = {
            "prompt_ids": rollout.prompt_ids,
            "prompt_mask": rollout.prompt_mask,
            "completion_ids": rollout.completion_ids,
            "completion_mask": rollout.completion_mask,
            "group_ids": rollout.group_ids,
            "logprobs": rollout.logprobs,
            "rewards": training.rewards,
            "advantages": training.advantages,
            "weights": training.weights,
        }
        buffer = io.BytesIO()
        torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, buffer)
        with writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(buffer.getbuffer())
        return path

    def state_dict(self) -> dict[str, int]:
        """Counters, for the checkpoint."""
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the counters."""
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]
