"""Every mistake ends in one line that names the argument, the value and what is accepted; nothing is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from grpo_lit.base_model import load_base_model
from grpo_lit.checkpoint import lora_fingerprint, model_fingerprint
from grpo_lit.cli.train import check_checkpoint
from grpo_lit.errors import UserError
from grpo_lit.lora import LoRAConfig, load_adapter
from grpo_lit.model_source import load_model_config, resolve_model_source
from grpo_lit.module import GRPOModule
from grpo_lit.policy import PolicyConfig
from grpo_lit.skeleton import check_skeleton

WHOLE_ADAPTER = '{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}'

Fit = Callable[..., Sequence[str]]
Refused = Callable[..., None]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--model.los.beta=1"], ["model.los.beta", "did you mean model.loss.beta"]),
        (["--data.prompts=3"], ["prompts", "did you mean data."]),
        (["--model.lora.rnk=3"], ["'model.lora.rnk'", "did you mean model.lora.rank"]),
        (["--model.policy.path="], ["model.policy.path=''", "a hub id"]),
        (["--model.policy.path=cut.gguf"], ["model.policy.path='cut.gguf'", "a .gguf file"]),
        (["--model.rewards=[math.sqrt]"], ["model.rewards='sqrt'", "it needs 'x'"]),
        (["--model.log_completions=-1"], ["model.log_completions=-1", "at least 0"]),
        (["--data.dataset=custom", "--data.path=ok.jsonl", "--data.val_split=test"], ["data.val_split='test'"]),
        (["--model.loss.beta=x"], ["model.loss.beta", "got x", "float"]),
        (["--model.loss.beta=-1"], ["model.loss.beta=-1", ">= 0"]),
        (
            ["--model.rollout.sampling.stop_at=x"],
            ["model.rollout.sampling.stop_at: got x, accepted is boxed, answer_tag"],
        ),
        (
            ["--model.kernels={linear_logprobs: triton}"],
            ["model.kernels.linear_logprobs='triton'", "'torch' on the CPU"],
        ),
        (["--model.policy.gradient_checkpointing=99"], ["gradient_checkpointing=99", "the model's 2 layers"]),
        (["--model.optimizer=torch.optim.AdamW", "--model.optimizer.init_args.lr=-1"], ["Invalid learning rate: -1"]),
        (["--model.kernels=[]"], ["model.kernels: got [], accepted is dict"]),
        (["--model.loss.objective=clipp"], ["model.loss.objective", "clipp", "cispo"]),
        (["--model.loss.delta=1.1"], ["model.loss.delta=1.1", "1 + epsilon_high"]),
        (["--data.path=missing.jsonl"], ["data.path='missing.jsonl'", "existing"]),
        (["--data.val_path=missing.jsonl"], ["missing.jsonl", "existing"]),
        (["--data.dataset=gsm9k"], ["data.dataset='gsm9k'", "gsm8k"]),
        (["--data.prompts_per_step=0"], ["data.prompts_per_step=0", "at least 1"]),
        (["--data.prompt_template=no placeholder"], ["data.prompt_template", "{question}"]),
        (["--data.val_prompts=1000"], ["data.val_prompts=1000", "fewer"]),
        (["--data.max_prompt_length=1"], ["data.max_prompt_length=1"]),
        (["--data.sent_stages=3"], ["data.sent_stages=3", "data.sent_cache"]),
        (["--data.sent_epochs_per_stage=2", "--data.sent_cache=x"], ["data.sent_cache='x'"]),
        (["--data.sampler.fraction=0.25"], ["data.sampler.fraction=0.25", "name: weighted"]),
        (["--data.chat_template=true"], ["data.chat_template=True", "no chat template"]),
        (["--model.policy.path=./not_there"], ["model.policy.path='./not_there'", "a folder with config.json"]),
        (["--model.policy.path=."], ["model.policy.path='.'", "a folder with config.json"]),
        (["--model.policy.path=package:no_such_package"], ["package:no_such_package", "installed package"]),
        (["--model.rollout.group_size=1"], ["model.rollout.group_size=1", "at least 2"]),
        (["--model.rollout.sampling.top_p=0.9"], ["model.rollout.sampling.top_p=0.9", "1.0"]),
        (["--model.micro_batch_size=0"], ["model.micro_batch_size=0", "at least 1"]),
        (["--model.rewards=[nothing]"], ["nothing", "math_accuracy"]),
        (["--model.lora.targets=[nothing]"], ["model.lora.targets='nothing'", "q_proj"]),
        (["--model.lora.rank=65"], ["model.lora.rank=65", "at most 64"]),
        (["--model.policy.attn_implementation=sdpaa"], ["model.policy.attn_implementation='sdpaa'", "sdpa"]),
        (["--model.lora=null", "--model.policy.quantization=nf4"], ["model.lora=None", "4-bit"]),
        (["--trainer.strategy=deepspeed"], ["trainer.strategy='deepspeed'", "pip install -U deepspeed"]),
        (["--trainer.precision=bf16-mixed"], ["trainer.precision", "model.policy.dtype"]),
        (["--trainer.accumulate_grad_batches=2"], ["trainer.accumulate_grad_batches=2", "model.micro_batch_size"]),
        (["--checkpoint.every_n_rollout_steps=0"], ["checkpoint.every_n_rollout_steps=0"]),
        (["--ckpt_path=last"], ["ckpt_path='last'", "existing checkpoint"]),
        (["--ckpt_path=~/nowhere.ckpt"], ["ckpt_path='~/nowhere.ckpt'", f"no {Path.home()}/nowhere.ckpt"]),
        (["--config=quickstrat"], ["--config='quickstrat'", "quickstart"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_mistake_is_one_line_with_exit_code_2(
    extra: list[str], words: list[str], tiny_llama: Path, fit_arguments: Fit, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    write_rows(tmp_path / "ok.jsonl", [{"question": "1+1", "answer": "2"}] * 20)
    refused(fit_arguments(tiny_llama, "run", *extra), *words)


def test_a_rank_above_the_smaller_matrices_is_told(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As PEFT takes it: 256 over keys of 128 columns is in use."""
    policy = PolicyConfig(path=str(tiny_llama))
    check_skeleton(policy, LoRAConfig(rank=32))
    assert caplog.messages == []
    check_skeleton(policy, LoRAConfig(rank=64))
    assert caplog.messages == [
        "model.lora.rank=64 is above the rank of ['k_proj (32)', 'v_proj (32)']: more parameters, no more effect"
    ]


