"""``grpo-lit evaluate``: models x datasets x protocols, with intervals, resumable, and a report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from grpo_lit.cli.config_files import resolve_config_names
from grpo_lit.cli.parser import CLIParser, ParseError
from grpo_lit.cli.train import quiet_third_parties
from grpo_lit.errors import UserError, on_stop, typed_names
from grpo_lit.evaluation.config import DatasetEntry, EvaluateConfig, ModelEntry
from grpo_lit.evaluation.metrics import evaluation_metrics
from grpo_lit.evaluation.models import ResolvedModel, encoder_of, pick_device, positions_of, resolve_model
from grpo_lit.evaluation.report import write_reports
from grpo_lit.evaluation.runner import cells_of, engine_name, run_evaluation
from grpo_lit.evaluation.store import ResultStore
from grpo_lit.evaluation.summary import Summary, summarise, write_tables
from grpo_lit.evaluation.tasks import Task, check_lengths, check_selection, complete_config, load_tasks
from grpo_lit.evaluation.versions import versions
from grpo_lit.files import read_object, write_whole
from grpo_lit.paths import output_folder

LOWER_IS_BETTER = ("unparsable_rate", "truncation_rate", "tokens_per_correct")


def main(arguments: Sequence[str]) -> int:
    """Parse, evaluate what is missing, and write tables and reports."""
    quiet_third_parties()
    with typed_names({"models.path": "models", "model.rollout": ""}):
        return evaluate(parse(arguments))


def evaluate(config: EvaluateConfig) -> int:
    """Check everything cheap, evaluate what is missing, and write tables and reports."""
    if config.engine == "vllm":
        config.vllm.check_installed()
    folder = output_folder(config.output, "output")
    device = pick_device(config.device)
    complete_config(config)
    if config.run is not None and "best" not in config.models:
        print(f"note: {config.run} kept no best checkpoint: its base and final weights are evaluated")
    with typed_names(
        {f"models.{label}.run": "run" for label, entry in config.models.items() if entry.run == config.run}
    ):
        models = {label: resolve_model(label, entry, device) for label, entry in config.models.items()}
    tasks = load_tasks(config)
    for label, model in models.items():
        with typed_names({"model.policy": f"models.{label}"}):
            check_lengths(config, tasks, encoder_of(model), positions_of(model))
    check_selection(config.select_by, tasks, allow_on_test=config.allow_selection_on_test)
    if config.select_by is not None:
        label, _, metric = config.select_by.partition("/")
        sizes = {cell.samples for name in models for cell in cells_of(config, name, tasks) if cell.task.label == label}
        names = {str(name) for size in sizes for name in evaluation_metrics(size)}
        if metric not in names:
            raise UserError("select_by", config.select_by, f"a metric of {label}: {', '.join(sorted(names))}")
    if config.overwrite and (folder / "cells.json").exists():
        print(f"the earlier results in {folder} are kept in {set_aside(folder)}")
    store = ResultStore(folder)
    with store.opened(), on_stop(lambda: f"; what is answered is kept in {folder}, the same command goes on"):
        write_run_config(folder, config, models, tasks, engine_name(config, device))
        run_evaluation(config, models, tasks, store, lambda text: print(text, flush=True))
        cells = [cell for label in models for cell in cells_of(config, label, tasks)]
        summary = summarise(cells, store, confidence=config.confidence, seed=config.seed)
        write_tables(summary, folder)
        if config.select_by is not None:
            chosen = select(config.select_by, summary, tasks)
            write_whole(folder / "selection.json", json.dumps(chosen, indent=1) + "\n")
        write_reports(folder, summary, store, tasks)
    print("\n".join(short_text(summary)))
    print(f"report: {folder / 'report.html'} (report.md, summary.csv, paired.csv, generations.jsonl, verdicts.jsonl)")
    return 0


def parse(arguments: Sequence[str]) -> EvaluateConfig:
    """The settings of the command line and its config file."""
    arguments = resolve_config_names(_flags(arguments))
    parser = _parser()
    parser.add_class_arguments(EvaluateConfig, None, instantiate=False)
    mistake: ParseError | None = None
    try:
        given = parser.parse_args(arguments)
    except ParseError as error:
        mistake = error
    if mistake is not None:  # out of the handler: a parser's error raises what it finds in its context
        _check_entries(arguments)
        raise mistake
    settings = parser.instantiate_classes(given).as_dict()
    settings.pop("config", None)
    return EvaluateConfig(**settings)


def _parser() -> CLIParser:
    parser = CLIParser(prog="grpo-lit evaluate", description="Evaluate models on datasets, with intervals.")
    parser.add_argument("--config", action="config", help="YAML file, or the name of a shipped configuration.")
    return parser


def _check_entries(arguments: Sequence[str]) -> None:
    """Name the model or dataset that a mistake is in: the parser's own words begin inside of it.

    Raises:
        ParseError: there is such a mistake.
    """
    parser = _parser()
    sections = {"models": ModelEntry, "datasets": DatasetEntry}
    parser.add_class_arguments(EvaluateConfig, None, instantiate=False, skip=set(sections))
    for section in sections:
        parser.add_argument(f"--{section}", type=dict[str, dict[str, Any]], default={})
    given = parser.parse_args(list(arguments))
    for section, kind in sections.items():
        one = CLIParser()
        one.add_class_arguments(kind, f"{section}.NAME")
        for label, entry in given[section].items():
            try:
                one.parse_object({section: {"NAME": entry}})
            except ParseError as error:
                raise ParseError(str(error).replace(f"{section}.NAME", f"{section}.{label}")) from error


def _flags(arguments: Sequence[str]) -> list[str]:
    """Let the two switches stand alone, with hyphens, as people type them."""
    fixed: list[str] = []
    for index, argument in enumerate(arguments):
        name = argument.replace("--allow-selection-on-test", "--allow_selection_on_test")
        following = arguments[index + 1] if index + 1 < len(arguments) else "--"
        bare = name in ("--allow_selection_on_test", "--overwrite") and following.startswith("--")
        fixed.append(f"{name}=true" if bare else name)
    return fixed


def set_aside(folder: Path) -> Path:
    """Move the results of a folder into ``<folder>.1``, ``.2``, ..."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    return target


