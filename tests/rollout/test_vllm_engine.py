"""The vllm engine without vLLM: a stand-in that computes with transformers checks what the engine and its probe do."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.lora import LoRAConfig, adapters_off, load_adapter, lora_layers
from grpo_lit.module import GRPOModule
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.prompts import PromptEncoder, load_tokenizer
from grpo_lit.rollout import HFEngine, RolloutConfig, SamplingConfig, VLLMConfig, row_keys, vllm_base
from grpo_lit.rollout.vllm import VLLMEngine, build_vllm_engine, probe_tolerance
from grpo_lit.rollout.vllm_adapter import AdapterFolders, ram_folder
from grpo_lit.rollout.vllm_backend import Adapter, OnRow, RowEnd, Sampled, request_seeds
from grpo_lit.rollout.vllm_base import base_location, write_base
from grpo_lit.rollout.vllm_guard import ChildGuard, new_children
from grpo_lit.rollout.vllm_local import lora_rank

PROMPTS = [[3, 4, 5, 6], [7], [8, 9, 10]]
COUNTS = [2, 0, 3]
KEYS = row_keys(0, 0, [0, 0, 2, 2, 2], [0, 1, 0, 1, 2])
SAMPLING = SamplingConfig(temperature=0.7, max_completion_length=6)
LORA = LoRAConfig(4, targets=["q_proj", "v_proj"])


class TwinBackend:
    """Behaves as `VLLMBackend` asks; `ignores_adapters` makes it keep the first adapter for good."""

    device_sleeps = True

    def __init__(self, folder: Path, lora: LoRAConfig) -> None:
        self.policy = load_policy(PolicyConfig(str(folder), dtype="fp32"), lora)
        self.tokenizer = load_tokenizer(self.policy.source)
        self.loaded: list[Adapter] = []
        self.calls: list[str] = []
        self.rows_in_flight: int | None = None
        self.ignores_adapters = False
        self.raw_logprobs = False

    def load(self, adapter: Adapter) -> None:
        self.calls.append(f"load {adapter.number}")
        assert not self.loaded, "room for one adapter only"
        self.loaded.append(adapter)
        if not self.ignores_adapters:
            load_adapter(self.policy.model, adapter.folder)

    def unload(self, adapter: Adapter) -> None:
        self.calls.append(f"unload {adapter.number}")
        self.loaded.remove(adapter)
        if not self.ignores_adapters:
            with torch.no_grad():
                for _, layer in lora_layers(self.policy.model):
                    layer.lora_B.zero_()

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        adapter: Adapter | None,
        rows_in_flight: int | None,
        on_row: OnRow,
        row_end: RowEnd | None = None,
    ) -> None:
        assert self.loaded == ([] if adapter is None else [adapter])
        self.rows_in_flight = rows_in_flight
        engine = HFEngine(self.policy, self.tokenizer)
        order = sorted(range(len(prompts)), key=lambda row: seeds[row])  # rows come back in another order
        for row in order:
            key = np.array([[0, seeds[row]]], dtype=np.uint64)
            rollout = engine.generate([prompts[row]], [1], key, sampling)
            length = int(rollout.lengths[0])
            ids, logprobs = rollout.completion_ids[0, :length].tolist(), rollout.logprobs[0, :length].tolist()
            if self.raw_logprobs:
                logprobs = self.score([[*prompts[row], *ids]], adapter)[0][-length:]
            sampled = Sampled(ids, logprobs)
            end = None if row_end is None else row_end(row, ids, 0)
            on_row(row, sampled if end is None else sampled.cut(end))

    def score(self, rows: Sequence[Sequence[int]], adapter: Adapter | None) -> list[list[float]]:
        assert self.loaded == ([] if adapter is None else [adapter])
        scores = []
        for row in rows:
            ids = torch.tensor([list(row)])
            ones = torch.ones_like(ids, dtype=torch.bool)
            with torch.no_grad():
                score = self.policy.score(ids[:, :1], ones[:, :1], ids[:, 1:], ones[:, 1:])
            scores.append(score.logprobs[0].tolist())
        return scores

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    def close(self) -> None:
        self.calls.append("close")


def move(policy: Policy, size: float) -> None:
    """Change the adapters as an optimizer step would."""
    with torch.no_grad():
        for _, layer in lora_layers(policy.model):
            layer.lora_B += size * torch.randn_like(layer.lora_B)


class Pair:
    """A policy and an engine that follows it."""

    def __init__(self, folder: Path, tmp_path: Path, **options: object) -> None:
        torch.manual_seed(5)
        self.policy = load_policy(PolicyConfig(str(folder), dtype="fp32"), LORA)
        move(self.policy, 0.05)
        self.twin = TwinBackend(folder, LORA)
        tokenizer = load_tokenizer(self.policy.source)
        arguments = {"policy": self.policy, "tolerance": 1e-3, "adapter_folder": str(tmp_path / "adapters")} | options
        self.engine = VLLMEngine(self.twin, tokenizer, **arguments)  # type: ignore[arg-type]


@pytest.fixture
def pair(tiny_llama: Path, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tiny_llama, tmp_path)
    yield made
    made.engine.close()


def test_rows_come_back_in_order_with_masks_and_logprobs(pair: Pair) -> None:
    told: list[tuple[int, int]] = []
    rollout = pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING, lambda rows, tokens: told.append((rows, tokens)))
    assert rollout.group_ids.tolist() == [0, 0, 2, 2, 2]
    assert rollout.prompt_ids[0][rollout.prompt_mask[0]].tolist() == PROMPTS[0]
    assert rollout.prompt_ids[4][rollout.prompt_mask[4]].tolist() == PROMPTS[2]
    for row, (group, seed) in enumerate(zip(rollout.group_ids.tolist(), request_seeds(KEYS), strict=True)):
        alone = HFEngine(pair.policy, pair.twin.tokenizer).generate(
            [PROMPTS[group]], [1], np.array([[0, seed]], dtype=np.uint64), SAMPLING
        )
        length = int(rollout.lengths[row])
        assert rollout.completion_ids[row, :length].tolist() == alone.completion_ids[0].tolist()
        assert torch.allclose(rollout.logprobs[row, :length], alone.logprobs[0], atol=1e-5)
        assert bool(rollout.truncated[row]) == bool(alone.truncated[0])
    assert bool((rollout.logprobs[~rollout.completion_mask] == 0).all())
    assert [rows for rows, _ in told] == [1, 2, 3, 4, 5]
    assert told[-1][1] == int(rollout.lengths.sum())


def test_adapter_is_handed_over_after_each_change_and_only_then(pair: Pair) -> None:
    generate = lambda: pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)  # noqa: E731
    generate()
    generate()
    assert [call for call in pair.twin.calls if call != "wake"] == ["load 1"]
    move(pair.policy, 0.05)  # an in-place step, as optimizers make it, without weights_changed
    generate()
    pair.engine.weights_changed()
    generate()
    loads = [call for call in pair.twin.calls if call != "wake"]
    assert loads == ["load 1", "unload 1", "load 2", "unload 2", "load 3"]
    (folder,) = pair.twin.loaded[0].folder.parent.iterdir()
    assert folder == pair.twin.loaded[0].folder, "old versions are removed"
    assert folder.name == pair.twin.loaded[0].name


def test_an_empty_prompt_is_refused(pair: Pair) -> None:
    with pytest.raises(UserError, match=r"prompts\[1\]"):
        pair.engine.generate([[3], []], [1, 1], KEYS[:2], SAMPLING)


def test_no_row_no_hand_over(pair: Pair) -> None:
    empty = pair.engine.generate(PROMPTS, [0, 0, 0], KEYS[:0], SAMPLING)
    assert empty.num_rows == 0
    assert pair.twin.calls == []


def test_probe_runs_again_after_sleep(pair: Pair) -> None:
    pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    pair.engine.release()
    with torch.no_grad():  # as if the weights had been lost while asleep
        for _, layer in lora_layers(pair.twin.policy.model):
            layer.lora_B.zero_()
    with pytest.raises(SystemFault, match="not the policy's"):
        pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)


@pytest.mark.parametrize("size", [1e-2, 1e-5])
def test_stale_adapter_stops_the_run(pair: Pair, size: float) -> None:
    pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    move(pair.policy, size)
    pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    report = pair.engine.last_probe
    assert report is not None
    assert report.followed == pytest.approx(1.0, abs=0.2)
    pair.twin.ignores_adapters = True
    move(pair.policy, size)
    with pytest.raises(SystemFault, match="stale weights"):
        pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)


def test_steps_below_the_noise_add_up(tiny_llama: Path, tmp_path: Path) -> None:
    pair = Pair(tiny_llama, tmp_path, tolerance=10.0)
    with torch.no_grad():  # a vLLM whose numbers differ a little, as in bf16
        for parameter in pair.twin.policy.model.parameters():
            parameter.mul_(1 + 1e-4 * torch.randn_like(parameter))
    pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    pair.twin.ignores_adapters = True
    direction = {name: torch.randn_like(layer.lora_B) for name, layer in lora_layers(pair.policy.model)}
    undecided, fault = 0, None
    while fault is None and undecided < 100:
        with torch.no_grad():
            for name, layer in lora_layers(pair.policy.model):
                layer.lora_B += 3e-5 * direction[name]
        try:
            pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
        except SystemFault as error:
            fault = error
        else:
            assert pair.engine.last_probe is not None
            assert pair.engine.last_probe.followed is None
            undecided += 1
    assert fault is not None
    assert "stale weights" in str(fault)
    assert undecided > 1


def test_another_base_is_found_out(tiny_llama: Path, tmp_path: Path) -> None:
    pair = Pair(tiny_llama, tmp_path)
    with torch.no_grad():
        pair.twin.policy.model.get_output_embeddings().weight.mul_(1.05)  # type: ignore[union-attr, operator]
    with pytest.raises(SystemFault, match="differ by"):
        pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)


def test_untempered_logprobs_are_found_out(pair: Pair) -> None:
    pair.twin.raw_logprobs = True
    greedy = SamplingConfig(temperature=0.0, max_completion_length=4)
    pair.engine.generate(PROMPTS, COUNTS, KEYS, greedy)  # nothing to temper
    with pytest.raises(SystemFault, match="processed_logprobs"):
        pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)


def test_engine_without_policy_serves_base_and_folders(tiny_llama: Path, tmp_path: Path) -> None:
    pair = Pair(tiny_llama, tmp_path)
    folders = AdapterFolders(tmp_path)
    adapter = folders.write(pair.policy.model, base_model="base")
    served = TwinBackend(tiny_llama, LORA)
    engine = VLLMEngine(served, served.tokenizer, stop_ids=[2])
    engine.use_adapter(adapter.folder)
    with_adapter = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    assert torch.equal(
        with_adapter.completion_ids, pair.engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING).completion_ids
    )
    assert adapter.folder.is_dir(), "a folder of the user's is not removed"
    engine.use_adapter(None)
    base = engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)
    assert not torch.equal(base.logprobs, with_adapter.logprobs)
    engine.use_adapter(adapter.folder)
    assert served.calls.count("unload 1") == 1
    assert served.loaded[0].number == 2, "vLLM caches by number: never the same twice"
    with pytest.raises(UserError, match="adapter"):
        engine.use_adapter(tmp_path / "missing")
    engine.close()
    assert served.calls[-2:] == ["unload 2", "close"]
    assert adapter.folder.is_dir()


def test_seeds_depend_on_the_key_alone() -> None:
    keys = row_keys(1, 2, [0, 0, 1, 1], [0, 1, 0, 1])
    seeds = request_seeds(keys)
    assert seeds[1:3] == request_seeds(keys[1:3])
    many = request_seeds(np.concatenate([row_keys(s, t, range(50), range(50)) for s in range(5) for t in range(5)]))
    assert len(set(many)) == len(many) == 1250
    assert all(0 <= seed < 2**63 for seed in many)
    assert len({seed >> 43 for seed in many}) > 1200, "high bits differ too"


# ---- the base as a folder -------------------------------------------------------------------------------------------


def test_written_base_computes_what_the_policy_computes(tiny_llama: Path, tmp_path: Path) -> None:
    policy = load_policy(PolicyConfig(str(tiny_llama), dtype="fp32", quantization="nf4"), LORA)
    move(policy, 0.1)
    tokenizer = load_tokenizer(policy.source)
    folder = Path(base_location(policy, tokenizer, torch.float32, tmp_path))
    assert folder.parent == tmp_path
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[1, 5, 9, 14, 20]])
    original = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with torch.no_grad(), adapters_off(policy.model):
        ours, written, before = policy.model(ids).logits, loaded(ids).logits, original(ids).logits
    assert torch.allclose(ours, written, atol=1e-4)
    assert (written - before).abs().max() > 0.05, "these are the 4-bit numbers, not those before rounding"
    again = load_tokenizer(load_policy(PolicyConfig(str(folder), dtype="fp32")).source)
    assert again("1+2=").input_ids == tokenizer("1+2=").input_ids


def test_base_is_written_once_and_again_when_a_weight_differs(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = load_policy(PolicyConfig(str(tiny_llama), dtype="fp32", quantization="nf4"), LORA)
    tokenizer = load_tokenizer(policy.source)
    first = write_base(policy, tokenizer, torch.float32, tmp_path)
    stamp = (first / "config.json").stat().st_mtime_ns
    move(policy, 0.1)  # adapters are no part of the base
    with monkeypatch.context() as patch:
        patch.setattr(vllm_base, "_write", lambda *arguments: pytest.fail("written twice"))
        assert write_base(policy, tokenizer, torch.float32, tmp_path) == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert write_base(policy, tokenizer, torch.bfloat16, tmp_path) != first
    weight = policy.model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    weight.data[0] ^= 1  # one bit of one 4-bit number
    assert write_base(policy, tokenizer, torch.float32, tmp_path) != first
    assert not list(tmp_path.glob(".draft-*"))


def test_a_folder_that_vllm_reads_is_taken_as_it_is(tiny_llama: Path, tmp_path: Path) -> None:
    policy = load_policy(PolicyConfig(str(tiny_llama), dtype="fp32"), LORA)
    assert base_location(policy, load_tokenizer(policy.source), torch.float32, tmp_path) == str(tiny_llama)
    assert not list(tmp_path.iterdir())


def test_weights_that_differ_from_the_folder_are_written(tiny_llama: Path, tmp_path: Path) -> None:
    drawn = load_policy(PolicyConfig(str(tiny_llama), dtype="fp32", random_weights=True), seed=9)
    folder = base_location(drawn, load_tokenizer(drawn.source), torch.float32, tmp_path)
    assert Path(folder).parent == tmp_path
    ids = torch.tensor([[1, 5, 9]])
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, drawn.model(ids).logits)


def test_base_alone_is_served_and_probed(tiny_llama: Path, tmp_path: Path) -> None:
    policy = load_policy(PolicyConfig(str(tiny_llama), dtype="fp32"))
    twin = TwinBackend(tiny_llama, LORA)
    engine = VLLMEngine(twin, twin.tokenizer, policy=policy, tolerance=1e-3)
    assert engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING).num_rows == sum(COUNTS)
    assert engine.last_probe is not None
    assert engine.last_probe.mean < 1e-4
    with torch.no_grad():
        policy.trainable_parameters()[0][1].mul_(1.1)
    with pytest.raises(SystemFault, match="adapters only"):
        engine.generate(PROMPTS, COUNTS, KEYS, SAMPLING)


# ---- folders in RAM -------------------------------------------------------------------------------------------------


def test_folders_of_dead_processes_are_swept(tiny_llama: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys; from grpo_lit.rollout.vllm_adapter import AdapterFolders; "
        "folders = AdapterFolders(sys.argv[1]); print(folders.root, flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    left = Path(done.stdout.strip())
    assert left.is_dir()
    mine, other = AdapterFolders(tmp_path), AdapterFolders(tmp_path)
    assert not left.exists()
    assert mine.root.is_dir(), "a living process keeps its own"
    other.close()
    assert not other.root.exists()
    del mine
    assert not list(tmp_path.iterdir())
    assert os.access(ram_folder(), os.W_OK)


# ---- what the user is told ------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_missing_vllm_is_told_before_anything_loads() -> None:
    with pytest.raises(UserError, match=r"pip install 'grpo-lit\[vllm\]'"):
        RolloutConfig(engine="vllm")
    RolloutConfig(engine="vllm", vllm=VLLMConfig(mode="server"))  # needs no vLLM here


@pytest.mark.parametrize(
    ("field", "value"),
    [("memory_share", 0.0), ("memory_share", 1.5), ("server_url", "localhost"), ("max_model_len", 0)],
)
def test_bad_settings_name_the_field(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"model.rollout.vllm.{field}"):
        VLLMConfig(**{field: value})  # type: ignore[arg-type]


def test_all_weights_cannot_be_handed_over(tiny_llama: Path) -> None:
    rollout = RolloutConfig(engine="vllm", vllm=VLLMConfig(mode="server"))
    with pytest.raises(UserError, match="model.lora"):
        GRPOModule(PolicyConfig(str(tiny_llama)), lora=None, rollout=rollout)


def test_gpt2_has_no_adapters_in_vllm(tiny_gpt2: Path) -> None:
    policy = load_policy(PolicyConfig(str(tiny_gpt2), dtype="fp32"), LoRAConfig(4, targets=["c_attn"]))
    config = RolloutConfig(engine="vllm", vllm=VLLMConfig(mode="server"))
    with pytest.raises(UserError, match="GPT2LMHeadModel"):
        build_vllm_engine(config, policy, PromptEncoder(load_tokenizer(policy.source)))


def test_rank_is_rounded_up_to_what_vllm_knows() -> None:
    assert [lora_rank(rank) for rank in (1, 2, 8, 16, 17, 300)] == [1, 8, 8, 16, 32, 320]
    with pytest.raises(UserError, match="model.lora.rank"):
        lora_rank(513)


def test_tolerance_follows_the_number_formats() -> None:
    assert probe_tolerance(VLLMConfig(), torch.float32, torch.float32) == 1e-3
    assert probe_tolerance(VLLMConfig(), torch.float32, torch.bfloat16) == 0.1
    assert probe_tolerance(VLLMConfig(probe_tolerance=0.02), torch.bfloat16) == 0.02


# ---- child processes ------------------------------------------------------------------------------------------------


def test_guarded_children_end_with_a_killed_parent(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, time; from grpo_lit.rollout.vllm_guard import ChildGuard, new_children\n"
        "with new_children() as pids:\n"
        "    subprocess.Popen(['sh', '-c', 'sleep 60 & wait'], start_new_session=True, stdout=subprocess.DEVNULL)\n"
        "    time.sleep(0.3)\n"
        "guard = ChildGuard(pids); print(*pids, flush=True); os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, "the shell and its child"
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_released_guard_ends_nothing() -> None:
    with new_children() as pids:
        child = subprocess.Popen(["sleep", "60"])
    try:
        assert pids == [child.pid]
        ChildGuard(pids).release()
        time.sleep(0.3)
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
