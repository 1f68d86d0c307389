"""Mistakes are told under the names that were typed, before a model loads and before an earlier run is touched."""

from __future__ import annotations

import shlex
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from grpo_lit.cli import main
from grpo_lit.cli.train import build, end_text
from grpo_lit.errors import SystemFault, UserError, typed_names
from grpo_lit.hub import offline_if_unreachable
from grpo_lit.model_source import load_model_config, resolve_model_source
from grpo_lit.prompts import load_tokenizer

Fit = Callable[..., Sequence[str]]
Refused = Callable[..., None]
EVALUATION = "--trainer.callbacks+=grpo_lit.callbacks.VLLMEvaluation"
DATASETS = "--trainer.callbacks.datasets"
ROWS = '{"question": "1+1", "answer": "2"}\n'


@pytest.fixture(autouse=True)
def _in_a_folder_of_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text(ROWS)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "odd.jsonl").write_text('{"task": "1+1"}\n')
    (tmp_path / "file").touch()
    (tmp_path / "twice.yaml").write_text("trainer:\n  max_steps: 1\n  max_steps: 2\n")
    (tmp_path / "long.jsonl").write_text(ROWS.replace("1+1", "1+" * 100))
    for name, file, text in (
        ("torn", "config.yaml", "model: ["),
        (
            "odd",
            "adapter_config.json",
            '{"peft_type": "LORA", "r": "x", "lora_alpha": 8, "target_modules": ["q_proj"]}',
        ),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--model.rollout.vigor_initial_count=0"], "model.rollout.vigor_initial_count=0: accepted is at least 1"),
        (["--model.rollout.vigor_rounds=0"], "model.rollout.vigor_rounds=0"),
        (["--trainer.devices=0"], "trainer.devices='0': accepted is at least 1 device"),
        (["--trainer.devices=-5"], "trainer.devices='-5'"),
        (["--trainer.strategy=nothing"], "trainer.strategy='nothing'"),
        (["--trainer.default_root_dir=file"], "trainer.default_root_dir='file': accepted is a folder"),
        (["--trainer.default_root_dir=file/run"], "trainer.default_root_dir='file/run': accepted is a folder"),
        (["--trainer.max_steps=-7"], "trainer.max_steps=-7"),
        (["--trainer.fast_dev_run=-1"], "trainer.fast_dev_run=-1"),
        (["--trainer.max_time=soon"], "trainer.max_time='soon'"),
        (["--trainer.val_check_interval=-1"], "trainer.val_check_interval=-1"),
        (["--model.lora.alpha=.nan"], "model.lora.alpha=nan"),
        (["--model.rewards=[os.path.join]"], "model.rewards='join': accepted is functions of prompts, completions"),
        (["--model.lora.rank=true"], "model.lora.rank: got True, accepted is int"),
        (["--trainer.accelerator=tpu"], "trainer.accelerator='tpu'"),
        (["--checkpoint.save_top_k=-5"], "checkpoint.save_top_k=-5"),
        (["--checkpoint.mode=up"], "checkpoint.mode='up'"),
        (["--model.optimizer.lr=1"], "model.optimizer: got lr='1' without a class, accepted is --model.optimizer "),
        (["--config=twice.yaml"], "--config='twice.yaml': accepted is valid YAML (max_steps stands twice in"),
        (["--data.sampler.name=nothing"], "data.sampler.name: got nothing, accepted is all"),
        ([EVALUATION, DATASETS + "={m: {name: custom, path: no.jsonl}}"], "VLLMEvaluation.datasets.m.path='no.jsonl'"),
        ([EVALUATION, DATASETS + "={m: {path: q.jsonl}}"], "VLLMEvaluation.datasets.m.name='m'"),
        ([EVALUATION, DATASETS + "={m: {pathh: q.jsonl}}"], "VLLMEvaluation.datasets.m.pathh='q.jsonl'"),
        ([EVALUATION, DATASETS + "={m: {samples: x}}"], "VLLMEvaluation.datasets.m.samples='x': accepted is int"),
        ([EVALUATION, DATASETS + "={a/b: {name: custom, path: q.jsonl}}"], "VLLMEvaluation.datasets='a/b'"),
        (
            [EVALUATION, DATASETS + "={m: {name: custom, path: q.jsonl}}", "--trainer.callbacks.data_dir=nowhere"],
            "VLLMEvaluation.data_dir='nowhere'",
        ),
        (
            [EVALUATION, DATASETS + "={m: {name: arithmetic}}", "--trainer.callbacks.max_completion_length=120"],
            "VLLMEvaluation.max_completion_length=120: accepted is at most ",
        ),
        ([EVALUATION, DATASETS + "={m: {}}", "--trainer.callbacks.memory_share=2"], "VLLMEvaluation.memory_share=2.0"),
        ([EVALUATION, DATASETS + "={m: {}}", "--trainer.callbacks.timeout_s=0"], "VLLMEvaluation.timeout_s=0.0"),
    ],
    ids=lambda value: None if isinstance(value, str) else value[-1],
)
def test_training(extra: list[str], words: str, tiny_llama: Path, fit_arguments: Fit, refused: Refused) -> None:
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"step": 1}\n')
    refused(fit_arguments(tiny_llama, "run", *extra), f"error: {words}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("verify --response x --gold 2 --workers 0", "workers=0"),
        ("verify --response x --gold 2 --policy.units some", "policy.units='some'"),
        ("verify --response x --gold 2 --show -1", "show=-1"),
        ("filter --dataset custom --path q.jsonl --output k.jsonl --against nothing", "against='nothing'"),
        ("filter --dataset custom --path q.jsonl --output k.jsonl --against gsm9k=q.jsonl", "against='gsm9k'"),
        ("filter --dataset nothing --path q.jsonl --output k.jsonl", "dataset='nothing'"),
        ("filter --dataset custom --path q.jsonl --columns {x: y} --output k.jsonl", "columns={'x': 'y'}"),
        ("filter --dataset custom --path q.jsonl --output file/k.jsonl", "output='file/k.jsonl'"),
        ("tune --config quickstart --tune.output file", "tune.output='file': accepted is a folder"),
        ("sent --config quickstart --sent.output file/x.jsonl", "sent.output='file/x.jsonl'"),
        ("tune --config quickstart --tune.space {}", "tune.space={}: accepted is at least one key"),
        ("toy train --output file", "output='file': accepted is a folder"),
        ("toy length --seed -1", "seed=-1: accepted is a whole number from 0"),
        ("bench rollout --shape tiny --tokens 5000", "--tokens=5000: accepted is at most 40"),
        ("bench scaling --shape tiny --tokens 5000", "--tokens=5000: accepted is at most 40"),
        ("bench memory --shape tiny --completion-tokens 4000", "--completion-tokens=4000: accepted is at most 3968"),
        ("bench step --bogus 3", "unknown argument bogus"),
        ("bench step --task nothing", "--config='nothing'"),
        ("compare one two --output file", "output='file': accepted is a folder"),
        ("export --output new", "run=None"),
        ("export --run nothing --output new", "run='nothing'"),
        ("export --path TINY --to adapter --output new", "to='adapter': accepted is merged: these weights have no"),
        ("evaluate --run nothing --output file", "output='file': accepted is a folder"),
        ("evaluate --models {m: {path: TINY}} --datasets {d: {path: q.jsonl}}", "datasets.d.name='d'"),
        (
            "evaluate --models {m: {path: TINY}} --datasets {d: {name: arithmetic}} --max_completion_length 99",
            "max_completion_length=99: accepted is at most ",
        ),
        (
            "evaluate --models {m: {path: TINY}} --datasets {d: {name: custom, path: long.jsonl}}",
            "datasets.d='long.jsonl': accepted is prompts of fewer tokens than the model's 128 positions",
        ),
        (
            "evaluate --models {m: {pth: TINY}}",
            "unknown argument models.m.pth (Group 'models.m' does not accept option 'pth'); did you mean models.m.pa",
        ),
        ("evaluate --seed -1", "seed=-1"),
        ("evaluate --temperature -1", "temperature=-1.0"),
        ("evaluate --vllm.memory_share 5", "vllm.memory_share=5.0"),
        ("evaluate --run nothing", "run='nothing'"),
        ("generate --run nothing --prompt x", "run='nothing'"),
        ("generate --run torn --prompt x", "run='torn': accepted is a run whose config.yaml is whole"),
        ("generate --adapter odd --prompt x", "adapter='odd': accepted is an adapter whose adapter_config.json has a"),
        ("filter --dataset custom --path odd.jsonl --output k.jsonl", "path='row 0': accepted is a row with a text"),
        ("toy train --seeds -1", "seeds=-1"),
        ("generate --policy.path TINY --prompt x --seed -1", "seed=-1"),
        ("generate --policy.path TINY --prompt x --chat true", "chat=True"),
        ("generate --policy.path TINY --messages binary.jsonl", "messages='binary.jsonl'"),
        (
            "generate --policy.path TINY --prompt x --sampling.max_completion_length 999",
            "sampling.max_completion_length=999: accepted is at most 126",
        ),
    ],
)
def test_other_commands(arguments: str, words: str, tiny_llama: Path, refused: Refused) -> None:
    given = [word.replace("TINY", str(tiny_llama)) for word in shlex.split(_quote_braces(arguments))]
    refused(given, f"error: {words}")


