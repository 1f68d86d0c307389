"""`grpo-lit generate`: streaming, conversations, and weights of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from grpo_lit.cli import main

Fit = Callable[..., Sequence[str]]
COMMON = ["generate", "--policy.dtype=fp32", "--sampling.max_completion_length=12", "--device=cpu"]


def test_streamed_text_is_the_text_of_the_engine(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*COMMON, f"--policy.path={tiny_llama}", "--prompt=1+2=", "--prompt=what", "--seed=5"]
    texts = []
    for stream in ("false", "true"):
        assert main([*arguments, f"--stream={stream}"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].split() == texts[1].split()
    assert len("".join(texts[0].split())) > 5


def test_conversations_go_through_the_chat_template(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] }}{{ m['content'] }} {% endfor %}a"
    tokenizer.save_pretrained(model)
    talk = [
        {"role": "user", "content": "1+2"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "4+5"},
    ]
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps(talk) + "\n")
    outputs = []
    for extra in ([f"--messages={file}"], ["--chat=false", "--prompt=u1+2 a3 u4+5 a"]):
        assert main([*COMMON, f"--policy.path={model}", "--sampling.temperature=0", *extra]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != "\n"
    file.write_text("[3]\n")
    assert main([*COMMON, f"--policy.path={model}", f"--messages={file}"]) == 2
    assert "line 1" in capsys.readouterr().err


def test_run_answers_like_its_adapter(
    fit_arguments: Fit, tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    moves = ["--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=5", "--model.rewards=[boxed_format]"]
    moves += ["--model.length_penalty=0.5", "--trainer.enable_progress_bar=false"]
    assert main(list(fit_arguments(tiny_llama, root, *moves))) == 0
    capsys.readouterr()
    texts = {}
    for name, extra in {
        "run": [f"--run={root}"],
        "adapter": [f"--adapter={root / 'adapter'}"],
        "base": [f"--run={root}", "--which=base"],
    }.items():
        assert main([*COMMON, "--samples=4", "--prompt=1+2=", *extra]) == 0
        texts[name] = capsys.readouterr().out
    assert texts["run"] == texts["adapter"] != texts["base"]
    assert main(["generate", "--prompt=1", f"--run={root}", "--policy.quantization=nf4"]) == 2
    assert "error: policy.quantization='nf4': accepted is None, as in the run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--stream=true", "--samples=2"], "stream=True"),
        (["--engine=nothing"], "engine: got nothing, accepted is hf, graph, vllm"),
        (["--which=worst"], "which: got worst, accepted is base, final, best, last"),
        (["--messages=missing.jsonl"], "messages='missing.jsonl'"),
        (["--run=missing"], "run='missing'"),
        (["--run=missing", "--adapter=other"], "adapter='other'"),
        (["--run=missing", "--ckpt_path=other"], "ckpt_path='other'"),
        (["--device=tpu"], "device='tpu': accepted is cpu or cuda"),
        (["--policy.path=null"], "policy.path=None: accepted is the base model"),
        (["--policy.path=./missing"], "policy.path='./missing'"),
        (
            ["--policy.path=null", "--adapter=missing"],
            "adapter='missing': accepted is a PEFT adapter folder with adapter_config.json",
        ),
        (["--sampling.top_p=2"], "sampling.top_p=2.0"),
        (["--samples=0"], "samples=0"),
    ],
)
def test_generate_refuses(extra: list[str], words: str, refused: Callable[..., None]) -> None:
    refused(["generate", "--prompt=x", "--policy.path=p", *extra], f"error: {words}")
