"""The trained weights in a layout that other tools read, at the end of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from grpo_lit.lora import save_adapter

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule


class AdapterExport(Callback):
    """Writes ``adapter/`` (PEFT layout) when training ends, or ``model/`` after full fine-tuning.

    Also when a complete run is resumed, which trains no more: it may have died between checkpoint and export.
    """

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the final weights on rank 0."""
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        module, root = cast("GRPOModule", pl_module), Path(trainer.default_root_dir)
        policy = module.live_policy
        if module.lora_config is not None:
            save_adapter(policy.model, root / "adapter", base_model=policy.source.spec)
            return
        from grpo_lit.export import save_model

        save_model(policy, module.encoder.tokenizer, root / "model")