def _quote_braces(text: str) -> str:
    """Put each option's value in braces between quotes, as a shell needs it."""
    parts = text.split(" --")
    return " --".join(
        f"{n} '{v}'" if v.startswith("{") else part for part in parts for n, _, v in [part.partition(" ")]
    )


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_an_engine_that_is_not_installed(
    command: str, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    extra = ["--prompt=x", f"--policy.path={tiny_llama}"] if command == "generate" else ["--run=nothing"]
    refused([command, "--engine=vllm", *extra], "error: engine='vllm': accepted is ")


def test_generate_answers_within_what_a_small_model_takes_where_no_length_was_given(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    monkeypatch.setattr("grpo_lit.cli.generate.load_model", lambda resolved, device: (None, None))
    monkeypatch.setattr("grpo_lit.cli.generate.answer", lambda t, p, e, o, stream: lengths.append(o.sampling))
    assert main(["generate", f"--policy.path={tiny_llama}", "--prompt=12"]) == 0
    assert [sampling.max_completion_length for sampling in lengths] == [128 - 3]


def drip(server: socket.socket) -> None:
    """Answer with the beginning of a line that never ends, so that no read of a client's times out."""
    with suppress(OSError):
        connection, _ = server.accept()
        with connection:
            for _ in range(100):
                connection.sendall(b"H")
                time.sleep(0.05)


@pytest.mark.parametrize("listens", [False, True])
def test_a_hub_that_is_not_there_is_told_at_once(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    address = f"http://127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setattr("grpo_lit.hub.TIMEOUT_S", 0.5)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    offline_if_unreachable.cache_clear()
    if listens:
        threading.Thread(target=drip, args=(server,), daemon=True).start()
    else:
        server.close()
    start = time.monotonic()
    with pytest.raises(SystemFault, match="model.policy.path='some/model': the model hub can't be reached"):
        load_model_config(resolve_model_source("some/model"))
    assert time.monotonic() - start < 3  # the client alone goes on for half a minute
    server.close()
    offline_if_unreachable.cache_clear()


def test_a_model_on_this_machine_asks_no_hub(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    sys.addaudithook(lambda event, args: asked.append(args) if event in ("socket.connect", "socket.getaddrinfo") else 0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    source = resolve_model_source(str(tiny_llama))
    load_model_config(source)
    load_tokenizer(source)
    assert asked == []


def test_paths_in_hints_can_be_pasted(tmp_path: Path) -> None:
    root = tmp_path / "my run"
    (root / "tensorboard").mkdir(parents=True)
    hint = end_text(root).splitlines()[-1].removeprefix("watch: ")
    assert shlex.split(hint) == ["tensorboard", "--logdir", str(root / "tensorboard")]


def test_no_deprecation_is_shown(tiny_llama: Path, fit_arguments: Fit) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="(torch|lightning|google)")
        try:
            text = build("fit", fit_arguments(tiny_llama, "run")[1:]).dump()
        except Warning as warning:
            pytest.fail(str(warning))
    assert "limit_val_batches: null" in text


def test_names_in_texts_are_those_that_were_typed() -> None:
    names = {"data.path": "against", "data": ""}
    with (
        pytest.raises(UserError, match=r"^columns=1: accepted is the data of against, see columns$"),
        typed_names(names),
    ):
        raise UserError("data.columns", 1, "the data of data.path, see data.columns")
    with pytest.raises(SystemFault, match=r"^split: no data, give against\.$"), typed_names(names):
        raise SystemFault("data.split: no data, give data.path.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("toy train --seedz 1", "did you mean --seed"),
        ("compare one two --outputs x", "did you mean --output?"),
        ("bench step --promts 3", "did you mean --prompts?"),
        ("bench kernels --sampels 3", "did you mean --samples?"),
        (
            "bench kernels --csv /proc/sys/new/x.csv",
            "argument --csv: '/proc/sys/new/x.csv': /proc/sys can't be written",
        ),
        ("bench kernels --plot x.xyz", "argument --plot: 'x.xyz': accepted is a file that ends in .png"),
    ],
)
def test_what_argparse_refuses(arguments: str, words: str, refused: Refused) -> None:
    refused(arguments.split(), words)
