"""`GRPOModule`: the training loop of GRPO as a LightningModule with manual optimization.

One ``training_step`` is one rollout step: sample, reward, weigh, then ``ppo_passes`` optimizer steps over the same
rows. The maths is in `grpo_lit.loss`, the two halves of a step in `grpo_lit.sampling_step` and `grpo_lit.passes`; this
file only connects them.
"""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from torchmetrics import MeanMetric

from grpo_lit import checkpoint as ckpt
from grpo_lit.dynamic_sampling import sample_step
from grpo_lit.errors import UserError
from grpo_lit.kernels import dispatch
from grpo_lit.lora import LoRAConfig
from grpo_lit.loss import LossConfig
from grpo_lit.model_source import resolve_model_source
from grpo_lit.nonfinite import NonFiniteGuard
from grpo_lit.optim import LRScheduleConfig, allocate_moments, build_scheduler
from grpo_lit.passes import Passes
from grpo_lit.phases import PhaseRecorder
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.prompt_queue import PromptLengths
from grpo_lit.prompts import PromptEncoder, load_tokenizer
from grpo_lit.rewards import RewardOutput
from grpo_lit.rollout import Rollout, RolloutConfig, RolloutEngine, SamplingConfig, build_engine, row_keys
from grpo_lit.sampling_step import StepRows, decode, judge
from grpo_lit.step import make_training_batch, rollout_metrics
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
        reward_timeout_s: longest time for one reward function of yours on the rows of a step; a function that takes
            longer ends the run instead of hanging it; null waits for ever.
        length_penalty: subtracted from the reward for each token of the completion.
        overlong_cache: tokens before the length limit over which a penalty grows to 1 (DAPO); null is off.
        ppo_passes: optimizer steps per rollout (the mu of the GRPO paper).
        micro_batch_size: rows per forward and backward: a memory knob, the gradient does not depend on it.
        score_batch_size: rows scored at once before the first pass, where the loss asks for it; null takes
            micro_batch_size.
        optimizer: class and arguments of the optimizer.
        lr_schedule: how the learning rate moves.
        max_grad_norm: gradients are scaled down to this norm; null is off.
        validation: how held-out prompts are answered.
        log_completions: completions per step shown in the text table of the logger.
        kernels: implementation of single ops, op to triton or torch, where the device's default is not wanted;
            ``perf/kernel_<op>`` shows what ran (1 for triton).
    """

    def __init__(
        self,
        policy: PolicyConfig,
        lora: LoRAConfig | None = LoRAConfig(),  # noqa: B008
        rollout: RolloutConfig = RolloutConfig(),  # noqa: B008
        loss: LossConfig = LossConfig(),  # noqa: B008
        rewards: list[str] = ["math_accuracy"],  # noqa: B006
        reward_weights: list[float] | None = None,
        reward_timeout_s: float | None = 1800.0,
        length_penalty: float = 0.0,
        overlong_cache: int | None = None,
        ppo_passes: int = 1,
        micro_batch_size: int = 8,
        score_batch_size: int | None = None,
        optimizer: OptimizerCallable = _adamw,
        lr_schedule: LRScheduleConfig = LRScheduleConfig(),  # noqa: B008
        max_grad_norm: float | None = 1.0,
        validation: ValidationConfig = ValidationConfig(),  # noqa: B008
        log_completions: int = 8,
        kernels: dict[str, str] | None = None,
    ) -> None:
        super().__init__()
        from grpo_lit.rewards import resolve_reward

        self.automatic_optimization = False
        self.strict_loading = False  # the frozen base is not in a checkpoint; grpo_lit.checkpoint checks the rest
        self.policy_config, self.lora_config, self.rollout_config, self.loss_config = policy, lora, rollout, loss
        self.reward_functions = [resolve_reward(name) for name in rewards]
        self.reward_names = list(rewards)
        self.reward_weights, self.reward_timeout_s = reward_weights, reward_timeout_s
        self.length_penalty, self.overlong_cache = length_penalty, overlong_cache
        self.ppo_passes, self.micro_batch_size, self.max_grad_norm = ppo_passes, micro_batch_size, max_grad_norm
        self.score_batch_size = score_batch_size
        self.micro_batch_tokens: int | None = None  # most padded tokens in a micro-batch; a callback may set it
        self.optimizer_callable, self.lr_schedule = optimizer, lr_schedule
        self.validation_config = validation
        self.log_completions = log_completions
        self._check_arguments()
        self.kernels = dispatch.check_overrides(kernels or {}, "model.kernels")
        self.policy: Policy | None = None
        self.rollout_step, self.prompt_lengths = 0, PromptLengths()
        self.guard = NonFiniteGuard()
        self.phase = PhaseRecorder(self)
        self.step_metrics: dict[str, float] = {}
        self.step_rows: StepRows | None = None
        self.validation_metrics: dict[str, float] = {}
        self._encoder: PromptEncoder | None = None
        self._reference: tuple[Policy, ...] = ()  # in a tuple, so that it is no submodule
        self._val_totals: dict[str, MeanMetric] = {}

    def _check_arguments(self) -> None:
        """What the types of the arguments leave open."""
        for name, least in (("ppo_passes", 1), ("micro_batch_size", 1), ("log_completions", 0)):
            if (number := getattr(self, name)) < least:
                raise UserError(f"model.{name}", number, f"a whole number of at least {least}")
        if self.score_batch_size is not None and self.score_batch_size < 1:
            raise UserError("model.score_batch_size", self.score_batch_size, "at least 1 row, or null")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise UserError("model.max_grad_norm", self.max_grad_norm, "a number above 0, or null")
        names, weights, seconds = self.reward_names, self.reward_weights, self.reward_timeout_s
        if not names:
            raise UserError("model.rewards", names, "at least one reward function")
        if weights is not None and len(weights) != len(names):
            raise UserError("model.reward_weights", weights, f"one weight for each of {len(names)} rewards")
        if weights is not None and not all(map(math.isfinite, weights)):
            raise UserError("model.reward_weights", weights, "finite numbers")
        if seconds is not None and not 0 < seconds < math.inf:
            raise UserError("model.reward_timeout_s", seconds, "a number of seconds above 0, or null")
        if not 0 <= self.length_penalty < math.inf:
            raise UserError("model.length_penalty", self.length_penalty, "a finite number >= 0")
        cache, limit = self.overlong_cache, self.rollout_config.sampling.max_completion_length
        if cache is not None and not 1 <= cache <= limit:
            raise UserError("model.overlong_cache", cache, f"from 1 to max_completion_length={limit} tokens")
        if self.policy_config.quantization and self.lora_config is None:
            raise UserError("model.lora", None, "a LoRA section: 4-bit weights can't be trained themselves")
        if self.rollout_config.engine == "vllm" and self.lora_config is None:
            raise UserError("model.lora", None, "a LoRA section with model.rollout.engine=vllm: it is handed adapters")

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
        dispatch.set_impl(self.kernels, "model.kernels", self.trainer.strategy.root_device)

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
        allocate_moments(optimizer)
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

    @property
    def reference(self) -> Policy | None:
        """The frozen copy that the KL is measured to; None where it is the policy without its adapters."""
        return self._reference[0] if self._reference else None

    # ---- training -----------------------------------------------------------------------------------------------

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Nothing to move: prompts are text and token lists until an engine pads them."""
        del device, dataloader_idx
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One rollout and ``ppo_passes`` optimizer steps on it."""
        del batch_idx
        self.phase.reset()
        rows = sample_step(self, batch)
        config = self.loss_config
        training = make_training_batch(
            rows.rollout, rows.rewards, rows.everyone, config, self.rollout_config.sampling.max_completion_length
        )
        metrics = {
            f"rollout/{name}": value
            for name, value in rollout_metrics(rows.everyone, mask_truncated=config.mask_truncated).items()
        }
        metrics |= {n if "/" in n else f"rollout/{n}": value for n, value in rows.reward_metrics.items()}
        metrics |= {f"train/{name}": value for name, value in Passes(self, training).run().items()}
        self.rollout_step += 1
        self.step_rows = rows
        self._log_step(metrics, rows)

    def _log_step(self, metrics: dict[str, float], rows: StepRows) -> None:
        seconds = self.phase.seconds
        total = time.perf_counter() - self.phase.step_started  # what lies between the phases included
        tokens = float(rows.everyone.lengths.sum())
        metrics["rollout/logprob_mismatch"] = metrics.pop("train/logprob_mismatch", 0.0)
        metrics["rollout/logprob_mismatch_max"] = metrics.pop("train/logprob_mismatch_max", 0.0)
        metrics |= {f"perf/{phase}_s": value for phase, value in seconds.items()}
        metrics["perf/step_s"] = total
        metrics["perf/tokens_per_sec"] = tokens / total if total else 0.0
        metrics["perf/rollout_tokens_per_sec"] = tokens / seconds["rollout"] if seconds.get("rollout") else 0.0
        ranks = self.world.gather(self.phase.between_ranks)
        metrics |= {f"perf/{name}_s": max(rank.get(name, 0.0) for rank in ranks) for name in self.phase.between_ranks}
        metrics |= {f"vram/peak_{phase}_mib": value for phase, value in self.phase.peak_mib.items()}
        for listener in self.phase.listeners:
            metrics |= listener.step_metrics()
        metrics |= getattr(self.engine, "step_metrics", dict)()  # what only some engines know
        metrics |= {f"perf/kernel_{op}": float(impl == "triton") for op, impl in dispatch.used_impls().items()}
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
            answers = self.phase.attempt(lambda: self._answer(batch))
            self.engine.release()
        if answers is None:
            return
        rollout, judged = answers
        right = judged.rewards[~judged.rewards.isnan()] > 0.5
        for name, values in (
            ("accuracy", right.float()),
            ("completion_length", rollout.lengths.float()),
            ("truncated_fraction", rollout.truncated.float()),
        ):
            if len(values):
                self._val_totals[name].update(values.to(self.device))

    def _answer(self, batch: Any) -> tuple[Rollout, RewardOutput] | None:
        """This rank's share of the answers, judged; None where it has no share."""
        config = self.validation_config
        mine = self.world.share(len(batch))
        if not mine:
            return None
        counts = [config.samples_per_prompt if i in mine else 0 for i in range(len(batch))]
        repeated = [batch.indices[i] for i in mine for _ in range(config.samples_per_prompt)]
        samples = list(range(config.samples_per_prompt)) * len(mine)
        keys = row_keys(self.seed, 0, repeated, samples, "val")
        self.phase.hold(min(self.engine.batch_size or len(keys), len(keys)), 0)
        rollout = self.engine.generate(batch.prompt_ids, counts, keys, config.sampling)
        return rollout, judge(self, batch, rollout, decode(self, batch, rollout), self.reward_functions[:1], None)

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
