"""Every sampled text with its rewards, one file per rollout step, and a table of some in the logger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

from grpo_lit.files import write_whole
from grpo_lit.markdown import quoted, table

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule
    from grpo_lit.sampling_step import StepRows


class CompletionsFile(Callback):
    """Writes ``completions/step_000123.jsonl``: a JSON object per completion, groups together.

    Fields: step, prompt_index (row of the dataset), completion_index (number in its group), prompt, completion,
    reward (null where every function abstained), rewards (by function), num_tokens, truncated, seed. The file is
    written whole and renamed, so a repeated step replaces it by the same.

    Args:
        every_n_rollout_steps: how often; 1 keeps every completion of the run.
    """

    def __init__(self, every_n_rollout_steps: int = 1) -> None:
        self.every_n_rollout_steps = every_n_rollout_steps

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Gather the rows of all ranks; rank 0 writes."""
        module = cast("GRPOModule", pl_module)
        if module.rollout_step % self.every_n_rollout_steps or module.step_rows is None:
            return
        ranks = module.world.gather(records_of(module, module.step_rows))
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        records = sorted(
            (record for rank in ranks for record in rank), key=lambda r: (r["position"], r["completion_index"])
        )
        for record in records:
            del record["position"]
        write_records(Path(trainer.default_root_dir) / "completions", module.rollout_step, records)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                table = markdown_table(records[: module.log_completions])
                logger.experiment.add_text("rollout/completions", table, module.rollout_step)


def records_of(module: GRPOModule, rows: StepRows) -> list[dict[str, Any]]:
    """A record per row of this rank."""
    groups, lengths = rows.rollout.group_ids.tolist(), rows.rollout.lengths.tolist()
    truncated, rewards = rows.rollout.truncated.tolist(), rows.rewards.tolist()
    per_function = {name: values.tolist() for name, values in rows.per_function.items()}
    return [
        {
            "step": module.rollout_step,
            "prompt_index": rows.prompt_indices[i],
            "completion_index": rows.completion_indices[i],
            "prompt": rows.prompts[i],
            "completion": rows.completions[i],
            "reward": _or_none(rewards[i]),
            "rewards": {name: _or_none(values[i]) for name, values in per_function.items()},
            "num_tokens": lengths[i],
            "truncated": truncated[i],
            "seed": module.seed,
            "position": groups[i],
        }
        for i in range(len(groups))
    ]


def _or_none(value: float) -> float | None:
    return None if value != value else value


# JSON lets these stand in a text, and str.splitlines, with which many read JSON lines, breaks there.
_SEPARATORS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def write_records(folder: Path, step: int, records: list[dict[str, Any]]) -> None:
    """Write one step's file atomically."""
    text = "".join(json.dumps(record, ensure_ascii=False).translate(_SEPARATORS) + "\n" for record in records)
    write_whole(folder / f"step_{step:06d}.jsonl", text)


def markdown_table(records: list[dict[str, Any]]) -> str:
    """Prompt, completion and reward as a Markdown table; line breaks and bars are made harmless."""
    rows = [[quoted(r["prompt"]), quoted(r["completion"]), r["reward"], r["num_tokens"]] for r in records]
    return "\n".join(table(["prompt", "completion", "reward", "tokens"], rows))
