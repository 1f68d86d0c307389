"""Models x datasets x protocols: generate, judge, keep, and go on where an earlier run was stopped."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from grpo_lit.errors import SystemFault, typed_names
from grpo_lit.evaluation.config import EvaluateConfig, Protocol
from grpo_lit.evaluation.judging import RIGHT_CLASS, judge_samples
from grpo_lit.evaluation.models import ResolvedModel, load_model, pick_device
from grpo_lit.evaluation.store import Record, ResultStore, SampleKey, key_of
from grpo_lit.evaluation.tasks import Task
from grpo_lit.policy import Policy
from grpo_lit.prompts import PromptEncoder, prefilled_tail
from grpo_lit.rollout import RolloutConfig, RolloutEngine, SamplingConfig, build_engine, row_keys

_log = logging.getLogger("grpo_lit.evaluation")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Cell:
    """One model on one dataset by one protocol."""

    model: str
    task: Task
    protocol: Protocol
    samples: int
    sampling: SamplingConfig

    @property
    def name(self) -> str:
        """Key of the cell in files and messages."""
        return f"{self.model}/{self.task.label}/{self.protocol}"

    def sample_keys(self) -> list[SampleKey]:
        """Every sample of the cell, in the order of the files."""
        head = (self.model, self.task.label, self.protocol)
        return [SampleKey(*head, row["index"], sample) for row in self.task.rows for sample in range(self.samples)]


def cells_of(config: EvaluateConfig, model: str, tasks: Sequence[Task]) -> list[Cell]:
    """The cells of a model, in the order they are run."""
    return [
        Cell(
            model,
            task,
            protocol,
            config.num_samples(task.label, protocol),
            config.sampling(task.label, protocol, task.sampling_of_run),
        )
        for task in tasks
        for protocol in config.protocols
    ]


def engine_name(config: EvaluateConfig, device: str) -> str:
    """The engine that auto stands for: vllm on a GPU where it is installed, else what the registry picks."""
    if config.engine != "auto":
        return config.engine
    return "vllm" if device != "cpu" and importlib.util.find_spec("vllm") is not None else "auto"


def run_evaluation(
    config: EvaluateConfig, models: dict[str, ResolvedModel], tasks: Sequence[Task], store: ResultStore, say: Say
) -> None:
    """Answer and judge all that is missing in the store; a model of which nothing is missing is not loaded.

    Raises:
        UserError: the store holds results of other settings, or an adapter does not fit its base.
        SystemFault: out of memory at one row, or the engine is not installed.
    """
    device = pick_device(config.device)
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    wanted = engine_name(config, device)
    for label, resolved in models.items():
        cells = cells_of(config, label, tasks)
        for cell in cells:
            store.check_cell(cell.name, _fingerprint(config, cell, resolved, wanted))
        answered, judged = ({key_of(r) for r in lines.records} for lines in (store.generations, store.verdicts))
        open_cells = [cell for cell in cells if not answered & judged >= set(cell.sample_keys())]
        if not open_cells:
            say(f"{label}: complete")
            continue
        with typed_names({"model.policy": f"models.{label}"}):
            _run_model(config, label, resolved, open_cells, store, device, wanted, say)


def _run_model(
    config: EvaluateConfig,
    label: str,
    resolved: ResolvedModel,
    cells: Sequence[Cell],
    store: ResultStore,
    device: str,
    wanted: str,
    say: Say,
) -> None:
    policy, encoder = load_model(resolved, device)
    engine = make_engine(config, wanted, policy, encoder)
    say(f"{label}: {resolved.policy.path}, engine {engine.name}")
    try:
        for cell in cells:
            run_cell(cell, engine, encoder, store, batch_size=config.batch_size, seed=config.seed, say=say)
    finally:
        engine.close()
        del policy, engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def make_engine(config: EvaluateConfig, wanted: str, policy: Policy, encoder: PromptEncoder) -> RolloutEngine:
    """The engine over a policy's own weights, adapter live."""
    rollout = RolloutConfig(engine=wanted, batch_size=config.batch_size, vllm=config.vllm)  # type: ignore[arg-type]
    return build_engine(rollout, policy, encoder)


def _fingerprint(config: EvaluateConfig, cell: Cell, resolved: ResolvedModel, wanted: str) -> Record:
    task = cell.task
    return {
        "model": resolved.fingerprint(),
        "data": {"source": task.source, "rows": len(task.rows), **task.settings},
        "prompt": [task.template, task.system_prompt, task.chat_template],
        "judge": [task.judge, task.format],
        "sampling": asdict(cell.sampling),
        "samples": cell.samples,
        "batch_size": config.batch_size,
        "engine": wanted,
        "seed": config.seed,
    }


