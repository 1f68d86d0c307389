"""README.md of an exported model: where it comes from, what it was trained on, and how well it does."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from grpo_lit.evaluation.models import ResolvedModel
from grpo_lit.evaluation.versions import versions
from grpo_lit.markdown import table


def model_card(
    resolved: ResolvedModel,
    *,
    kind: str,
    run_config: Mapping[str, Any] | None,
    metrics: list[dict[str, Any]],
    differences: Mapping[str, Any],
    evaluation: Path | None,
) -> str:
    """Text of the card.

    Args:
        resolved: base and weights.
        kind: adapter or merged.
        run_config: the run's resolved configuration, where there is a run.
        metrics: records of its ``metrics.jsonl``.
        differences: what merging changed, by what it was compared with.
        evaluation: folder of ``grpo-lit evaluate`` whose scores are quoted.
    """
    base = resolved.policy.path
    front = {
        "base_model": base,
        "library_name": "peft" if kind == "adapter" else "transformers",
        "tags": ["grpo", "lora"],
    }
    parts = [
        "---",
        yaml.safe_dump(front, sort_keys=False).strip(),
        "---",
        "",
        f"# {Path(base.rstrip('/')).name}, GRPO",
        "",
    ]
    parts += [_origin(resolved, kind, run_config), ""]
    if run_config is not None:
        parts += ["## Training", "", *_training(run_config), ""]
    if scores := _scores(metrics):
        parts += ["## Held-out accuracy during training", "", *scores, ""]
    if evaluation is not None:
        parts += ["## Evaluation", "", *_evaluation(evaluation), ""]
    if differences:
        parts += [
            "## Log-probs of this file",
            "",
            *(f"- against the {name}: {d}" for name, d in differences.items()),
            "",
        ]
    parts += ["## Loading", "", *_loading(kind, base), ""]
    return "\n".join(parts)


def _origin(resolved: ResolvedModel, kind: str, run_config: Mapping[str, Any] | None) -> str:
    what = "LoRA adapter for" if kind == "adapter" else "Merged model from"
    by = (
        ""
        if resolved.selection_source is None
        else f" Of several checkpoints this is the best by {resolved.selection_source}."
    )
    how = "trained with Group Relative Policy Optimization (arXiv 2402.03300) by grpo-lit"
    stack = ", ".join(f"{name} {version}" for name, version in versions().items() if name != "device")
    return f"{what} `{resolved.policy.path}`, {how}.{by if run_config is not None else ''} Exported with {stack}."


def _training(config: Mapping[str, Any]) -> list[str]:
    model, data = config["model"], config["data"].get("init_args", config["data"])
    rollout, lora, optimizer = model["rollout"], model.get("lora"), model.get("optimizer")
    if isinstance(optimizer, Mapping):
        optimizer = f"{optimizer['class_path']} {optimizer.get('init_args', '')}".strip()
    elif optimizer == "grpo_lit.module._adamw":
        optimizer = "AdamW as grpo-lit sets it"
    settings = {
        "data": " ".join(str(x) for x in (data.get("dataset"), data.get("path"), data.get("dataset_options")) if x),
        "prompt": repr(data.get("prompt_template")),
        "rewards": ", ".join(model["rewards"]),
        "batch": f"{data.get('prompts_per_step')} prompts x {rollout['group_size']} completions",
        "optimizer": optimizer,
        "LoRA": "none" if not lora else f"rank {lora['rank']}, alpha {lora['alpha']}, {', '.join(lora['targets'])}",
        "base in training": f"{model['policy']['dtype']}, {model['policy']['quantization'] or 'not quantized'}",
        "completion length": rollout["sampling"]["max_completion_length"],
        "seed": config.get("seed_everything"),
    }
    return table(["", ""], settings.items())


def _scores(metrics: list[dict[str, Any]]) -> list[str]:
    measured = [line for line in metrics if line.get("val/accuracy") is not None]
    if not measured:
        return []
    ends = {"first": measured[0], "best": max(measured, key=lambda x: x["val/accuracy"]), "last": measured[-1]}
    rows = [[name, line["step"], f"{line['val/accuracy']:.4f}"] for name, line in ends.items()]
    return table(["", "rollout step", "accuracy"], rows)


def _evaluation(folder: Path) -> list[str]:
    rows = list(csv.DictReader((folder / "summary.csv").read_text(encoding="utf-8").splitlines()))
    shown = [
        [r["model"], r["dataset"], r["protocol"], f"{r['num_problems']} x {r['samples']}"]
        + [f"{float(r['value']):.3f} [{float(r['low']):.3f}, {float(r['high']):.3f}]"]
        for r in rows
        if r["metric"] == "pass@1"
    ]
    return table(["model", "dataset", "protocol", "problems x samples", "pass@1"], shown)


def _loading(kind: str, base: str) -> list[str]:
    if kind == "merged":
        code = ['model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER", dtype="auto")']
        names = "AutoModelForCausalLM"
    else:
        names = "AutoModelForCausalLM"
        code = ["from peft import PeftModel", f'base = AutoModelForCausalLM.from_pretrained("{base}")']
        code += ['model = PeftModel.from_pretrained(base, "THIS_FOLDER")']
    return ["```python", f"from transformers import {names}", *code, "```"]
