"""``grpo-lit fit`` and ``grpo-lit validate``."""

from __future__ import annotations

import logging
import re
import shlex
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from grpo_lit.callbacks.metrics_file import read_metrics
from grpo_lit.checkpoint import KEY, check_compatible, optimizer_name, read_checkpoint
from grpo_lit.cli.parser import GRPOCLI, ParseError
from grpo_lit.cli.run_folder import locked, resolve_ckpt_path, set_earlier_run_aside, write_config
from grpo_lit.datamodules.sent_cache import model_key
from grpo_lit.errors import SystemFault, UserError, on_stop
from grpo_lit.kernels import dispatch
from grpo_lit.memory.allocator import expand_segments
from grpo_lit.model_source import load_model_config, resolve_model_source
from grpo_lit.module import GRPOModule
from grpo_lit.rewards.compute import check_columns
from grpo_lit.sampling_step import build_allocator
from grpo_lit.skeleton import check_skeleton


def fit(arguments: Sequence[str]) -> int:
    """Train: check everything cheap, then load the model and run."""
    trained: list[Path] = []
    with on_stop(lambda: _kept(*trained)):
        cli = build("fit", arguments)
        root = Path(cli.trainer.default_root_dir)
        is_first = cli.trainer.is_global_zero
        ckpt = resolve_ckpt_path(cli.config["ckpt_path"], root)
        if ckpt is not None:
            check_checkpoint(ckpt, cli.model, resume=True)
        check_data(cli)
        check_callbacks(cli)
        if cli.model.rollout_config.engine == "vllm":
            cli.model.rollout_config.vllm.check_server()
        dry = bool(cli.trainer.fast_dev_run)  # type: ignore[attr-defined]
        with locked(root) if is_first else nullcontext():
            if is_first:
                resumed = ckpt is not None and root.resolve() in ckpt.resolve().parents
                if not resumed and not dry and (kept := set_earlier_run_aside(root)) is not None:
                    print(f"the earlier run in {root} is kept in {kept}")
                if not dry:
                    write_config(root, cli.dump())
                print(start_text(cli, root, ckpt), flush=True)
            trained.append(root)
            run(cli, "fit", ckpt)
            if is_first:
                print(end_text(root, held_out=len(cli.datamodule.load()[1])), flush=True)
    return 0


def _kept(root: Path | None = None) -> str:
    """What a stopped run leaves; from the first step on `GracefulStop` takes the signals, but for a second Ctrl-C."""
    if root is None or not (root / "checkpoints" / "last.ckpt").is_file():
        return " before the first step: nothing was trained, there is nothing to save"
    return f"; {root}/checkpoints/last.ckpt is whole: resume with --ckpt_path last"


def validate(arguments: Sequence[str]) -> int:
    """Measure the accuracy on the held-out prompts, of the base or of a checkpoint."""
    cli = build("validate", arguments)
    root = Path(cli.trainer.default_root_dir)
    ckpt = resolve_ckpt_path(cli.config["ckpt_path"], root)
    if ckpt is not None:
        check_checkpoint(ckpt, cli.model)
    check_data(cli)
    if not cli.datamodule.load()[1]:
        raise UserError("data.val_prompts", cli.datamodule.val_prompts, "at least 1 held-out row to validate on")
    run(cli, "validate", ckpt)
    for name, value in cli.model.validation_metrics.items():
        print(f"{name}: {value:.4f}")
    return 0


