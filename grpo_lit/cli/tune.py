"""``grpo-lit tune``: which settings make this configuration fast on this machine, judged by benchmarks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_lit.cli.parser import CLIParser
from grpo_lit.cli.run_folder import locked
from grpo_lit.cli.train import build
from grpo_lit.errors import SystemFault, UserError, on_stop
from grpo_lit.files import append_line, read_lines, read_object, write_whole
from grpo_lit.paths import output_folder
from grpo_lit.tune.report import write_outcome
from grpo_lit.tune.search import Outcome, search
from grpo_lit.tune.space import changes_training, default_space, has_key
from grpo_lit.tune.trial import Changes, Measurement, options_of, run_trial, trial_arguments


@dataclass
class TuneConfig:
    """How the search measures and judges; every other argument is one of ``grpo-lit fit``."""

    output: str | None = None
    """Folder of records and winner; null: tune/ in the configuration's run folder."""
    steps: int = 6
    """Rollout steps of a run."""
    warmup: int = 2
    """First steps of a run that do not count."""
    rounds: int = 3
    """Times that candidate and best so far run in alternation."""
    min_gain: float = 0.02
    """Share of tokens per second below which a gain does not count."""
    tolerance: float = 2e-3
    """Largest difference of loss and mean reward in the first step."""
    timeout_s: float = 900.0
    """Of one run."""
    space: dict[str, list[Any]] | None = None
    """Dotted key -> values to try; null: engine, kernels, micro-batch, checkpointing, rollout rows, CPU threads."""

    def __post_init__(self) -> None:
        if self.warmup < 0 or self.steps <= self.warmup:
            raise UserError("tune.steps", self.steps, f"more than tune.warmup={self.warmup} steps")
        if self.rounds < 2:
            raise UserError("tune.rounds", self.rounds, "at least 2: one run says nothing about the noise")
        if not 0 <= self.min_gain < 1:
            raise UserError("tune.min_gain", self.min_gain, "a share from 0 to 1")
        for name in ("tolerance", "timeout_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"tune.{name}", getattr(self, name), "a number above 0")


def main(arguments: Sequence[str]) -> int:
    """Search, and write the winner."""
    if arguments and arguments[0] in ("-h", "--help"):
        tune_parser().print_help()
        return 0
    options, base = split_arguments(arguments)
    config, passes, rows, on_cuda = resolve(base)
    space = default_space(config, on_cuda) if options.space is None else options.space
    if not space:
        raise UserError("tune.space", space, "at least one key with values to try, or null")
    for key, values in space.items():
        if changes_training(key):
            raise UserError("tune.space", key, "keys that change how fast it trains, not what is trained")
        if not values:
            raise UserError("tune.space", f"{key}: []", "at least one value to try")
        if not has_key(config, key):
            raise UserError("tune.space", key, "keys of this configuration; its sections are model, data and trainer")
    folder = output_folder(options.output or Path(config["trainer"]["default_root_dir"]) / "tune", "tune.output")
    with locked(folder), on_stop(lambda: f"; finished trials are kept in {folder}, the same command goes on"):
        trials = Trials(folder, base, options, passes, fork=not on_cuda)
        outcome = search(
            config,
            space,
            trials.measure,
            rounds=options.rounds,
            tolerance=options.tolerance,
            min_gain=options.min_gain,
            rows=rows,
            say=lambda line: print(line, flush=True),
        )
        write_outcome(folder, outcome, build("tune", [*base, *options_of(outcome.winner)]).dump())
    print("\n".join(closing_text(outcome, folder)))
    return 0


def tune_parser() -> CLIParser:
    """Parser of the settings under ``tune``."""
    parser = CLIParser(prog="grpo-lit tune", description="Find fast settings; takes every option of grpo-lit fit too.")
    parser.add_class_arguments(TuneConfig, "tune", instantiate=False)
    return parser


def split_arguments(arguments: Sequence[str]) -> tuple[TuneConfig, list[str]]:
    """The ``--tune.`` settings, and what goes to ``fit``."""
    own, rest = [], []
    queue = list(arguments)
    while queue:
        argument = queue.pop(0)
        if argument.startswith("--tune."):
            own.append(argument)
            if "=" not in argument and queue and not queue[0].startswith("--"):
                own.append(queue.pop(0))
        else:
            rest.append(argument)
    parser = tune_parser()
    parsed = parser.parse_args(own)
    return TuneConfig(**parsed["tune"].as_dict()), rest


def resolve(base: Sequence[str]) -> tuple[dict[str, Any], int, int, bool]:
    """Resolved configuration, passes and rows of a step, and whether it runs on a GPU. Mistakes end here.

    On a CPU no CUDA call is made: trials are then forks of this process.
    """
    cli = build("tune", base)
    config: dict[str, Any] = yaml.safe_load(cli.dump())
    module = cli.model
    rows = cli.datamodule.prompts_per_step * module.rollout_config.group_size
    on_cuda = config["trainer"]["accelerator"] not in ("cpu",) and cli.trainer.strategy.root_device.type == "cuda"
    return config, module.ppo_passes, rows, on_cuda


class Trials:
    """Runs trials, or finds them among the records of an earlier, interrupted search.

    Args:
        folder: of the search.
        base: arguments of ``fit``.
        options: how to measure.
        passes: optimizer steps of a rollout step.
        fork: see `run_trial`.

    Raises:
        UserError: the folder holds a search of another configuration.
    """

    def __init__(self, folder: Path, base: Sequence[str], options: TuneConfig, passes: int, *, fork: bool) -> None:
        self.folder, self.base, self.options, self.passes, self.fork = folder, list(base), options, passes, fork
        self.path = folder / "runs.jsonl"
        records = read_lines(self.path, {"name": str, "status": str}, repair=True)
        self._known = {record["name"]: record for record in records}
        settings = {"base": self.base, "steps": options.steps, "warmup": options.warmup}
        kept = folder / "search.json"
        if kept.is_file() and read_object(kept) != settings:
            raise UserError("tune.output", str(folder), "another folder: this one holds a search of other settings")
        write_whole(kept, json.dumps(settings, indent=1) + "\n")
        self.ran = 0

    def measure(self, changes: Changes, name: str) -> Measurement:
        """The measurement of a run.

        Raises:
            SystemFault: the untouched configuration itself does not run.
        """
        record = self._known.get(name)
        if record is None or (record["status"] == "timeout" and record["seconds"] < self.options.timeout_s):
            folder = self.folder / "run"
            arguments = trial_arguments(self.base, changes, folder, self.options.steps, self.passes)
            measured = run_trial(
                arguments, folder, fork=self.fork, timeout_s=self.options.timeout_s, warmup=self.options.warmup
            )
            self.ran += 1
            record = {"name": name, "changes": dict(changes), **asdict(measured)}
            append_line(self.path, record)
            self._known[name] = record
        values = {key: value for key, value in record.items() if key not in ("name", "changes")}
        if not changes and values["status"] not in ("ok", "oom"):
            raise SystemFault(
                f"the configuration itself does not run: {values['error']} (see {self.folder / 'run.log'})"
            )
        return Measurement(**values)


def closing_text(outcome: Outcome, folder: Path) -> list[str]:
    """What came of it."""
    lines = [
        f"{len(outcome.comparisons)} candidates tried, {sum(c.decision.accepted for c in outcome.comparisons)} accepted"
    ]
    if outcome.final is not None and outcome.winner:
        gain, changes = outcome.final.decision.gain or 0.0, " ".join(options_of(outcome.winner))
        lines.append(f"winner: {changes}  ({gain:+.1%} tokens/s against the configuration as it was)")
    else:
        lines.append("winner: the configuration as it was; nothing was faster beyond the noise")
    lines.append(f"written: {folder} (winner.yaml, changes.yaml, decisions.jsonl, runs.jsonl, tune.png)")
    return lines
