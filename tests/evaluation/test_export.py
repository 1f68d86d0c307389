"""`grpo-lit export`: what it writes loads elsewhere with the same log-probs, and trains on."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_lit.cli import main
from grpo_lit.cli.train import build
from grpo_lit.evaluation.config import ModelEntry
from grpo_lit.evaluation.model_card import model_card
from grpo_lit.evaluation.models import load_model, resolve_model
from grpo_lit.export import copy_dequantized, export_merged, probe
from grpo_lit.lora import LoRAConfig
from grpo_lit.policy import PolicyConfig, load_policy

from .conftest import MOVING


def trained(run: Path) -> torch.Tensor:
    policy, encoder = load_model(resolve_model("x", ModelEntry(run=str(run)), "cpu"), "cpu")
    return probe(policy.model, encoder.tokenizer)


def probe_folder(folder: Path, base: Path | None = None) -> torch.Tensor:
    if base is None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return probe(model, AutoTokenizer.from_pretrained(folder))
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
    return probe(peft, AutoTokenizer.from_pretrained(folder))


def test_adapter_folder_loads_in_peft(finished_run: Path, tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    assert main(["export", f"--run={finished_run}", "--to=adapter", f"--output={out}"]) == 0
    expected = trained(finished_run)
    assert (probe_folder(out, tiny_llama) - expected).abs().max() < 1e-4
    untrained = probe_folder(tiny_llama)
    assert (untrained - expected).abs().max() > 1e-2, "the adapter does something"


def test_merged_model_loads_in_transformers_and_trains_on(
    fit_arguments: Callable[..., Sequence[str]],
    finished_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "merged"
    assert main(["export", f"--run={finished_run}", f"--output={out}", "--dtype=fp32"]) == 0
    printed = capsys.readouterr().out
    assert "log-probs of the fp32 file against the adapter over the original base: mean" in printed
    expected = trained(finished_run)
    assert (probe_folder(out) - expected).abs().max() < 1e-4
    assert (out / "model.safetensors").is_file()
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2]
    monkeypatch.chdir(finished_run.parent)
    assert main(fit_arguments(out, tmp_path / "again", *MOVING)) == 0
    first = json.loads((tmp_path / "again/metrics.jsonl").read_text().splitlines()[0])
    last = json.loads((finished_run / "metrics.jsonl").read_text().splitlines()[-1])
    assert first["val/accuracy"] == last["val/accuracy"], "goes on from where the run ended"


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_of_an_export_that_does_not_fit_nothing_stays(
    kind: str, finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # the kernel lets no file grow further
    try:
        code = main(["export", f"--run={finished_run}", f"--to={kind}", f"--output={tmp_path / 'out'}"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    error = capsys.readouterr().err.strip()
    assert (code, len(error.splitlines())) == (1, 1), error
    assert "can't be written" in error
    assert list(tmp_path.iterdir()) == []


def test_bf16_file_states_its_rounding(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "bf16"
    assert main(["export", f"--run={finished_run}", "--which=best", f"--output={out}"]) == 0
    stated = json.loads((out / "export.json").read_text())["logprob_difference"]["adapter over the original base"]
    policy, encoder = load_model(resolve_model("x", ModelEntry(run=str(finished_run), which="best"), "cpu"), "cpu")
    apart = (probe_folder(out) - probe(policy.model, encoder.tokenizer)).abs()
    assert float(apart.max()) == pytest.approx(stated["largest"], rel=1e-3)
    assert 1e-6 < stated["mean"] < stated["largest"] < 0.5
    assert AutoModelForCausalLM.from_pretrained(out, dtype="auto").dtype == torch.bfloat16


def test_card_tells_data_settings_and_scores(finished_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "card"
    assert main(["export", f"--run={finished_run}", "--which=best", f"--output={out}", "--to=adapter"]) == 0
    card = (out / "README.md").read_text()
    assert card.startswith("---\nbase_model: ")
    for text in (
        "arithmetic",
        "math_accuracy",
        "rank 4, alpha 32",
        "8 prompts x 4 completions",
        "in-training validation",
    ):
        assert text in card, text
    assert card.count("| best | ") == 1
    assert 'PeftModel.from_pretrained(base, "THIS_FOLDER")' in card


def test_card_of_a_run_with_the_default_optimizer(
    tiny_llama: Path, fit_arguments: Callable[..., Sequence[str]], tmp_path: Path
) -> None:
    config = yaml.safe_load(build("fit", fit_arguments(tiny_llama, tmp_path)[1:]).dump())
    resolved = resolve_model("x", ModelEntry(path=str(tiny_llama)), "cpu")
    card = model_card(resolved, kind="merged", run_config=config, metrics=[], differences={}, evaluation=None)
    assert "| optimizer | AdamW as grpo-lit sets it |" in card
    assert "| batch | 4 prompts x 4 completions |" in card


def test_quantized_base_is_merged_into_original_or_dequantized_weights(finished_run: Path, tmp_path: Path) -> None:
    resolved = resolve_model("x", ModelEntry(run=str(finished_run), quantization="nf4"), "cpu")
    as_trained, encoder = load_model(resolved, "cpu")
    seen = probe(as_trained.model, encoder.tokenizer)
    apart = {}
    for base in ("original", "dequantized"):
        found = export_merged(resolved, tmp_path / base, base=base, dtype="fp32")  # type: ignore[arg-type]
        apart[base] = (probe_folder(tmp_path / base) - seen).abs().max()
        stated = found["model as trained, over the quantized base"].largest
        assert float(apart[base]) == pytest.approx(stated, abs=1e-5)
    assert apart["dequantized"] < 2e-4 < apart["original"]
    plain = load_policy(PolicyConfig(resolved.policy.path, dtype="fp32"), LoRAConfig(rank=4)).model
    before = {name: value.clone() for name, value in plain.named_parameters()}
    assert copy_dequantized(as_trained.model, plain) == 14
    changed = {name for name, value in plain.named_parameters() if not torch.equal(value, before[name])}
    assert len(changed) == 14
    assert not any("embed" in name or "lm_head" in name for name in changed)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--to=gguf"], ["to: got gguf, accepted is merged, adapter"]),
        (["--base=dequantized"], ["base='dequantized'", "original"]),
        (["--output=."], ["output='.'", "empty"]),
        (["--output=file"], ["output='file'", "folder"]),
        (["--evaluation=nothing"], ["evaluation='nothing'"]),
        (["--run=nothing"], ["run='nothing'"]),
    ],
)
def test_export_refuses(
    extra: list[str], words: list[str], finished_run: Path, tmp_path: Path, refused: Callable[..., None]
) -> None:
    (tmp_path / "file").touch()
    refused(["export", f"--run={finished_run}", "--output=out", *extra], *words)


def test_a_run_that_saved_memory_exports_the_same_weights(finished_run: Path, tmp_path: Path) -> None:
    """Offloaded activations belong to the backward alone, and quantized tables never reach the file."""
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    config = yaml.safe_load((run / "config.yaml").read_text())
    saving = {"gradient_checkpointing": True, "activation_offload": True, "head_quantization": "nf4"}
    config["model"]["policy"] |= saving
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["export", f"--run={run}", f"--output={tmp_path / 'merged'}", "--dtype=fp32"]) == 0
    assert (probe_folder(tmp_path / "merged") - trained(finished_run)).abs().max() < 1e-4
    assert "quantized base" in (tmp_path / "merged" / "export.json").read_text()
