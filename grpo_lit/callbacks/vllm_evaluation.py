"""Benchmarks during training, on the weights as they are at that moment."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from grpo_lit.checkpoint import rng_state, set_rng_state
from grpo_lit.errors import UserError, typed_names
from grpo_lit.files import append_line, read_lines
from grpo_lit.lora import save_adapter
from grpo_lit.markdown import quoted, table

if TYPE_CHECKING:
    from grpo_lit.evaluation.config import EvaluateConfig
    from grpo_lit.evaluation.tasks import Task
    from grpo_lit.module import GRPOModule
    from grpo_lit.rollout import RolloutEngine

_log = logging.getLogger("grpo_lit.evaluation")


class VLLMEvaluation(Callback):
    """Answers datasets with the current weights every n rollout steps, before training, or at its end.

    Every rank answers its share with an engine of its own process, so none waits idle, or (``process: child``) rank 0
    starts ``grpo-lit evaluate`` in a process of its own while the others wait. Scores go to the loggers as
    ``eval/<dataset>/<metric>`` (sampled protocol: ``eval/<dataset>/sampled/<metric>``), to ``evaluation/scores.jsonl``
    of the run folder, and every answer to ``evaluation/step_000010/``. What a resumed run finds there is not computed
    again. No random number of the training is drawn, so its metrics are those of a run without this callback.

    Args:
        datasets: by name, the settings of `grpo_lit.evaluation.config.DatasetEntry`.
        every_n_rollout_steps: how often; null only where the next two say so.
        before_training: also at rollout step 0: the baseline.
        at_end: also when training ends.
        engine: vllm, graph, hf, or auto: vllm where it is installed and there is a GPU, else the training's engine.
        process: inside: in the training's own process. child: in one that is started for it.
        python: of the child: an interpreter, such as that of an environment with vLLM; null is this one.
        memory_share: of the child or of a colocated vLLM: share of the GPU's memory.
        timeout_s: of the child.
        protocol: deterministic, sampled or both.
        samples: of the sampled protocol.
        temperature: of the sampled protocol.
        top_p: of the sampled protocol.
        max_completion_length: tokens.
        limit: first rows of each dataset.
        batch_size: answers generated together.
        data_dir: folder of local files for registered datasets.
        prompt_template: text of the user's turn; null is the evaluation's default.
        allow_selection_on_test: let a checkpoint be chosen by a final test set.

    Raises:
        UserError: no dataset, never due, or a checkpoint monitor on a final test set.
    """

    def __init__(
        self,
        datasets: dict[str, dict[str, Any]],
        every_n_rollout_steps: int | None = None,
        before_training: bool = False,
        at_end: bool = True,
        engine: Literal["auto", "vllm", "graph", "hf"] = "auto",
        process: Literal["inside", "child"] = "inside",
        python: str | None = None,
        memory_share: float = 0.3,
        timeout_s: float = 3600.0,
        protocol: Literal["deterministic", "sampled", "both"] = "deterministic",
        samples: int = 4,
        temperature: float = 0.6,
        top_p: float = 0.95,
        max_completion_length: int | None = None,
        limit: int | None = None,
        batch_size: int = 64,
        data_dir: str | None = None,
        prompt_template: str | None = None,
        allow_selection_on_test: bool = False,
    ) -> None:
        if not datasets:
            raise UserError("VLLMEvaluation.datasets", datasets, "at least one dataset")
        if every_n_rollout_steps is not None and every_n_rollout_steps < 1:
            raise UserError("VLLMEvaluation.every_n_rollout_steps", every_n_rollout_steps, "at least 1, or null")
        if every_n_rollout_steps is None and not before_training and not at_end:
            raise UserError("VLLMEvaluation.at_end", at_end, "true, where nothing else says when to evaluate")
        if not 0 < memory_share <= 1:
            raise UserError("VLLMEvaluation.memory_share", memory_share, "a number above 0 and at most 1")
        if not timeout_s > 0:
            raise UserError("VLLMEvaluation.timeout_s", timeout_s, "a number of seconds above 0")
        if python is not None and shutil.which(python) is None:
            raise UserError("VLLMEvaluation.python", python, "an interpreter that there is")
        self.every_n_rollout_steps, self.before_training, self.at_end = every_n_rollout_steps, before_training, at_end
        self.engine, self.process, self.python = engine, process, python
        self.memory_share, self.timeout_s = memory_share, timeout_s
        self.allow_selection_on_test = allow_selection_on_test
        self.settings: dict[str, Any] = {
            **{"datasets": datasets, "protocol": protocol, "samples": samples, "temperature": temperature},
            **{"top_p": top_p, "max_completion_length": max_completion_length, "limit": limit},
            **{"batch_size": batch_size, "data_dir": data_dir},
        }
        if prompt_template is not None:
            self.settings["prompt_template"] = prompt_template
        self._tasks: list[Task] = []
        self._config: EvaluateConfig | None = None
        self._engine: RolloutEngine | None = None
        self._done: set[int] = set()

    # ---- when ---------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Read the datasets, before the model loads, where no command has had it done."""
        if stage == "fit" and self._config is None:
            self.check_before_run(trainer, cast("GRPOModule", pl_module))

    def check_before_run(self, trainer: Trainer, module: GRPOModule) -> None:
        """Read the datasets, and see that they can be answered.

        Raises:
            UserError: bad settings or data, an engine that is not installed, or answers longer than the model takes.
            SystemFault: the hub can't be reached.
        """
        with typed_names({"": "VLLMEvaluation"}), typed_names({"model.rollout.engine": "engine"}):
            if self.engine == "vllm" and (self.process == "inside" or self.python is None):
                module.rollout_config.vllm.check_installed()
            self._read_datasets(trainer, module)

    def _read_datasets(self, trainer: Trainer, module: GRPOModule) -> None:
        from grpo_lit.evaluation.config import EvaluateConfig, dataset_entry
        from grpo_lit.evaluation.models import ResolvedModel, positions_of
        from grpo_lit.evaluation.tasks import check_lengths, check_selection, load_tasks

        entries = {label: dataset_entry(label, entry) for label, entry in self.settings["datasets"].items()}
        self.settings["reward_timeout_s"] = module.reward_timeout_s
        self._config = EvaluateConfig(**{**self.settings, "datasets": entries}, seed=module.seed)
        self._tasks = load_tasks(self._config)
        positions = positions_of(ResolvedModel(module.policy_config))
        check_lengths(self._config, self._tasks, module.encoder, positions)
        for checkpoint in trainer.checkpoint_callbacks:
            monitor = getattr(checkpoint, "monitor", None) or ""
            label, _, metric = monitor.removeprefix("eval/").partition("/")
            if monitor.startswith("eval/"):
                check_selection(f"{label}/{metric}", self._tasks, allow_on_test=self.allow_selection_on_test)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The baseline, and what an interrupted run still owes at the step it goes on from."""
        module = cast("GRPOModule", pl_module)
        recorded = []
        if module.world.rank == 0:
            recorded = [line["step"] for line in read_lines(self._scores_file(trainer), {"step": int}, repair=True)]
        self._done = set(module.world.gather(recorded)[0])  # rank 0's view, so that all ranks decide alike
        step = module.rollout_step
        if (self.before_training if step == 0 else self._is_due(step)) and step not in self._done:
            self._evaluate(trainer, module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Evaluate where it is due."""
        module = cast("GRPOModule", pl_module)
        if self._is_due(module.rollout_step) and module.rollout_step not in self._done:
            # so that a checkpoint can be chosen by a score; Lightning takes none where training starts or ends
            module.log_dict(self._evaluate(trainer, module), logger=False, batch_size=1)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Evaluate the final weights, unless that has just been done."""
        module = cast("GRPOModule", pl_module)
        if self.at_end and module.rollout_step not in self._done:
            self._evaluate(trainer, module)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close an engine of its own."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _is_due(self, step: int) -> bool:
        every = self.every_n_rollout_steps
        return every is not None and step > 0 and step % every == 0

    @staticmethod
    def _folder(trainer: Trainer) -> Path:
        return Path(trainer.default_root_dir) / "evaluation"

    def _scores_file(self, trainer: Trainer) -> Path:
        return self._folder(trainer) / "scores.jsonl"

    # ---- what ---------------------------------------------------------------------------------------------------

    def _evaluate(self, trainer: Trainer, module: GRPOModule) -> dict[str, float]:
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return {}
        step = module.rollout_step
        folder = self._folder(trainer) / f"step_{step:06d}"
        state = rng_state()
        try:
            scores = self._in_child(module, folder) if self.process == "child" else self._inside(module, folder)
        finally:
            set_rng_state(state)
        self._done.add(step)
        if not trainer.is_global_zero:
            return scores
        append_line(self._scores_file(trainer), {"step": step, **scores})
        _log.info("evaluation after rollout step %d: %s", step, scores)
        for logger in trainer.loggers:
            logger.log_metrics(scores, step=step)
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text("eval/scores", scores_table(scores), step)
                logger.experiment.add_text("eval/answers", answers_table(folder), step)
            logger.save()
        return scores

    def _inside(self, module: GRPOModule, folder: Path) -> dict[str, float]:
        from grpo_lit.evaluation.in_training import evaluate_here

        assert self._config is not None
        engine = self._engine_for(module)
        engine.weights_changed()
        summary = evaluate_here(module, self._config, self._tasks, engine, folder)
        return {
            f"eval/{cell.dataset}/{'sampled/' * (cell.protocol == 'sampled')}{name}": interval.value
            for cell in summary.cells
            for name, interval in cell.metrics.items()
            if interval.value < float("inf")
        }

    def _engine_for(self, module: GRPOModule) -> RolloutEngine:
        """The training's engine where it is the one wanted, else one of its own over the same weights."""
        from grpo_lit.rollout import RolloutConfig, build_engine

        trained = module.engine
        wanted: str = self.engine
        if wanted == "auto":
            has_vllm = importlib.util.find_spec("vllm") is not None and module.device.type == "cuda"
            wanted = "vllm" if has_vllm else trained.name
        if wanted == trained.name:
            if self.engine == "auto" and wanted != "vllm" and not self._done:
                _log.info("evaluation with the training's engine %s: vLLM is not installed, or no GPU", wanted)
            return trained
        if self._engine is None:
            vllm = module.rollout_config.vllm
            vllm = type(vllm)(**{**vars(vllm), "memory_share": self.memory_share})
            config = RolloutConfig(engine=wanted, vllm=vllm)  # type: ignore[arg-type]
            self._engine = build_engine(config, module.live_policy, module.encoder)
        return self._engine

    def _in_child(self, module: GRPOModule, folder: Path) -> dict[str, float]:
        from grpo_lit.evaluation.in_training import MODEL, child_command, evaluate_in_child

        policy, config = module.live_policy, module.policy_config
        model: dict[str, Any] = {"dtype": config.dtype, "quantization": config.quantization or "none"}
        model["path"] = config.path
        if module.lora_config is None:
            model["path"] = str(folder / "model")
        else:
            model["adapter"] = str(folder / "adapter")
        if module.world.rank == 0 and module.lora_config is not None:
            save_adapter(policy.model, folder / "adapter", base_model=policy.source.spec)
        elif module.world.rank == 0:
            from grpo_lit.export import save_model

            save_model(policy, module.encoder.tokenizer, folder / "model")
        settings = dict(self.settings)
        settings |= {"models": {MODEL: model}, "engine": self.engine, "seed": module.seed, "output": str(folder)}
        settings |= {"device": module.device.type, "vllm.memory_share": self.memory_share, "overwrite": True}
        if config.cpu_threads is not None:
            settings["cpu_threads"] = config.cpu_threads
        evaluate_in_child(module, child_command(self.python, settings), folder.with_suffix(".log"), self.timeout_s)
        return module.world.gather(read_summary(folder) if module.world.rank == 0 else {})[0]  # type: ignore[no-any-return]