def write_rows(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["at least one row"]),
        ([{"question": "1+1?", "answer": "two, no mark"}], ["row 1", "answer"]),
        ([{"question": "1+1?", "answer": "#### 2"}, {"question": "2+2?"}], ["row 2", "answer"]),
        ([{"answer": "#### 2"}], ["row 1", "question"]),
        (["{not json"], ["line 1", "JSON"]),
        (["[1, 2]"], ["line 1", "JSON object"]),
    ],
)
def test_bad_rows_name_file_and_row(
    rows: list[object], words: list[str], tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, refused: Refused
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    refused(fit_arguments(tiny_llama, "run", "--data.dataset=gsm8k", f"--data.path={path}"), "rows.jsonl", *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="only a machine without CUDA can lack it")
@pytest.mark.parametrize("accelerator", ["gpu", "cuda"])
def test_cuda_config_without_cuda_is_the_system_s_fault(
    accelerator: str, tiny_llama: Path, fit_arguments: Fit, refused: Refused
) -> None:
    arguments = fit_arguments(tiny_llama, "run", f"--trainer.accelerator={accelerator}")
    refused(arguments, "trainer.accelerator", "cpu", code=1)


def edit_tokenizer(source: Path, target: Path, **changes: object) -> Path:
    shutil.copytree(source, target)
    config = json.loads((target / "tokenizer_config.json").read_text()) | changes
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    return target


def test_tokenizer_without_eos_is_refused_and_one_without_pad_pads_with_eos(
    tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, refused: Refused
) -> None:
    from grpo_lit.model_source import resolve_model_source
    from grpo_lit.prompts import load_tokenizer

    no_pad = edit_tokenizer(tiny_llama, tmp_path / "no_pad", pad_token=None)
    tokenizer = load_tokenizer(resolve_model_source(str(no_pad)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    no_eos = edit_tokenizer(tiny_llama, tmp_path / "no_eos", eos_token=None)
    refused(fit_arguments(no_eos, "run"), "EOS", "no_eos")


@pytest.mark.faults
def test_damaged_checkpoint_is_refused(tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, refused: Refused) -> None:
    for name, content in (("torn.ckpt", b"PK\x03\x04 half a file"), ("text.ckpt", b"hello")):
        (tmp_path / name).write_bytes(content)
        refused(fit_arguments(tiny_llama, "run", f"--ckpt_path={name}"), name)


@pytest.mark.faults
def test_checkpoint_with_nan_in_its_weights_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    module = GRPOModule(PolicyConfig(path=str(tiny_llama)))
    entry = {
        "model": model_fingerprint(load_model_config(resolve_model_source(str(tiny_llama)))),
        "lora": lora_fingerprint(module.lora_config),
        "rollout_step": 3,
    }
    for value in (1.0, float("nan"), float("inf")):
        torch.save({"state_dict": {"w": torch.tensor([0.0, value])}, "grpo_lit": entry}, tmp_path / "last.ckpt")
        if value == 1.0:
            check_checkpoint(tmp_path / "last.ckpt", module)
        else:
            with pytest.raises(UserError, match=r"ckpt_path=.*whose weights are finite"):
                check_checkpoint(tmp_path / "last.ckpt", module)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("config", "weights", "words"),
    [
        ("{", b"", "adapter_config.json can be read"),
        ("[]", b"", "peft_type is LORA"),
        ('{"peft_type": "LORA"}', b"", "has r, lora_alpha, target_modules"),
        (
            WHOLE_ADAPTER,
            None,
            ".bin files are pickled",
        ),
        (WHOLE_ADAPTER, b"\x80\x04.", "whole weights"),
    ],
)
def test_damaged_adapter_is_refused(
    config: str, weights: bytes | None, words: str, tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text(config)
    if weights is not None:
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04.")
    model = LlamaForCausalLM.from_pretrained(tiny_llama)
    with pytest.raises(UserError, match=rf"^adapter=.*{re.escape(words)}"):
        load_adapter(model, tmp_path)


@pytest.mark.faults
@pytest.mark.parametrize(
    "optimizer",
    [
        "{class_path: os.system, init_args: {command: touch ran}}",
        "{class_path: subprocess.getoutput, init_args: {cmd: touch ran}}",
        "os.system",
        "torch.nn.Linear",
    ],
)
def test_what_is_no_optimizer_is_not_called(
    optimizer: str, tiny_llama: Path, fit_arguments: Fit, refused: Refused
) -> None:
    refused(fit_arguments(tiny_llama, "run", f"--model.optimizer={optimizer}"), "model.optimizer")


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["truncated", "pickled", "torn"])
def test_base_weights_that_are_not_whole_or_run_code_are_refused(kind: str, tiny_llama: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    weights = folder / "model.safetensors"
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    else:
        weights.unlink()
        torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    if kind == "torn":
        (folder / "pytorch_model.bin").write_bytes(b"PK\x03\x04 half a file")
    config = PolicyConfig(path=str(folder))
    with pytest.raises(UserError, match=r"model.policy.path=.*whole and run no code"):
        load_base_model(config, resolve_model_source(str(folder)), torch.device("cpu"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.faults
def test_pickled_code_in_a_checkpoint_does_not_run(
    tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, refused: Refused
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"state_dict": Evil()}, tmp_path / "evil.ckpt")
    refused(fit_arguments(tiny_llama, "run", "--ckpt_path=evil.ckpt"), "evil.ckpt")


@pytest.mark.faults
def test_two_runs_into_one_folder_are_refused(
    tiny_llama: Path, tmp_path: Path, fit_arguments: Fit, refused: Refused
) -> None:
    from grpo_lit.cli.run_folder import locked

    with locked(tmp_path / "run"):
        refused(fit_arguments(tiny_llama, "run"), "no other run")


@pytest.mark.parametrize("name", ["kernels", "memory", "rollout", "scaling", "step"])
def test_benchmarks_take_no_unknown_value(name: str, refused: Refused) -> None:
    words = f"argument --csv: expected one argument; grpo-lit bench {name} --help lists what is accepted"
    refused(["bench", name, "--csv"], words)


def test_a_reader_that_has_read_enough_sees_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-m", "grpo_lit", "--help"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


def test_a_limit_that_is_no_size(refused: Refused) -> None:
    for size in ("much", "1kB"):
        refused(["bench", "memory", f"--cap={size}"], f"--cap='{size}': accepted is a size from 1MiB on")


def test_a_limit_that_nothing_is_held_to(refused: Refused) -> None:
    words = "--cap='4GiB': accepted is only where a CUDA GPU is measured"
    refused(["bench", "memory", "--cpu", "--cap=4GiB"], words)


def test_a_file_that_can_t_be_written_is_one_line(tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "file").touch()
    wanted = ["--shape=tiny", "--rows=1", "--tokens=1", "--samples=1", "--engines=hf", "--formats=bf16"]
    refused(["bench", "rollout", *wanted, f"--csv={tmp_path / 'file/x.csv'}"], f"{tmp_path / 'file'} is a file")


def test_unknown_command(refused: Refused) -> None:
    refused(["fti"], "fit")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /dev/full, a device that is always full")
@pytest.mark.faults
def test_full_disk_keeps_the_last_good_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write goes to a real full device: what the operating system says reaches the user."""
    from grpo_lit.checkpoint import AtomicCheckpointIO, read_checkpoint
    from grpo_lit.errors import SystemFault

    writer, target = AtomicCheckpointIO(), tmp_path / "last.ckpt"
    writer.save_checkpoint({"step": 1}, target)
    original = Path.open

    def open_full(self: Path, mode: str = "r", *args: object, **kwargs: object) -> object:
        return original(Path("/dev/full") if self.suffix == ".tmp" else self, mode, *args, **kwargs)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(SystemFault, match="No space left on device.*keeps the last good checkpoint"):
        writer.save_checkpoint({"step": 2, "tensor": torch.zeros(100_000)}, target)
    monkeypatch.undo()
    assert read_checkpoint(target) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]