def run_cell(
    cell: Cell,
    engine: RolloutEngine,
    encoder: PromptEncoder,
    store: ResultStore,
    *,
    batch_size: int,
    seed: int,
    say: Say | None = None,
) -> None:
    """Answer and judge the problems of a cell that the store lacks.

    Batches are the same slices of the dataset whether or not earlier ones are done: the shapes of a batch decide the
    last bits of a log-prob, so a resumed evaluation writes what an undisturbed one would have.
    """
    size = max(1, batch_size // cell.samples)
    generated = {key_of(record): record for record in store.generations.records}
    judged = {key_of(record) for record in store.verdicts.records}
    start = time.monotonic()
    for first in range(0, len(cell.task.rows), size):
        rows = cell.task.rows[first : first + size]
        keys = [key for row in rows for key in _keys(cell, row)]
        if any(key not in generated for key in keys):
            records = _generate(cell, rows, engine, encoder, store, seed, first)
            fresh = [record for record in records if key_of(record) not in generated]
            for row in rows:
                if own := [record for record in fresh if record["example"] == row["index"]]:
                    store.generations.append(own)
            generated |= {key_of(record): record for record in fresh}
        for row in rows:
            if missing := [key for key in _keys(cell, row) if key not in judged]:
                verdicts = _judge(cell, row, [generated[key] for key in _keys(cell, row)])
                store.verdicts.append([record for record in verdicts if key_of(record) in missing])
        done = min(first + size, len(cell.task.rows))
        if say is not None and (done == len(cell.task.rows) or time.monotonic() - start > 10):
            start = time.monotonic()
            say(f"{cell.name}: {done} of {len(cell.task.rows)} problems")


def _keys(cell: Cell, row: Record) -> list[SampleKey]:
    head = (cell.model, cell.task.label, cell.protocol, row["index"])
    return [SampleKey(*head, sample) for sample in range(cell.samples)]


def _generate(
    cell: Cell,
    rows: Sequence[Record],
    engine: RolloutEngine,
    encoder: PromptEncoder,
    store: ResultStore,
    seed: int,
    first: int,
) -> list[Record]:
    """Generation records of a batch of problems, a record a sample; their time goes to the store."""
    prompts = [cell.task.render(row, encoder) for row in rows]
    indices = [row["index"] for row in rows for _ in range(cell.samples)]
    keys = row_keys(seed, 0, indices, list(range(cell.samples)) * len(rows), "generate")
    start = time.perf_counter()
    rollout = generate_or_halve(engine, [encoder.encode(p) for p in prompts], cell.samples, keys, cell.sampling)
    seconds = time.perf_counter() - start
    ids, lengths, truncated = rollout.completion_ids.tolist(), rollout.lengths.tolist(), rollout.truncated.tolist()
    store.timings.append(
        [
            {
                **{"model": cell.model, "dataset": cell.task.label, "protocol": cell.protocol, "first": first},
                **{"engine": engine.name, "seconds": seconds, "tokens": sum(lengths), "samples": len(lengths)},
            }
        ]
    )
    groups = rollout.group_ids.tolist()
    return [
        {
            **_keys(cell, rows[groups[i]])[i % cell.samples]._asdict(),
            "prompt": prompts[groups[i]],
            "completion": prefilled_tail(prompts[groups[i]]) + encoder.decode(ids[i][: lengths[i]]),
            "num_tokens": lengths[i],
            "truncated": truncated[i],
        }
        for i in range(len(groups))
    ]


def generate_or_halve(
    engine: RolloutEngine,
    prompts: Sequence[Sequence[int]],
    samples: int,
    keys: Any,
    sampling: SamplingConfig,
) -> Any:
    """Generate; where memory runs out, with half the rows in flight, down to one.

    Raises:
        SystemFault: one row does not fit.
    """
    counts = [samples] * len(prompts)
    while True:
        try:
            return engine.generate(prompts, counts, keys, sampling)
        except torch.OutOfMemoryError as error:
            rows = engine.batch_size or sum(counts)
            if rows <= 1:
                raise SystemFault("out of GPU memory at one row; lower max_completion_length") from error
            engine.release()
            engine.batch_size = rows // 2
            _log.warning("out of memory: going on with %d rows at once", engine.batch_size)


def _judge(cell: Cell, row: Record, generated: Sequence[Record]) -> list[Record]:
    prompt = generated[0]["prompt"]
    verdicts = judge_samples(
        [record["completion"] for record in generated],
        prompt,
        row,
        judge=cell.task.judge,
        format_judge=cell.task.format_of(prompt),
        timeout_s=cell.task.reward_timeout_s,
    )
    return [
        {
            **key_of(record)._asdict(),
            "correct": verdict.correct,
            "kind": verdict.kind,
            "extracted": verdict.extracted,
            "answer_class": verdict.answer_class,
            "formatted": verdict.formatted,
            "gold": row["answer"],
        }
        for record, verdict in zip(generated, verdicts, strict=True)
    ]


def problem_of(verdicts: Sequence[Record], generated: Sequence[Record]) -> dict[str, Any]:
    """The arguments of ``evaluation_metrics(...).update`` for one problem, from its records."""
    return {
        "correct": [record["correct"] for record in verdicts],
        "classes": [record["answer_class"] for record in verdicts],
        "right_classes": {RIGHT_CLASS},
        "formatted": [bool(record["formatted"]) for record in verdicts],
        "unparsable": [record["kind"] == "unparsable" for record in verdicts],
        "truncated": [record["truncated"] for record in generated],
        "lengths": [record["num_tokens"] for record in generated],
    }