def read_summary(folder: Path) -> dict[str, float]:
    """``eval/...`` scores out of a ``summary.csv``."""
    import csv

    rows = csv.DictReader((folder / "summary.csv").read_text(encoding="utf-8").splitlines())
    return {
        f"eval/{row['dataset']}/{'sampled/' * (row['protocol'] == 'sampled')}{row['metric']}": float(row["value"])
        for row in rows
        if row["value"] not in ("", "inf")
    }


def scores_table(scores: dict[str, float]) -> str:
    """Scores as a Markdown table."""
    return "\n".join(table(["", ""], ([name, f"{value:.4f}"] for name, value in scores.items())))


def answers_table(folder: Path, limit: int = 8) -> str:
    """The first answers with their verdicts as a Markdown table."""
    records: list[list[dict[str, Any]]] = []
    for name in ("generations", "verdicts"):
        with (folder / f"{name}.jsonl").open(encoding="utf-8", newline="\n") as file:
            records.append([json.loads(line) for line in islice(file, limit)])
    rows = [
        [quoted(str(cell), 400) for cell in (given["prompt"], given["completion"], judged["kind"], judged["gold"])]
        for given, judged in zip(*records, strict=False)
    ]
    return "\n".join(table(["prompt", "answer", "verdict", "gold"], rows))
