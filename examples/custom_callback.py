"""A callback sees what Lightning's callbacks see, and with PhaseListener the phases of a step too."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from grpo_lit.phases import Phase, PhaseListener


class StopWhenSolved(Callback, PhaseListener):
    """Ends the run once the mean reward of a step reaches `goal`, and says where the time went.

    Args:
        goal: mean reward.
    """

    def __init__(self, goal: float = 0.9) -> None:
        self.goal = goal
        self.seconds: dict[str, float] = {}

    def on_phase_end(self, trainer: Trainer, pl_module: LightningModule, phase: Phase, seconds: float) -> None:
        """Add up the time of each phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Stop after a step that is good enough."""
        if pl_module.step_metrics["rollout/reward_mean"] >= self.goal:  # type: ignore[index, operator]
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the times."""
        print("seconds by phase:", {phase: round(seconds, 1) for phase, seconds in self.seconds.items()})
