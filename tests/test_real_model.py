"""The main job on a real pretrained model and real data: SmolLM2-135M, NF4 base, LoRA, GSM8K rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from grpo_lit.checkpoint import read_checkpoint
from grpo_lit.cli.train import build, run
from grpo_lit.lora import LoRAConfig, adapters_off, lora_layers
from grpo_lit.model_source import resolve_model_source
from grpo_lit.policy import PolicyConfig, load_policy
from grpo_lit.prompts import PromptEncoder, load_tokenizer


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_three_steps_on_gsm8k(smollm2: str, shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft", reason="peft reads the exported folder; it is in the test extra")
    root = tmp_path / "run"
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("user_rewards", None)
    (tmp_path / "user_rewards.py").write_text(
        "def vowels(prompts, completions, **columns):\n    return [sum(c in 'aeiou' for c in t) for t in completions]\n"
    )
    cli = build(
        "fit",
        [
            "--config=smollm2_gsm8k",
            f"--data.path={shared_data / 'gsm8k_train.jsonl'}",
            "--trainer.accelerator=cpu",
            "--model.policy.dtype=fp32",
            f"--trainer.default_root_dir={root}",
            "--trainer.max_steps=3",
            "--data.prompts_per_step=2",
            "--model.rollout.group_size=2",
            "--model.rollout.sampling.max_completion_length=6",
            "--data.val_prompts=0",
            "--model.rewards=[math_accuracy, user_rewards.vowels]",  # a right answer within 6 tokens is rare
        ],
    )
    run(cli, "fit", None)
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert [line["optimizer_step"] for line in lines] == [1, 2, 3]
    assert all(line["train/loss"] is not None and line["train/nonfinite_skips"] == 0 for line in lines)

    checkpoint = read_checkpoint(root / "checkpoints" / "last.ckpt")
    adapter = sum(tensor.numel() * tensor.element_size() for tensor in checkpoint["state_dict"].values())
    optimizer = 2 * adapter  # AdamW's two moments
    assert (root / "checkpoints" / "last.ckpt").stat().st_size <= 3 * (adapter + optimizer)

    encoder = PromptEncoder(load_tokenizer(resolve_model_source(smollm2)))
    prompt = torch.tensor([encoder.encode(encoder.render_chat([{"role": "user", "content": "What is 2+3?"}]))])
    answer = torch.tensor([encoder.tokenizer("The answer is 5.", add_special_tokens=False).input_ids])
    ones = [torch.ones_like(ids, dtype=torch.bool) for ids in (prompt, answer)]
    config = PolicyConfig(smollm2, dtype="fp32", quantization="nf4")
    ours = cli.model.live_policy
    fresh = _without_adapters(load_policy(config, LoRAConfig(1, targets=["q_proj"])))
    after = {name.replace(".base_layer", ""): value for name, value in ours.model.state_dict().items()}
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, after[name]), f"the frozen base changed: {name}"
    theirs = peft.PeftModel.from_pretrained(fresh, root / "adapter")
    with torch.no_grad():
        trained = ours.score(prompt, ones[0], answer, ones[1]).logprobs
        with adapters_off(ours.model):
            base = ours.score(prompt, ones[0], answer, ones[1]).logprobs
        logits = theirs(torch.cat([prompt, answer], 1)).logits[:, prompt.shape[1] - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, answer.unsqueeze(-1)).squeeze(-1)
    assert (trained - base).abs().max() > 1e-3, "the adapters changed nothing"
    assert (trained - expected).abs().max() <= 1e-4


def _without_adapters(policy: object) -> torch.nn.Module:
    model = policy.model  # type: ignore[attr-defined]
    for name, layer in list(lora_layers(model)):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.base_layer)
    return model
