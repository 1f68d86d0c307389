"""The exact probability of the right answer, for tasks with one right text per prompt."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from grpo_lit.rollout.base import left_pad

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule


class TargetProbability(Callback):
    """Adds ``val/target_probability`` to every validation: the mean probability of the text in column ``answer``.

    It is computed from the policy's log-probs at temperature 1, not sampled, so it shows small changes at once.
    """

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score the answers of all validation prompts; every rank computes the same."""
        module = cast("GRPOModule", pl_module)
        batches: Iterable[Any] = trainer.val_dataloaders or []
        values = [value for batch in batches for value in target_probabilities(module, batch)]
        if values:
            module.validation_metrics["val/target_probability"] = sum(values) / len(values)


def target_probabilities(module: GRPOModule, batch: Any) -> list[float]:
    """Probability of each prompt's answer in a ``PromptBatch``, the product over its tokens."""
    policy, tokenizer = module.live_policy, module.encoder.tokenizer
    pad = int(tokenizer.pad_token_id)
    answers = [tokenizer(answer, add_special_tokens=False).input_ids for answer in batch.columns["answer"]]
    prompt_ids, prompt_mask = left_pad(batch.prompt_ids, pad)
    flipped_ids, flipped_mask = left_pad([ids[::-1] for ids in answers], pad)
    with torch.no_grad():
        scores = policy.score(
            prompt_ids.to(policy.device),
            prompt_mask.to(policy.device),
            flipped_ids.flip(1).to(policy.device),
            flipped_mask.flip(1).to(policy.device),
        )
    return [float(value) for value in scores.logprobs.double().sum(dim=1).exp()]
