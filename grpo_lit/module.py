"""`GRPOModule`: the training loop of GRPO as a LightningModule with manual optimization.

One ``training_step`` is one rollout step: sample, reward, weigh, then ``ppo_passes`` optimizer steps over the same
rows. The maths is in `grpo_lit.loss`, the data of a step in `grpo_lit.step`; this file only connects them.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics import MeanMetric

from grpo_lit import checkpoint as ckpt
from grpo_lit.errors import UserError
from grpo_lit.lora import LoRAConfig, adapters_off
from grpo_lit.loss import (
    LossConfig,
    LossOutput,
    TokenSelection,
    grpo_loss,
    merge_totals,
    select_tokens,
    totals_to_metrics,
)
from grpo_lit.model_source import resolve_model_source
from grpo_lit.nonfinite import NonFiniteGuard
from grpo_lit.optim import LRScheduleConfig, build_scheduler
from grpo_lit.phases import PhaseRecorder
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.prompts import PromptEncoder, load_tokenizer
from grpo_lit.rollout import RolloutConfig, RolloutEngine, SamplingConfig, build_engine, row_keys
from grpo_lit.sampling_step import StepRows, decode, judge, sample_rows
from grpo_lit.step import TrainingBatch, make_training_batch, rollout_metrics
from grpo_lit.world import WorldView


@dataclass
class ValidationConfig:
    """How held-out prompts are answered and judged."""

    sampling: SamplingConfig = field(default_factory=lambda: SamplingConfig(temperature=0.0))
    """Temperature 0 is greedy; otherwise one sampled answer per prompt and sample."""
    samples_per_prompt: int = 1
    """Answers per prompt; the accuracy is the mean over all."""

    def __post_init__(self) -> None:
        self.sampling.validate("model.validation.sampling")
        if self.samples_per_prompt < 1:
            raise UserError("model.validation.samples_per_prompt", self.samples_per_prompt, "at least 1")


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0)


class GRPOModule(LightningModule):
    """Trains a causal language model with Group Relative Policy Optimization (2402.03300).

    Args:
        policy: the model and its number format.
        lora: adapters over the frozen base; null trains every weight.
        rollout: completions per prompt, sampling, engine.
        loss: objective, reduction and advantages.
        rewards: reward functions by name or import path; their weighted sum is the reward. The first one also
            judges validation.
        reward_weights: weight of each reward function; all 1 by default.
        length_penalty: subtracted from the reward for each token of the completion.
        overlong_cache: tokens before the length limit over which a penalty grows to 1 (DAPO); null is off.
        ppo_passes: optimizer steps per rollout (the mu of the GRPO paper).
        micro_batch_size: rows per forward and backward: a memory knob, the gradient does not depend on it.
        optimizer: class and arguments of the optimizer.
        lr_schedule: how the learning rate moves.
        max_grad_norm: gradients are scaled down to this norm; null is off.
        validation: how held-out prompts are answered.
        log_completions: completions per step shown in the text table of the logger.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        lora: LoRAConfig | None = LoRAConfig(),  # noqa: B008
        rollout: RolloutConfig = RolloutConfig(),  # noqa: B008
        loss: LossConfig = LossConfig(),  # noqa: B008
        rewards: list[str] = ["math_accuracy"],  # noqa: B006
        reward_weights: list[float] | None = None,
        length_penalty: float = 0.0,
        overlong_cache: int | None = None,
        ppo_passes: int = 1,
        micro_batch_size: int = 8,
        optimizer: OptimizerCallable = _adamw,
        lr_schedule: LRScheduleConfig = LRScheduleConfig(),  # noqa: B008
        max_grad_norm: float | None = 1.0,
        validation: ValidationConfig = ValidationConfig(),  # noqa: B008
        log_completions: int = 8,
    ) -> None:
        super().__init__()
        from grpo_lit.rewards import resolve_reward

        if ppo_passes < 1:
            raise UserError("model.ppo_passes", ppo_passes, "at least 1 optimizer step per rollout")
        if micro_batch_size < 1:
            raise UserError("model.micro_batch_size", micro_batch_size, "at least 1 row")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UserError("model.max_grad_norm", max_grad_norm, "a number above 0, or null")
        if not rewards:
            raise UserError("model.rewards", rewards, "at least one reward function")
        if reward_weights is not None and len(reward_weights) != len(rewards):
            raise UserError("model.reward_weights", reward_weights, f"one weight for each of {len(rewards)} rewards")
        if reward_weights is not None and not all(map(math.isfinite, reward_weights)):
            raise UserError("model.reward_weights", reward_weights, "finite numbers")
        if not 0 <= length_penalty < math.inf:
            raise UserError("model.length_penalty", length_penalty, "a finite number >= 0")
        limit = rollout.sampling.max_completion_length
        if overlong_cache is not None and not 1 <= overlong_cache <= limit:
            raise UserError("model.overlong_cache", overlong_cache, f"from 1 to max_completion_length={limit} tokens")
        if policy.quantization and lora is None:
            raise UserError("model.lora", None, "a LoRA section: 4-bit weights can't be trained themselves")
        self.automatic_optimization = False
        self.strict_loading = False  # the frozen base is not in a checkpoint; grpo_lit.checkpoint checks the rest
        self.policy_config, self.lora_config, self.rollout_config, self.loss_config = policy, lora, rollout, loss
        self.reward_functions = [resolve_reward(name) for name in rewards]
        self.reward_names = list(rewards)
        self.reward_weights = reward_weights
        self.length_penalty, self.overlong_cache = length_penalty, overlong_cache
        self.ppo_passes, self.micro_batch_size, self.max_grad_norm = ppo_passes, micro_batch_size, max_grad_norm
        self.optimizer_callable, self.lr_schedule = optimizer, lr_schedule
        self.validation_config = validation
        self.log_completions = log_completions
        self.policy: Policy | None = None
        self.rollout_step = 0
        self.guard = NonFiniteGuard()
        self.phase = PhaseRecorder(self)
        self.step_metrics: dict[str, float] = {}
        self.step_rows: StepRows | None = None
        self.validation_metrics: dict[str, float] = {}
        self._encoder: PromptEncoder | None = None
        self._reference: tuple[Policy, ...] = ()  # in a tuple, so that it is no submodule
        self._val_totals: dict[str, MeanMetric] = {}

    # ---- set-up -------------------------------------------------------------------------------------------------

    @property
    def encoder(self) -> PromptEncoder:
        """Tokenizer and chat template of the policy; loaded without the model."""
        if self._encoder is None:
            spec, argument = self.policy_config.path, "model.policy.path"
            if self.policy_config.tokenizer is not None:
                spec, argument = self.policy_config.tokenizer, "model.policy.tokenizer"
            source = resolve_model_source(spec, argument=argument)
            self._encoder = PromptEncoder(load_tokenizer(source, argument=argument))
        return self._encoder

    @property
    def seed(self) -> int:
        """Seed of the run, as ``seed_everything`` set it."""
        return int(os.environ.get("PL_GLOBAL_SEED", 42))

    @property
    def world(self) -> WorldView:
        """This process among all."""
        return WorldView(self.global_rank, self.trainer.world_size)

    def setup(self, stage: str) -> None:
        """Check what only the trainer knows; Lightning calls this before `configure_model`."""
        del stage
        if self.trainer.precision != "32-true":
            raise UserError("trainer.precision", self.trainer.precision, "32-true: model.policy.dtype sets the format")

    def configure_model(self) -> None:
        """Load the model onto this rank's device."""
        if self.policy is not None:
            return
        if self.policy_config.cpu_threads is not None:
            torch.set_num_threads(self.policy_config.cpu_threads)
        device = self.trainer.strategy.root_device
        self.policy = load_policy(self.policy_config, self.lora_config, device=device, seed=self.seed)
        if self.loss_config.needs_reference and self.lora_config is None:
            frozen = copy.deepcopy(self.policy)
            self._reference = (frozen.requires_grad_(False),)
        self.engine: RolloutEngine = build_engine(self.rollout_config, self.policy, self.encoder)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """The configured optimizer over the trainable weights, with its schedule."""
        optimizer = self.optimizer_callable([parameter for _, parameter in self.live_policy.trainable_parameters()])
        scheduler = build_scheduler(optimizer, self.lr_schedule, self.total_optimizer_steps())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def total_optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: ``trainer.max_steps`` or those of ``trainer.max_epochs``, the fewer."""
        trainer = self.trainer
        limits = [trainer.max_steps] if trainer.max_steps > 0 else []
        if trainer.max_epochs is not None and trainer.max_epochs > 0:
            trainer.fit_loop.setup_data()  # as Lightning's own estimated_stepping_batches does
            limits.append(int(trainer.num_training_batches) * trainer.max_epochs * self.ppo_passes)
        return min(limits, default=1)

    @property
    def live_policy(self) -> Policy:
        """The loaded policy."""
        assert self.policy is not None, "configure_model has not run"
        return self.policy

    # ---- training -----------------------------------------------------------------------------------------------

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Nothing to move: prompts are text and token lists until an engine pads them."""
        del device, dataloader_idx
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One rollout and ``ppo_passes`` optimizer steps on it."""
        del batch_idx
        self.phase.reset()
        rows = sample_rows(self, batch)
        config = self.loss_config
        training = make_training_batch(
            rows.rollout, rows.rewards, rows.everyone, config, self.rollout_config.sampling.max_completion_length
        )
        metrics = {
            f"rollout/{name}": value
            for name, value in rollout_metrics(rows.everyone, mask_truncated=config.mask_truncated).items()
        }
        metrics |= {f"rollout/{name}": value for name, value in rows.reward_metrics.items()}
        metrics |= self._optimize(training)
        self.rollout_step += 1
        self.step_rows = rows
        self._log_step(metrics, rows)

    def _optimize(self, training: TrainingBatch) -> dict[str, float]:
        """All passes over the rows of a step; metrics of the passes, averaged."""
        chunks = training.micro_batches(self.micro_batch_size)
        references, old, selection = self._score(training, chunks)
        passes: list[dict[str, float]] = []
        for _ in range(self.ppo_passes):
            if 0 < self.trainer.max_steps <= self.trainer.global_step:
                break
            with self.phase("train"):
                totals, old = self._accumulate(training, chunks, old, references, selection)
            with self.phase("optimizer"):
                passes.append(self._step(totals, training))
        return {f"train/{name}": value for name, value in _mean_of_passes(passes).items()}

    def _score(
        self, training: TrainingBatch, chunks: list[Tensor]
    ) -> tuple[list[Tensor] | None, list[Tensor] | None, TokenSelection | None]:
        """What has to be known before the first pass: reference log-probs, and old ones where a rule picks tokens.

        Without such a rule the first pass records its own log-probs as the old ones: then the ratio of that pass is
        exactly 1 and the shapes of both are the same (bf16 log-probs differ between batch shapes).
        """
        config = self.loss_config
        if not config.needs_reference and config.token_rule == "none":
            return None, None, None
        references = old = selection = None
        with self.phase("score"), torch.no_grad():
            if config.needs_reference:
                references = [self._reference_logprobs(training, rows) for rows in chunks]
            if config.token_rule != "none":
                scores = [self._scores(self.live_policy, training, rows) for rows in chunks]
                old = [score.logprobs for score in scores]
                selection = self._select(training, chunks, old, [score.entropy for score in scores])
        return references, old, selection

    def _accumulate(
        self,
        training: TrainingBatch,
        chunks: list[Tensor],
        old: list[Tensor] | None,
        references: list[Tensor] | None,
        selection: TokenSelection | None,
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Forward and backward of every micro-batch; gradients stay local until `_step` reduces them."""
        recorded: list[Tensor] = []
        outputs: list[LossOutput] = []
        with self.world.no_sync(self.trainer):
            for index, rows in enumerate(chunks):
                scores = self._scores(self.live_policy, training, rows)
                recorded.append(scores.logprobs.detach() if old is None else old[index])
                entropy = scores.entropy if self.loss_config.needs_entropy_gradient else scores.entropy.detach()
                width = scores.logprobs.shape[1]
                output = grpo_loss(
                    scores.logprobs,
                    recorded[-1],
                    training.advantages[rows],
                    training.weights[rows, :width],
                    training.loss_mask[rows, :width],
                    ref_logprobs=None if references is None else references[index],
                    entropy=entropy,
                    rollout_logprobs=training.rollout.logprobs[rows, :width],
                    selection=None if selection is None else _cut(selection, rows, width),
                    config=self.loss_config,
                )
                self.manual_backward(output.loss)
                outputs.append(output)
        return merge_totals([output.totals for output in outputs]), recorded

    def _scores(self, policy: Policy, training: TrainingBatch, rows: Tensor) -> Any:
        part = training.rollout.select(rows)
        return policy.score(
            part.prompt_ids,
            part.prompt_mask,
            part.completion_ids,
            part.completion_mask,
            temperature=self.rollout_config.sampling.temperature,
        )

    def _reference_logprobs(self, training: TrainingBatch, rows: Tensor) -> Tensor:
        if self._reference:
            return self._scores(self._reference[0], training, rows).logprobs
        with adapters_off(self.live_policy):
            return self._scores(self.live_policy, training, rows).logprobs

    def _select(
        self, training: TrainingBatch, chunks: list[Tensor], old: list[Tensor], entropy: list[Tensor]
    ) -> TokenSelection:
        shape = training.loss_mask.shape
        logprobs, nats = (training.weights.new_zeros(shape) for _ in range(2))
        for rows, chunk_logprobs, chunk_entropy in zip(chunks, old, entropy, strict=True):
            logprobs[rows, : chunk_logprobs.shape[1]] = chunk_logprobs
            nats[rows, : chunk_entropy.shape[1]] = chunk_entropy
        return select_tokens(logprobs, training.advantages, training.loss_mask, entropy=nats, config=self.loss_config)

    def _step(self, totals: dict[str, Tensor], training: TrainingBatch) -> dict[str, float]:
        """Reduce gradients over ranks, clip, step; a non-finite pass is skipped, kept on disk and counted."""
        optimizer = self.optimizers()
        assert not isinstance(optimizer, list)
        parameters = [parameter for _, parameter in self.live_policy.trainable_parameters()]
        self.world.reduce_gradients(parameters)
        metrics = totals_to_metrics(self.world.merge_totals(totals))
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = float(nn.utils.clip_grad_norm_(parameters, limit)) if metrics else 0.0
        metrics["grad_norm"] = norm
        metrics["lr"] = float(optimizer.param_groups[0]["lr"])
        if self.guard.check(self, metrics.get("loss", 0.0), norm, training):
            optimizer.step()
            scheduler = self.lr_schedulers()
            assert scheduler is not None
            assert not isinstance(scheduler, list)
            scheduler.step()  # type: ignore[call-arg]
            self.world.check_replicas(self.live_policy.trainable_parameters(), self.trainer.global_step)
        optimizer.zero_grad(set_to_none=True)
        return metrics

    def _log_step(self, metrics: dict[str, float], rows: StepRows) -> None:
        seconds = self.phase.seconds
        total = sum(seconds.values())
        tokens = float(rows.everyone.lengths.sum())
        metrics["rollout/logprob_mismatch"] = metrics.pop("train/logprob_mismatch", 0.0)
        metrics["rollout/logprob_mismatch_max"] = metrics.pop("train/logprob_mismatch_max", 0.0)
        metrics |= {f"perf/{phase}_s": value for phase, value in seconds.items()}
        metrics["perf/step_s"] = total
        metrics["perf/tokens_per_sec"] = tokens / total if total else 0.0
        metrics["perf/rollout_tokens_per_sec"] = tokens / seconds["rollout"] if seconds.get("rollout") else 0.0
        metrics |= {f"vram/peak_{phase}_mib": value for phase, value in self.phase.peak_mib.items()}
        metrics["train/nonfinite_skips"] = float(self.guard.skipped)
        metrics["rollout_step"] = self.rollout_step
        metrics["optimizer_step"] = self.trainer.global_step
        self.step_metrics = metrics
        self.log_dict({name: float(value) for name, value in metrics.items()}, logger=False, batch_size=1)

    # ---- validation ---------------------------------------------------------------------------------------------

    def on_validation_epoch_start(self) -> None:
        """Start new averages."""
        names = ("accuracy", "completion_length", "truncated_fraction")
        self._val_totals = {name: MeanMetric().to(self.device) for name in names}
        self.phase.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Answer a batch of held-out prompts and judge the answers with the first reward function."""
        del batch_idx
        with self.phase("validate"):
            self._validate(batch)

    def _validate(self, batch: Any) -> None:
        config = self.validation_config
        mine = self.world.share(len(batch))
        if not mine:
            return
        counts = [config.samples_per_prompt if i in mine else 0 for i in range(len(batch))]
        repeated = [batch.indices[i] for i in mine for _ in range(config.samples_per_prompt)]
        samples = list(range(config.samples_per_prompt)) * len(mine)
        keys = row_keys(self.seed, 0, repeated, samples, "val")
        rollout = self.engine.generate(batch.prompt_ids, counts, keys, config.sampling)
        judged = judge(self, batch, rollout, decode(self, batch, rollout), self.reward_functions[:1], None)
        right = judged.rewards[~judged.rewards.isnan()] > 0.5
        for name, values in (
            ("accuracy", right.float()),
            ("completion_length", rollout.lengths.float()),
            ("truncated_fraction", rollout.truncated.float()),
        ):
            if len(values):
                self._val_totals[name].update(values.to(self.device))

    def on_validation_epoch_end(self) -> None:
        """Averages over all held-out prompts and ranks."""
        self.validation_metrics = {f"val/{name}": float(total.compute()) for name, total in self._val_totals.items()}
        self.validation_metrics["perf/validate_s"] = self.phase.seconds.get("validate", 0.0)
        self.log_dict(self.validation_metrics, logger=False, batch_size=1)

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Trainable weights only: the frozen base is where it came from."""
        del args, kwargs
        return {f"policy.{name}": value.detach() for name, value in self.live_policy.trainable_parameters()}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep only trainable weights, and add what an exact resume needs."""
        ckpt.pack(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Check that the checkpoint is of this model, then restore counters and random number generators."""
        ckpt.unpack(self, checkpoint)


def _cut(selection: TokenSelection, rows: Tensor, width: int) -> TokenSelection:
    part = selection.rows(rows)
    return TokenSelection(part.policy_mask[:, :width], part.old_kl_coef[:, :width])


def _mean_of_passes(passes: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over the passes; the largest where the name says so."""
    names = dict.fromkeys(name for metrics in passes for name in metrics)
    reduce: Callable[[list[float], str], float] = lambda values, name: (  # noqa: E731
        max(values) if name.endswith("_max") else sum(values) / len(values)
    )
    return {name: reduce([metrics[name] for metrics in passes if name in metrics], name) for name in names}