def write_run_config(
    folder: Path, config: EvaluateConfig, models: dict[str, ResolvedModel], tasks: Sequence[Task], engine: str
) -> None:
    """``run_config.json``: resolved settings, models, datasets and versions. Its date is that of the first run."""
    path = folder / "run_config.json"
    record: dict[str, Any] = {
        "settings": asdict(config),
        "models": {label: model.fingerprint() for label, model in models.items()},
        "datasets": {
            task.label: {"source": task.source, "problems": len(task.rows), "final_test": task.final_test}
            for task in tasks
        },
        "engine": engine,
        "versions": versions(),
    }
    record["started"] = read_object(path).get("started", datetime.now(timezone.utc).isoformat(timespec="seconds"))
    write_whole(path, json.dumps(record, indent=1) + "\n")


def select(select_by: str, summary: Summary, tasks: Sequence[Task]) -> dict[str, Any]:
    """The best model by one metric of one dataset; the last protocol decides where there are two.

    Raises:
        UserError: no such metric.
    """
    label, _, metric = select_by.partition("/")
    scores = {
        cell.model: cell.metrics[metric].value
        for cell in summary.cells
        if cell.dataset == label and metric in cell.metrics
    }
    if not scores:
        known = sorted({name for cell in summary.cells if cell.dataset == label for name in cell.metrics})
        raise UserError("select_by", select_by, f"a metric of {label}: {', '.join(known)}")
    on_test = any(task.final_test for task in tasks if task.label == label)
    sign = -1 if metric.endswith("_length") or metric in LOWER_IS_BETTER else 1
    best = max(scores, key=lambda name: sign * scores[name])
    return {"selected": best, "by": select_by, "scores": scores, "selected_on_final_test": on_test}


def short_text(summary: Summary) -> list[str]:
    """A line per cell: pass@1 with its interval."""
    return [
        f"{cell.model:<12} {cell.dataset:<14} {cell.protocol:<14} pass@1 {value:.3f} [{low:.3f}, {high:.3f}]"
        for cell in summary.cells
        for value, low, high in [cell.metrics["pass@1"]]
    ]
