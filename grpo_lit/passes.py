"""The second half of a training step: score once, then `ppo_passes` times accumulate, reduce, clip and step.

Every piece of it is an attempt (`PhaseRecorder.attempt`): where memory runs out it is done again, with the same rows
and the same weights, in smaller micro-batches. What an attempt leaves behind is taken back first: partial gradients
are dropped, a broken optimizer step is undone. The sum over micro-batches does not depend on how the rows are split,
so a replay gives the same gradient.

The old log-probs are those that the first pass computed, at the shapes at which it computed them: then its ratio is
exactly 1 (16-bit log-probs differ a little between batch shapes). Where a later pass runs at other shapes, they are
computed anew at those, from the weights that the first pass had.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn

from grpo_lit.checkpoint import rng_state, set_rng_state
from grpo_lit.distributed import FlatGradients, gather_rows, parameter_hash
from grpo_lit.lora import adapters_off
from grpo_lit.loss import TokenSelection, grpo_loss, merge_totals, select_tokens, totals_to_metrics
from grpo_lit.oom import is_out_of_memory, without_frames
from grpo_lit.snapshot import OptimizerSnapshot, Snapshot
from grpo_lit.step import TrainingBatch

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule
    from grpo_lit.policy import Policy, TokenScores


class _Scores(NamedTuple):
    """What is known before the first pass, (N, T) each; None where nothing asks for it."""

    references: Tensor | None
    logprobs: Tensor | None
    entropy: Tensor | None


class Passes:
    """All optimizer steps over the rows of one rollout step.

    Args:
        module: the module; its sizes are read anew before every attempt.
        training: this rank's rows.
    """

    def __init__(self, module: GRPOModule, training: TrainingBatch) -> None:
        self.module = module
        self.training = training
        self.parameters = [parameter for _, parameter in module.live_policy.trainable_parameters()]
        self.old = torch.zeros_like(training.weights)  # (N, T), of the first pass
        self.old_shapes: list[list[int]] = []  # rows of the micro-batches that they were computed in
        self.first_weights: Snapshot | None = None
        self.references: Tensor | None = None
        self.selection: TokenSelection | None = None

    def run(self) -> dict[str, float]:
        """All passes; their metrics, averaged."""
        module = self.module
        self._score()
        metrics: list[dict[str, float]] = []
        for number in range(module.ppo_passes):
            if 0 < module.trainer.max_steps <= module.trainer.global_step:
                break
            with module.phase("train"):
                totals, flat = module.phase.attempt(partial(self._accumulate, number))
            with module.phase("optimizer"):
                metrics.append(self._step(totals, flat))
        return mean_of_passes(metrics)

    # ---- before the passes --------------------------------------------------------------------------------------

    def _score(self) -> None:
        """References, and what callbacks and token rules pick tokens by."""
        module, config = self.module, self.module.loss_config
        filters = [listener for listener in module.phase.listeners if listener.needs_entropy]
        if not (config.needs_reference or config.token_rule != "none" or filters):
            return
        with module.phase("score"):
            scores = module.phase.attempt(lambda: self._score_rows(config.token_rule != "none" or bool(filters)))
            self.references = scores.references
            if scores.entropy is None or scores.logprobs is None:
                return
            for listener in filters:
                self.training = listener.on_scored(module.trainer, module, self.training, scores.entropy)
            if config.token_rule != "none":
                training = self.training
                self.selection = select_tokens(
                    scores.logprobs,
                    training.advantages,
                    training.loss_mask,
                    entropy=scores.entropy,
                    config=config,
                    gather=gather_rows,
                )

    def _score_rows(self, own: bool) -> _Scores:
        module, training = self.module, self.training
        size = module.score_batch_size or module.micro_batch_size
        needs_reference = module.loss_config.needs_reference
        references = torch.zeros_like(self.old) if needs_reference else None
        logprobs, entropy = (torch.zeros_like(self.old) if own else None for _ in range(2))
        with torch.no_grad():
            for rows in training.micro_batches(size, module.micro_batch_tokens):
                if references is not None:
                    found = self._reference_forward(rows).logprobs
                    references[rows, : found.shape[1]] = found
                if logprobs is not None and entropy is not None:
                    scores = self._forward(module.live_policy, rows)
                    logprobs[rows, : scores.logprobs.shape[1]] = scores.logprobs
                    entropy[rows, : scores.entropy.shape[1]] = scores.entropy
        return _Scores(references, logprobs, entropy)

    def _forward(self, policy: Policy, rows: Tensor) -> TokenScores:
        module, training = self.module, self.training
        module.phase.hold(*training.load(rows))
        part = training.part(rows)
        return policy.score(
            part.prompt_ids,
            part.prompt_mask,
            part.completion_ids,
            part.completion_mask,
            temperature=module.rollout_config.sampling.temperature,
            scored=training.loss_mask[rows, : part.completion_ids.shape[1]],
        )

    def _reference_forward(self, rows: Tensor) -> TokenScores:
        if self.module.reference is not None:
            return self._forward(self.module.reference, rows)
        with adapters_off(self.module.live_policy):
            return self._forward(self.module.live_policy, rows)

    def accumulate_alone(self) -> None:
        """One pass without its optimizer step, over made-up references where the loss wants some."""
        if self.module.loss_config.needs_reference:
            self.references = torch.zeros_like(self.old)
        self._accumulate(0)

    # ---- a pass -------------------------------------------------------------------------------------------------

    def _accumulate(self, number: int) -> tuple[dict[str, Tensor], list[FlatGradients]]:
        """Forward and backward of every micro-batch; gradients stay on this rank until `_step` reduces them.

        Args:
            number: of the pass; the first records the old log-probs.
        """
        module, training = self.module, self.training
        for parameter in self.parameters:
            parameter.grad = None  # those of an attempt that broke off
        chunks = training.micro_batches(module.micro_batch_size, module.micro_batch_tokens)
        shapes = [rows.tolist() for rows in chunks]
        if number and shapes != self.old_shapes:
            self._rescore_old(chunks)
        totals: dict[str, Tensor] = {}
        with module.world.no_sync(module.trainer):
            for rows in chunks:
                totals = merge_totals([totals, self._backward(rows, records_old=number == 0)])
        self.old_shapes = shapes
        if number == 0 and module.ppo_passes > 1:
            self.first_weights = Snapshot(self.parameters)
        return _on_host(totals), module.world.flatten_gradients(self.parameters)

    def _backward(self, rows: Tensor, *, records_old: bool) -> dict[str, Tensor]:
        module, training = self.module, self.training
        scores = self._forward(module.live_policy, rows)
        width = scores.logprobs.shape[1]
        if records_old:
            self.old[rows, :width] = scores.logprobs.detach()
        selection = None if self.selection is None else self.selection.rows(rows)
        output = grpo_loss(
            scores.logprobs,
            self.old[rows, :width],
            training.advantages[rows],
            training.weights[rows, :width],
            training.loss_mask[rows, :width],
            ref_logprobs=None if self.references is None else self.references[rows, :width],
            entropy=scores.entropy if module.loss_config.needs_entropy_gradient else scores.entropy.detach(),
            rollout_logprobs=training.rollout.logprobs[rows, :width],
            selection=None if selection is None else TokenSelection(*(part[:, :width] for part in selection)),
            config=module.loss_config,
        )
        module.manual_backward(output.loss)
        return output.totals

    def _rescore_old(self, chunks: Sequence[Tensor]) -> None:
        assert self.first_weights is not None
        self.old_shapes = []
        with self.first_weights.in_place(), torch.no_grad():
            for rows in chunks:
                logprobs = self._forward(self.module.live_policy, rows).logprobs
                self.old[rows, : logprobs.shape[1]] = logprobs

    # ---- an optimizer step --------------------------------------------------------------------------------------

    @property
    def _optimizer(self) -> LightningOptimizer:
        optimizer = self.module.optimizers()
        assert isinstance(optimizer, LightningOptimizer)  # one of them, wrapped so that a step counts as one
        return optimizer

    def _step(self, totals: dict[str, Tensor], flat: list[FlatGradients]) -> dict[str, float]:
        """Reduce gradients over ranks, clip, step; a non-finite pass is skipped, kept on disk and counted."""
        module, parameters = self.module, self.parameters
        with module.phase.with_other_ranks("allreduce"):
            module.world.reduce_gradients(flat)
        flat.clear()  # as large as the gradients, and done with
        metrics = totals_to_metrics(module.world.merge_totals(totals))
        norm = module.phase.attempt(lambda: _gradient_norm(parameters))
        metrics["grad_norm"] = float(norm)
        metrics["lr"] = float(self._optimizer.param_groups[0]["lr"])
        if module.guard.check(module, metrics.get("loss", 0.0), metrics["grad_norm"], self.training):
            self._update(norm)
            module.lr_schedulers().step()  # type: ignore[union-attr]
            if module.world.size > 1:
                digest = module.phase.attempt(lambda: parameter_hash(parameters))
                module.world.check_replicas(digest, module.trainer.global_step, parameters[0].device)
            module.engine.weights_changed()
        self._optimizer.zero_grad(set_to_none=True)
        module.guard.check_weights(parameters, module.rollout_step)
        return metrics

    def _update(self, norm: Tensor) -> None:
        """Clip and step, whole or not at all."""
        module, parameters, optimizer = self.module, self.parameters, self._optimizer
        before: list[OptimizerSnapshot] = []

        def step() -> None:
            if module.phase.replays and not before:
                before.append(OptimizerSnapshot(optimizer.optimizer, parameters))
            if module.max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(parameters, module.max_grad_norm, norm)
            optimizer.step()

        def undo() -> None:
            for snapshot in before:
                snapshot.restore()

        module.phase.attempt(step, undo=undo)


def rehearse(module: GRPOModule, training: TrainingBatch) -> bool:
    """Whether a first pass over these rows, all in one micro-batch, fits into memory; nothing is left of it.

    Weights, optimizer, random number generators and other ranks are not touched.
    """
    sizes = module.micro_batch_size, module.micro_batch_tokens
    random_state = rng_state()
    passes = Passes(module, training)
    module.micro_batch_size, module.micro_batch_tokens = len(training.weights), None
    try:
        passes.accumulate_alone()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        without_frames(error)
        return False
    finally:
        module.micro_batch_size, module.micro_batch_tokens = sizes
        for parameter in passes.parameters:
            parameter.grad = None
        set_rng_state(random_state)
    return True


def _on_host(totals: dict[str, Tensor]) -> dict[str, Tensor]:
    """The pairs on the CPU, in one transfer."""
    return dict(zip(totals, torch.stack(list(totals.values())).cpu(), strict=True)) if totals else {}


def _gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())


def mean_of_passes(passes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the passes; the largest where the name says so."""
    by_name: dict[str, list[float]] = {}
    for metrics in passes:
        for name, value in metrics.items():
            by_name.setdefault(name, []).append(value)
    return {
        name: max(values) if name.endswith("_max") else sum(values) / len(values) for name, values in by_name.items()
    }
