"""``grpo-lit export``: a run, checkpoint or adapter as a PEFT folder or as one merged model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from grpo_lit.callbacks.metrics_file import read_metrics
from grpo_lit.cli.parser import CLIParser
from grpo_lit.cli.train import quiet_third_parties
from grpo_lit.errors import UserError, typed_names
from grpo_lit.evaluation.config import ModelEntry
from grpo_lit.evaluation.model_card import model_card
from grpo_lit.evaluation.models import read_run_config, resolve_model
from grpo_lit.export import Difference, export_adapter, export_merged, write_differences
from grpo_lit.files import whole_folder, write_whole
from grpo_lit.paths import output_folder


def main(arguments: Sequence[str]) -> int:
    """Parse, export, measure, and write the model card."""
    quiet_third_parties()
    parser = CLIParser(prog="grpo-lit export", description="Export trained weights for other tools.")
    parser.add_class_arguments(ModelEntry, None, instantiate=False, skip={"dtype", "quantization"})
    to = Literal["merged", "adapter"]
    parser.add_argument("--to", type=to, default="merged", help="merged: one model. adapter: a PEFT folder.")
    parser.add_argument("--output", type=str, required=True, help="Folder to write; must be empty or missing.")
    parser.add_argument("--dtype", type=Literal["bf16", "fp16", "fp32"], default="bf16", help="Of the merged weights.")
    parser.add_argument(
        "--base",
        type=Literal["original", "dequantized"],
        default="original",
        help="Merge into the original weights, or into the dequantized ones of a 4-bit base.",
    )
    parser.add_argument("--evaluation", type=str | None, default=None, help="Evaluation folder quoted in the card.")
    options = parser.parse_args(list(arguments))
    folder = output_folder(options.output, "output")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError("output", str(folder), "an empty or a new folder")
    evaluation = None if options.evaluation is None else Path(options.evaluation)
    if evaluation is not None and not (evaluation / "summary.csv").is_file():
        raise UserError("evaluation", options.evaluation, "a folder of grpo-lit evaluate")
    fields = ("path", "adapter", "ckpt_path", "run", "which")
    entry = ModelEntry(**{name: options[name] for name in fields})
    if entry.run is None and entry.path is None and entry.adapter is None:
        raise UserError("run", None, "a run folder, or --adapter of an adapter, or --path and --ckpt_path")
    if entry.run is not None and (entry.path or entry.adapter or entry.ckpt_path):
        raise UserError("run", entry.run, "null where path, adapter or ckpt_path is given: one of them")
    with typed_names({"models.export": ""}):
        resolved = resolve_model("export", entry, "cpu")
    if options.to == "adapter" and resolved.adapter is None and resolved.ckpt_path is None:
        raise UserError("to", "adapter", "merged: these weights have no adapter")
    run_config = None if entry.run is None else read_run_config(entry.run, argument="run")
    metrics = [] if entry.run is None else read_metrics(Path(entry.run) / "metrics.jsonl")
    differences: dict[str, Difference] = {}
    with whole_folder(folder) as made:
        if options.to == "adapter":
            export_adapter(resolved, made)
        else:
            print("merging on the CPU, in float32, and comparing log-probs before and after", flush=True)
            differences = export_merged(resolved, made, base=options.base, dtype=options.dtype)
            write_differences(made, differences)
        card = model_card(
            resolved,
            kind=options.to,
            run_config=run_config,
            metrics=metrics,
            differences=differences,
            evaluation=evaluation,
        )
        write_whole(made / "README.md", card)
    for name, difference in differences.items():
        print(f"log-probs of the {options.dtype} file against the {name}: {difference}")
    print(f"written: {folder} ({', '.join(sorted(path.name for path in folder.iterdir()))})")
    return 0