def build(command: str, arguments: Sequence[str], cli_class: type[GRPOCLI] = GRPOCLI) -> GRPOCLI:
    """Parse and build trainer, module and data; check device, model location and tokenizer. Loads no weight."""
    quiet_third_parties()
    try:
        cli = cli_class(arguments, command)
    except MisconfigurationException as error:
        message = " ".join(str(error).split())
        if "accelerator" in message.lower() or "CUDA" in message or "gpu" in message.lower():
            raise SystemFault(f"trainer.accelerator: no such device on this machine ({message}); use cpu") from error
        raise UserError("trainer", message, "settings that fit together") from error
    except ValueError as error:
        # jsonargparse tries every member of a union and reports all failures in one long text
        ours = re.search(r"^\s*- (.+: accepted is .+)$", str(error), re.MULTILINE)
        if isinstance(error, UserError) or ours is None:
            raise
        raise ParseError(ours.group(1)) from error
    check_trainer(cli.trainer)
    check_model(cli.model)
    if cli.trainer.strategy.root_device.type == "cuda" and cli.model.rollout_config.engine != "vllm":
        expand_segments()  # before the first allocation; vLLM's memory pools do without
    return cli


def check_trainer(trainer: Trainer) -> None:
    """Refuse trainer settings that this module replaces by its own.

    Raises:
        UserError: a precision other than full, or Lightning's gradient accumulation.
    """
    if trainer.precision != "32-true":
        raise UserError("trainer.precision", trainer.precision, "32-true: model.policy.dtype sets the format")
    if trainer.accumulate_grad_batches != 1:
        accepted = "1: model.micro_batch_size splits a step without changing it"
        raise UserError("trainer.accumulate_grad_batches", trainer.accumulate_grad_batches, accepted)
    if trainer.gradient_clip_val:
        raise UserError("trainer.gradient_clip_val", trainer.gradient_clip_val, "null: model.max_grad_norm clips")
    if trainer.val_check_interval == 0:
        raise UserError("trainer.val_check_interval", 0, "at least 1 rollout step; data.val_prompts=0 never validates")
    if trainer.limit_train_batches == 0:
        raise UserError("trainer.limit_train_batches", 0, "at least 1 rollout step")
    if trainer.max_epochs == 0:
        raise UserError("trainer.max_epochs", 0, "at least 1, or -1 where trainer.max_steps ends the run")
    if trainer.max_steps == 0 or (trainer.max_steps < 0 and (trainer.max_epochs or -1) < 0):
        accepted = "at least 1 optimizer step, or -1 where trainer.max_epochs ends the run"
        raise UserError("trainer.max_steps", trainer.max_steps, accepted)
    check_launch(trainer)


