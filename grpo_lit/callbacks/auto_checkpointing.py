"""As few recomputed layers as memory allows: ``model.policy.gradient_checkpointing: auto``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from grpo_lit.errors import UserError
from grpo_lit.memory.checkpointing import LayerCheckpointing
from grpo_lit.memory.measure import Meter
from grpo_lit.memory.plan import kept_by_layer
from grpo_lit.memory.settings import formats_of
from grpo_lit.memory.sizes import ModelSizes
from grpo_lit.phases import Phase, PhaseListener

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule


class AutoCheckpointing(PhaseListener, Callback):
    """Changes how many layers are recomputed in the backward pass, by the measured peak of the train phase.

    A run starts with all layers recomputed. Every few steps the largest peak since is set against the memory there is:
    below ``lower`` so many layers are let off as fit halfway up to ``upper``, above ``upper`` a quarter of all is taken
    back. After an out-of-memory error all are recomputed again, and for twice the usual time. Gradients do not depend
    on it.

    Args:
        lower: share of memory below which layers are let off.
        upper: share above which they are taken back.
        every_n_rollout_steps: steps between decisions.
    """

    def __init__(self, lower: float = 0.72, upper: float = 0.82, every_n_rollout_steps: int = 10) -> None:
        if not 0 <= lower < upper <= 1:
            raise UserError("lower, upper", (lower, upper), "shares of memory, 0 <= lower < upper <= 1")
        if every_n_rollout_steps < 1:
            raise UserError("every_n_rollout_steps", every_n_rollout_steps, "at least 1")
        self.lower, self.upper, self.every = lower, upper, every_n_rollout_steps
        self._peak = 0
        self._wait = every_n_rollout_steps
        self._count: int | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the number of a checkpoint."""
        layers = _layers(pl_module)
        if layers is not None and self._count is not None:
            layers.count = min(self._count, layers.total)
        self._count = None if layers is None else layers.count

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, seconds: float) -> None:
        """Keep the largest peak of training."""
        if phase == "train":
            self._peak = max(self._peak, Meter(trainer.strategy.root_device).read().peak_allocated)

    def on_out_of_memory(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, error: Exception) -> bool:
        """Recompute every layer, and try again if that is less than before."""
        layers = _layers(pl_module)
        if layers is None or phase != "train":
            return False
        self._wait = 2 * self.every
        grew = layers.count < layers.total
        self._count = layers.count = layers.total
        return grew

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Decide, when it is time."""
        self._wait -= 1
        layers = _layers(pl_module)
        if self._wait > 0 or layers is None:
            return
        module: GRPOModule = pl_module  # type: ignore[assignment]
        capacity = Meter(trainer.strategy.root_device).capacity()
        count = self.decide(layers.count, layers.total, self._peak / capacity, _share_of_layer(module, capacity))
        self._count = layers.count = count
        self._peak, self._wait = 0, self.every

    def decide(self, count: int, total: int, share: float, layer_share: float) -> int:
        """Layers to recompute from now on.

        Args:
            count: layers recomputed now.
            total: layers of the model.
            share: of memory, at the peak.
            layer_share: of memory, that a layer's activations take where they are kept.

        >>> AutoCheckpointing().decide(28, 28, 0.5, 0.02), AutoCheckpointing().decide(20, 28, 0.9, 0.02)
        (15, 27)
        """
        if share > self.upper:
            return min(total, count + max(1, total // 4))
        if share < self.lower:
            room = (self.lower + self.upper) / 2 - share
            return max(0, count - max(0, int(room / max(layer_share, 1e-9)))) if layer_share < room else count
        return count

    def step_metrics(self) -> dict[str, float]:
        """The number in use."""
        return {} if self._count is None else {"vram/checkpointed_layers": float(self._count)}

    @override
    def state_dict(self) -> dict[str, Any]:
        """The number, for the checkpoint."""
        return {"count": self._count}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember the number until the model is there."""
        self._count = state_dict["count"]


def _layers(pl_module: LightningModule) -> LayerCheckpointing | None:
    module: GRPOModule = pl_module  # type: ignore[assignment]
    return None if module.policy is None else module.policy.checkpointing


def _share_of_layer(module: GRPOModule, capacity: int) -> float:
    """What keeping one layer's activations costs for the largest micro-batch of the last step."""
    assert module.step_rows is not None
    rollout = module.step_rows.rollout
    rows = min(module.micro_batch_size, rollout.num_rows)
    tokens = rows * int((rollout.prompt_mask.sum(1) + rollout.lengths).max())
    sizes = ModelSizes.of(module.live_policy.model.config)
    formats = formats_of(module, on_cuda=module.device.type == "cuda")
    return kept_by_layer(sizes, formats, tokens) / capacity
