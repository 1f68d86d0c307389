"""Micro-batches as large as memory allows, counted in tokens."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from grpo_lit.callbacks._backoff import Backoff
from grpo_lit.errors import UserError
from grpo_lit.oom import PeerOutOfMemory, mebibytes, memory_limit
from grpo_lit.passes import rehearse
from grpo_lit.phases import Phase, PhaseListener
from grpo_lit.step import worst_case_batch

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule

_log = logging.getLogger(__name__)


class AdaptiveMicroBatch(PhaseListener, Callback):
    """Packs rows by length into micro-batches of at most as many tokens as memory holds.

    What a pass takes over what is allocated before it, divided by the tokens of its largest micro-batch (padding
    included), gives the bytes of a token; what is left under the limit, divided by them, the tokens that fit. So a
    micro-batch of short rows may hold many and one of long rows few, and ``model.micro_batch_size`` is their ceiling.
    The gradient does not depend on any of it.

    Before the first step the worst case is tried, where a data module knows it: rows of the longest prompt and a full
    completion, forward and backward, on weights and random number generators that are left as they were. What does not
    fit is halved there and not in the middle of the run. After an out-of-memory error (with `OOMReplay`) the size that
    failed is approached again slowly, and the batch sizes of scoring and rollout are led back likewise. Ranks adapt
    each on its own. The sizes go into the checkpoint.

    On a CPU, where no peak is known, only the way back after errors acts.

    Logs ``micro_batch/tokens`` (most tokens allowed), ``micro_batch/rows`` (rows of the largest micro-batch),
    ``micro_batch/largest_tokens`` (its tokens) and ``micro_batch/mib_per_1k_tokens``.

    Args:
        target: share of the memory limit that a pass may come up to.
        max_rows: most rows in a micro-batch; null takes model.micro_batch_size.
        cool_down: rollout steps without an error before a size grows back.
        growth: factor by which it grows.
        dry_run: try the worst case before the first step.

    Raises:
        UserError: a value out of range.
    """

    def __init__(
        self,
        target: float = 0.92,
        max_rows: int | None = None,
        cool_down: int = 8,
        growth: float = 1.25,
        dry_run: bool = True,
    ) -> None:
        if not 0 < target <= 1:
            raise UserError("AdaptiveMicroBatch.target", target, "a share in (0, 1]")
        if max_rows is not None and max_rows < 1:
            raise UserError("AdaptiveMicroBatch.max_rows", max_rows, "at least 1, or null")
        if cool_down < 1:
            raise UserError("AdaptiveMicroBatch.cool_down", cool_down, "at least 1 rollout step")
        if not growth > 1:
            raise UserError("AdaptiveMicroBatch.growth", growth, "a factor above 1")
        self.target, self.max_rows, self.cool_down, self.dry_run = target, max_rows, cool_down, dry_run
        self.bytes_per_token: float | None = None
        self._measured_tokens = 0
        self._base = 0
        self._room: int | None = None
        self._tokens, self._score_rows, self._rollout_rows = (Backoff(cool_down, growth) for _ in range(3))
        self._configured: tuple[int | None, int | None] = (None, None)
        self._ceiling_tokens = 0
        self._failed_this_step = False
        self._largest = (0, 0)

    # ---- start --------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the sizes: those of the checkpoint, or what the worst case says."""
        module = cast("GRPOModule", pl_module)
        self._configured = (module.score_batch_size, module.engine.batch_size)
        if self.max_rows is not None:
            module.micro_batch_size = self.max_rows
        prompt, completion = self._longest(trainer, module)
        config = module.live_policy.model.config
        row = prompt + completion if prompt else int(getattr(config, "max_position_embeddings", None) or 2**20)
        self._ceiling_tokens = module.micro_batch_size * row
        if prompt and self.dry_run and self.measures(module):
            self._rehearse(module, prompt, completion)
        self._apply(module)

    @staticmethod
    def _longest(trainer: Trainer, module: GRPOModule) -> tuple[int, int]:
        """Tokens of the longest prompt, 0 where no data module knows, and of the longest completion."""
        longest: tuple[int, int] = getattr(trainer.datamodule, "longest_prompts", (0, 0))  # type: ignore[attr-defined]
        return longest[0], module.rollout_config.sampling.max_completion_length

    def _rehearse(self, module: GRPOModule, prompt: int, completion: int) -> None:
        """Find by halving what fits of the worst case, and measure it."""
        rows, full = module.micro_batch_size, completion
        while rows >= 1 and completion >= 1:
            batch = worst_case_batch(
                rows, prompt, completion, module.live_policy.model.config.vocab_size, module.device
            )
            tokens = rows * (prompt + completion)
            self._start_measuring(module)
            if rehearse(module, batch):
                self._measure(module, tokens)
                break
            self._tokens.fail(tokens, tokens // 2)
            rows, completion = (rows // 2, completion) if rows > 1 else (1, completion // 2)
        _free(module)
        limit = self._tokens
        limit.wait = self.cool_down  # nothing of the run was lost
        if limit.bound is not None and limit.failed_at is not None and (fitting := self._fitting()) is not None:
            limit.bound = max(limit.bound, min(fitting, int(0.9 * limit.failed_at)))
        if completion < full:
            _log.warning(
                "one row of %d + %d tokens does not fit into %s; at most %d tokens of completion seem to. Longer ones "
                "will end the run: lower model.rollout.sampling.max_completion_length, or set "
                "model.policy.gradient_checkpointing",
                prompt,
                full,
                mebibytes(self._room or 0),
                max((self._fitting() or completion + prompt) - prompt, completion),
            )

    # ---- measuring ----------------------------------------------------------------------------------------------

    def measures(self, module: GRPOModule) -> bool:
        """Whether peaks are known on this device."""
        return module.device.type == "cuda"

    def memory(self, module: GRPOModule) -> tuple[int, int, int]:
        """Bytes allowed, allocated now, and allocated at most since the phase began."""
        device = module.device
        return memory_limit(device), torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)

    def _start_measuring(self, module: GRPOModule) -> None:
        _free(module)
        if module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(module.device)
        limit, self._base, _ = self.memory(module)
        self._room = int(self.target * limit)

    def _measure(self, module: GRPOModule, tokens: int) -> None:
        """Learn from a pass whose largest micro-batch had so many tokens."""
        extra = self.memory(module)[2] - self._base
        if extra <= 0 or tokens < 0.8 * self._measured_tokens:
            return  # fixed costs would weigh too much in a small one
        per_token = extra / tokens
        if self.bytes_per_token is not None:  # a lower figure is believed slowly
            per_token = max(per_token, 0.95 * self.bytes_per_token)
        self.bytes_per_token, self._measured_tokens = per_token, tokens

    @override
    def on_phase_start(self, trainer: Trainer, pl_module: LightningModule, phase: Phase) -> None:
        """Note what is allocated before a pass."""
        module = cast("GRPOModule", pl_module)
        if phase == "train" and self.measures(module):
            limit, self._base, _ = self.memory(module)
            self._room = int(self.target * limit)

    @override
    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, seconds: float) -> None:
        """Learn from a pass."""
        module = cast("GRPOModule", pl_module)
        if phase == "train":
            self._largest = module.phase.largest_load
            if self.measures(module) and self._largest[1]:
                self._measure(module, self._largest[1])

    # ---- sizes --------------------------------------------------------------------------------------------------

    @override
    def on_out_of_memory(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, error: Exception) -> bool:
        """Note what did not fit; whether to replay is for `OOMReplay` to say."""
        module = cast("GRPOModule", pl_module)
        rows, tokens = module.phase.load
        if not isinstance(error, PeerOutOfMemory) and rows > 1:
            self._failed_this_step = True
            if phase == "train":
                self._tokens.fail(tokens, max(tokens // 2, 1))
            elif phase == "score":
                self._score_rows.fail(rows, rows // 2)
            elif phase in ("rollout", "validate"):
                self._rollout_rows.fail(rows, rows // 2)
        return False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Let sizes grow back after a clean step, and set them for the next."""
        module = cast("GRPOModule", pl_module)
        if not self._failed_this_step:
            self._tokens.step(self._ceiling_tokens)
            self._score_rows.step(self._configured[0] or module.micro_batch_size)
            self._rollout_rows.step(self._configured[1])
        self._failed_this_step = False
        self._apply(module)

    def _fitting(self) -> int | None:
        """Tokens that fit by the last measurement."""
        if self.bytes_per_token is None or self._room is None:
            return None
        return max(int((self._room - self._base) / self.bytes_per_token), 1)

    def _most_tokens(self) -> int:
        """Of a micro-batch, padding included."""
        known = (self._ceiling_tokens, self._fitting(), self._tokens.bound)
        return max(min(tokens for tokens in known if tokens is not None), 1)

    def _apply(self, module: GRPOModule) -> None:
        module.micro_batch_tokens = self._most_tokens()
        module.score_batch_size = _smaller(self._score_rows.bound, self._configured[0])
        module.engine.batch_size = _smaller(self._rollout_rows.bound, self._configured[1])

    # ---- records ------------------------------------------------------------------------------------------------

    @override
    def step_metrics(self) -> dict[str, float]:
        """Sizes of the step that ends."""
        metrics = {"micro_batch/rows": float(self._largest[0]), "micro_batch/largest_tokens": float(self._largest[1])}
        metrics["micro_batch/tokens"] = float(self._most_tokens())
        if self.bytes_per_token is not None:
            metrics["micro_batch/mib_per_1k_tokens"] = self.bytes_per_token * 1000 / 2**20
        return metrics

    @override
    def state_dict(self) -> dict[str, Any]:
        """Sizes and what they were learnt from."""
        return {
            "bytes_per_token": self.bytes_per_token,
            "measured_tokens": self._measured_tokens,
            "bounds": [bound.state_dict() for bound in (self._tokens, self._score_rows, self._rollout_rows)],
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.bytes_per_token, self._measured_tokens = state_dict["bytes_per_token"], state_dict["measured_tokens"]
        for bound, state in zip(
            (self._tokens, self._score_rows, self._rollout_rows), state_dict["bounds"], strict=True
        ):
            # What was learnt, not what was configured: a resumed run may be given another patience.
            bound.load_state_dict({**state, "growth": bound.growth, "wait": max(state["wait"], self.cool_down)})


def _smaller(bound: int | None, configured: int | None) -> int | None:
    """The smaller of two sizes; None stands for no limit."""
    return min((size for size in (bound, configured) if size is not None), default=None)


def _free(module: GRPOModule) -> None:
    gc.collect()
    if module.device.type == "cuda":
        torch.cuda.empty_cache()