def check_launch(trainer: Trainer) -> None:
    """Compare devices and nodes with the processes that torchrun or SLURM started.

    Raises:
        UserError: they differ; without it the ranks would wait for processes that nobody starts.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if environment is not None:
        try:
            environment.validate_settings(num_devices=trainer.num_devices, num_nodes=trainer.num_nodes)
        except ValueError as error:
            given = f"{trainer.num_devices} on {trainer.num_nodes} node(s)"
            raise UserError("trainer.devices", given, f"what the launcher started ({error})") from error


def check_model(module: GRPOModule) -> None:
    """Find the model and its tokenizer without loading a weight, and see that the adapters fit it.

    Raises:
        UserError: no such model, its tokenizer can't be used, or the adapters do not fit.
        SystemFault: the hub can't be reached.
    """
    load_model_config(resolve_model_source(module.policy_config.path))
    _ = module.encoder
    check_skeleton(module.policy_config, module.lora_config)


def check_checkpoint(path: Path, module: GRPOModule, *, resume: bool = False) -> None:
    """Refuse a damaged checkpoint or one of another model, before any weight is loaded."""
    config = load_model_config(resolve_model_source(module.policy_config.path))
    content = read_checkpoint(path)
    entry = content.get(KEY)
    check_compatible(entry, config, module.lora_config, str(path))
    if not all(bool(weight.isfinite().all()) for weight in content.get("state_dict", {}).values()):
        raise UserError("ckpt_path", str(path), "a checkpoint whose weights are finite; take 'best' or an older one")
    assert entry is not None
    if resume and entry["optimizer"] != optimizer_name(module):
        raise UserError("model.optimizer", optimizer_name(module), f"{entry['optimizer']}, as in {path}")
    if resume and entry["seed"] != module.seed:
        print(f"note: {path} was trained with seed {entry['seed']}, this run goes on with seed {module.seed}")


def check_data(cli: GRPOCLI) -> None:
    """Read and encode the prompts, and see that the longest fits the model together with its completion.

    Raises:
        UserError: bad data, or prompt and completion are longer than the model's positions.
    """
    module, data = cli.model, cli.datamodule
    dispatch.set_impl(module.kernels, "model.kernels", cli.trainer.strategy.root_device)
    try:
        module.optimizer_callable([torch.nn.Parameter(torch.zeros(1))])
    except (ValueError, TypeError) as error:
        given = getattr(cli.config["model"]["optimizer"], "class_path", None)
        raise UserError("model.optimizer", given, f"settings that it takes ({error})") from error
    data.connect(module.encoder, model_key(module.policy_config))
    check_columns(module.reward_functions, data.train_batch([0]).columns)
    config = load_model_config(resolve_model_source(module.policy_config.path))
    limit, layers = (getattr(config, name, None) for name in ("max_position_embeddings", "num_hidden_layers"))
    recomputed = module.policy_config.gradient_checkpointing
    if isinstance(layers, int) and isinstance(recomputed, int) and recomputed > layers:
        raise UserError("model.policy.gradient_checkpointing", recomputed, f"from 0 to the model's {layers} layers")
    for name, sampling, longest in (
        ("model.rollout", module.rollout_config.sampling, data.longest_prompts[0]),
        ("model.validation", module.validation_config.sampling, data.longest_prompts[1]),
    ):
        if isinstance(limit, int) and longest >= limit:
            accepted = f"below the model's {limit} positions; a prompt has {longest} tokens"
            raise UserError("data.max_prompt_length", data.max_prompt_length, accepted)
        if isinstance(limit, int) and longest and longest + sampling.max_completion_length > limit:
            accepted = f"at most {limit - longest}: the model has {limit} positions, the longest prompt {longest}"
            raise UserError(f"{name}.sampling.max_completion_length", sampling.max_completion_length, accepted)


def check_callbacks(cli: GRPOCLI) -> None:
    """Let callbacks with a method ``check_before_run(trainer, module)`` see that they can do what they are asked.

    Raises:
        UserError: they can't.
        SystemFault: what one needs can't be reached.
    """
    for callback in cli.trainer.callbacks:  # type: ignore[attr-defined]
        if (check := getattr(callback, "check_before_run", None)) is not None:
            check(cli.trainer, cli.model)


def run(cli: GRPOCLI, command: str, ckpt: Path | None) -> None:
    """Hand over to the trainer; a full GPU ends in one line.

    Raises:
        SystemFault: out of memory.
    """
    try:
        getattr(cli.trainer, command)(
            cli.model, datamodule=cli.datamodule, ckpt_path=None if ckpt is None else str(ckpt), weights_only=True
        )
    except MisconfigurationException as error:
        raise UserError("trainer", " ".join(str(error).split()), "settings that fit together") from error
    except SystemExit as error:  # what Lightning makes of Ctrl-C, without a word
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise _out_of_memory(error) from error
        if "Early stopping conditioned on metric" in str(error):
            raise UserError("trainer.callbacks", "EarlyStopping", " ".join(str(error).split())) from error
        raise


def _out_of_memory(error: torch.OutOfMemoryError) -> SystemFault:
    return SystemFault(
        f"out of GPU memory ({' '.join(str(error).split())[:160]}); lower model.micro_batch_size, "
        "model.rollout.batch_size or the completion length, or set model.policy.gradient_checkpointing"
    )


def start_text(cli: GRPOCLI, root: Path, ckpt: Path | None) -> str:
    """What is about to happen: model, batch arithmetic, where it is written."""
    module, data, trainer = cli.model, cli.datamodule, cli.trainer
    train, val = data.load()
    prompts, group = min(data.prompts_per_step, data.num_train_prompts), module.rollout_config.group_size
    allocator = build_allocator(module.rollout_config, prompts, 0)
    rows = allocator.budget()
    each = f"{group} completions per prompt" if module.rollout_config.allocator == "uniform" else "VIGOR rounds"
    micro = -(-rows // (module.micro_batch_size * trainer.world_size))
    lines = [
        f"policy: {module.policy_config.path}, {module.policy_config.dtype}"
        + (f", {module.policy_config.quantization} base" if module.policy_config.quantization else "")
        + (f", LoRA rank {module.lora_config.rank}" if module.lora_config else ", all weights train"),
        f"data: {data.dataset}, {len(train)} training prompts, {len(val)} held out",
        f"batch: {prompts} prompts per step x {each} = {rows} rows; {module.ppo_passes} "
        f"optimizer step(s) per rollout, each over {micro} micro-batch(es) of "
        f"{module.micro_batch_size} rows per device",
        f"length: trainer.max_steps={trainer.max_steps} optimizer steps = "
        f"{-(-trainer.max_steps // module.ppo_passes)} rollout steps"
        if trainer.max_steps > 0
        else f"length: trainer.max_epochs={trainer.max_epochs} epochs",
        f"run folder: {root}" + (f", resumed from {ckpt}" if ckpt else ""),
    ]
    if module.policy_config.quantization and trainer.strategy.root_device.type == "cpu":
        lines.append("device: the CPU; 4-bit weights are made for a GPU, and a step here can take many minutes")
    if trainer.num_nodes > 1:
        lines.append(f"ranks: {trainer.world_size} on {trainer.num_nodes} nodes; begins when all of them are started")
    if prompts < data.prompts_per_step:
        lines.append(
            f"note: data.prompts_per_step={data.prompts_per_step}, of {prompts} prompts; a step takes them all"
        )
    if (note := allocator.budget_note()) is not None:
        lines.append(note)
    return "\n".join(lines)


def end_text(root: Path, held_out: int = 0) -> str:
    """What came of it and where to look; ``held_out`` is the number of held-out prompts there were."""
    records = read_metrics(root / "metrics.jsonl")
    measured = [x for x in records if x.get("val/accuracy") is not None]  # null where every answer's reward abstained
    steps = records[-1]["step"] if records else 0
    lines = []
    if measured:
        ends = measured[:1] if len(measured) == 1 else [measured[0], measured[-1]]
        shown = ", ".join(f"{line['val/accuracy']:.3f} at rollout step {line['step']}" for line in ends)
        lines.append(f"held-out accuracy: {shown}")
    if held_out and steps and not any(line["step"] for line in measured):
        made = "grpo-lit validate with --ckpt_path last makes one"
        lines.append(f"no validation in {steps} rollout step(s) (trainer.val_check_interval); {made}")
    written = ("metrics.jsonl", "completions", "checkpoints", "adapter", "model")
    there = [name + "/" * (root / name).is_dir() for name in written if (root / name).exists()]
    lines.append(f"run folder: {root}" + (f" ({', '.join(there)})" if there else ""))
    if (root / "tensorboard").is_dir():
        lines.append(f"watch: tensorboard --logdir {shlex.quote(str(root / 'tensorboard'))}")
    return "\n".join(lines)


def quiet_third_parties() -> None:
    """Keep the terminal for this project: no tips, no repeated warnings of libraries."""
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "bitsandbytes", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Lightning ends every rank when one that it started dies, and says here which one it was.
    logging.getLogger("lightning.fabric.strategies.launchers.subprocess_script").setLevel(logging.INFO)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*GenerationConfig.*")
    warnings.filterwarnings("ignore", message=".*compute.*method of metric MeanMetric.*")  # all abstained: NaN says so
