"""The vllm engine: completions from vLLM, the live adapter handed over as a LoRA request after each update.

             policy (trained)                                  vLLM
    frozen base + adapter, version k  --- folder in RAM --->  same base + LoRA request k
                 |                                              |
                 |<------------- probe: same log-probs? ------->|
                 |<------------- tokens and their log-probs ----|

vLLM holds weights of its own, so a colocated engine costs the base's memory a second time while it is awake; the base
never changes, and adapters are never merged into it. It draws with its own generator: a row's seed comes from its key
alone, so batch sizes change nothing up to rounding, but tokens differ from those of the other engines.
"""

from __future__ import annotations

import atexit
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from grpo_lit.adapter_config import read_adapter_config
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.lora import lora_layers
from grpo_lit.policy import Policy
from grpo_lit.prompts import PromptEncoder
from grpo_lit.rollout.base import Progress, Rollout, RolloutConfig, SamplingConfig, check_lengths, left_pad
from grpo_lit.rollout.hf import eos_token_ids
from grpo_lit.rollout.stops import AnswerStop
from grpo_lit.rollout.vllm_adapter import AdapterFolders
from grpo_lit.rollout.vllm_backend import Adapter, RowEnd, Sampled, VLLMBackend, request_seeds
from grpo_lit.rollout.vllm_base import base_location
from grpo_lit.rollout.vllm_config import VLLMConfig
from grpo_lit.rollout.vllm_local import LocalBackend
from grpo_lit.rollout.vllm_probe import AdapterProbe, ProbeReport
from grpo_lit.rollout.vllm_server import ServerBackend

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TOLERANCE_FP32, TOLERANCE = 1e-3, 0.1
"""Nats a token that policy and vLLM may differ by on average, where both compute in fp32 and elsewhere."""


class VLLMEngine:
    """Samples with vLLM.

    Args:
        backend: the vLLM, colocated or a server.
        tokenizer: for the tokens that pad and stop, and for `SamplingConfig.stop_at`.
        policy: its adapters are handed over and its log-probs compared; None serves the base, or the folders that
            `use_adapter` names.
        stop_ids: tokens that end a completion; None takes those of tokenizer and policy.
        batch_size: rows handed to vLLM at once; None hands over all, and vLLM batches them as memory allows.
        tolerance: nats, see `VLLMConfig.probe_tolerance`.
        adapter_folder: see `VLLMConfig`.
    """

    name = "vllm"

    def __init__(
        self,
        backend: VLLMBackend,
        tokenizer: PreTrainedTokenizerBase,
        *,
        policy: Policy | None = None,
        stop_ids: Sequence[int] | None = None,
        batch_size: int | None = None,
        tolerance: float = TOLERANCE,
        adapter_folder: str | None = None,
    ) -> None:
        if stop_ids is None:
            assert policy is not None, "stop_ids are the policy's, or given"
            stop_ids = eos_token_ids(policy, tokenizer)
        self.backend, self.tokenizer, self.policy = backend, tokenizer, policy
        self.batch_size: int | None = batch_size
        self.eos_token_ids = list(stop_ids)
        self.pad_token_id = int(tokenizer.pad_token_id)
        self.last_probe: ProbeReport | None = None
        self.handover_seconds = 0.0
        self._folders: AdapterFolders | None = None
        self._probe: AdapterProbe | None = None
        self._seen: object = None
        self._changed = False
        self._asleep = False
        self._number = 0
        if policy is not None:
            if any(True for _ in lora_layers(policy.model)):
                self._folders = AdapterFolders(adapter_folder)
            self._probe = AdapterProbe(
                policy, backend, tolerance=tolerance, stop_ids=self.eos_token_ids, pad_token_id=self.pad_token_id
            )
        self._loaded: list[Adapter] = []  # at most one
        self._end = weakref.finalize(self, _close, backend, self._loaded, self._folders)
        atexit.register(self._end)

    # ---- the protocol ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        keys: NDArray[np.uint64],
        sampling: SamplingConfig,
        progress: Progress | None = None,
    ) -> Rollout:
        """Sample; see `RolloutEngine.generate`. All tensors of the result lie on the policy's device.

        Raises:
            UserError: an empty prompt, or a row longer than vLLM was started for.
            SystemFault: vLLM failed, or samples with other weights than the policy's.
        """
        check_lengths(prompts, counts, sampling, None)  # how long a row may be is the backend's to say
        groups = [group for group, count in enumerate(counts) for _ in range(count)]
        rows: list[Sampled | None] = [None] * len(groups)
        num_tokens = 0

        def on_row(row: int, sampled: Sampled) -> None:
            nonlocal num_tokens
            rows[row] = sampled
            num_tokens += len(sampled.ids)
            if progress is not None:
                progress(sum(done is not None for done in rows), num_tokens)

        if groups:
            self._ready(prompts, sampling)
            own = [prompts[group] for group in groups]
            end = self._answer_end(own, sampling)
            self.backend.sample(
                own, request_seeds(keys), sampling, self.eos_token_ids, self.adapter, self.batch_size, on_row, end
            )
        finished = [row for row in rows if row is not None]
        assert len(finished) == len(groups), "vLLM returned too few rows"
        return self._assemble(prompts, groups, finished)

    def release(self) -> None:
        """Put a colocated engine to sleep; it wakes by itself."""
        self.backend.sleep()
        self._asleep = self.backend.device_sleeps

    def weights_changed(self) -> None:
        """The next rollout hands the adapter over."""
        self._changed = True

    def close(self) -> None:
        """End a colocated engine and remove the adapter's folders; a server loses our adapter and goes on."""
        self._end()

    def step_metrics(self) -> dict[str, float]:
        """What the last hand-over took and what the probe after it saw."""
        if self.last_probe is None:
            return {}
        metrics = {
            "rollout/vllm_probe": self.last_probe.mean,
            "rollout/vllm_probe_max": self.last_probe.maximum,
            "perf/handover_s": self.handover_seconds,
        }
        if self.last_probe.followed is not None:
            metrics["rollout/vllm_probe_followed"] = self.last_probe.followed
        return metrics

    # ---- adapters -------------------------------------------------------------------------------------------------

    @property
    def adapter(self) -> Adapter | None:
        """The version that vLLM answers with; None for the base."""
        return self._loaded[0] if self._loaded else None

    def _switch(self, adapter: Adapter | None) -> Adapter | None:
        """Have vLLM answer with this one; the one before, forgotten first, so that it needs room for one only."""
        before = self._loaded.pop() if self._loaded else None
        if before is not None:
            self.backend.unload(before)
        if adapter is not None:
            self.backend.load(adapter)
            self._loaded.append(adapter)
        return before

    def use_adapter(self, folder: str | Path | None) -> None:
        """Answer with a PEFT LoRA folder over the base, or with the base alone; for engines without a policy.

        Raises:
            UserError: the folder holds no LoRA adapter.
        """
        assert self._probe is None, "this engine follows its policy"
        if folder is not None:
            read_adapter_config(folder, argument="adapter")
        self.backend.wake()
        if folder is None:
            self._switch(None)
            return
        self._number += 1
        path = Path(folder).resolve()
        self._switch(Adapter(f"{path.name}-{self._number}-{time.time_ns()}", self._number, path))

    def _ready(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> None:
        """Awake, with the policy's current adapter, and checked."""
        start = time.perf_counter()
        self.backend.wake()
        if self._probe is None:
            return
        # What weights_changed was not told of (a checkpoint that was loaded) shows in the tensors' own counters.
        now = self._versions()
        if self._changed or now != self._seen:
            self._hand_over()
        elif not self._asleep and sampling.temperature in self._probe.temperatures:
            return
        self.last_probe = self._probe.check(prompts, self.adapter, sampling)
        self._seen, self._changed, self._asleep = now, False, False
        self.handover_seconds = time.perf_counter() - start

    def _hand_over(self) -> None:
        assert self.policy is not None
        if self._folders is None:
            if self._seen is not None:
                raise SystemFault("vLLM can't follow: the policy's own weights changed, and it is handed adapters only")
            return  # the base is all there is, and the probe sees whether it is the right one
        before = self._switch(self._folders.write(self.policy.model, base_model=self.policy.source.spec))
        if before is not None:
            self._folders.remove(before)

    def _versions(self) -> object:
        assert self.policy is not None
        return [(tensor.data_ptr(), tensor._version) for _, tensor in self.policy.trainable_parameters()]

    # ---- rows -----------------------------------------------------------------------------------------------------

    def _answer_end(self, prompts: Sequence[Sequence[int]], sampling: SamplingConfig) -> RowEnd | None:
        if sampling.stop_at is None:
            return None
        stop = AnswerStop(self.tokenizer, sampling.stop_at)
        thinking = [stop.thinking(prompt) for prompt in prompts]
        return lambda row, ids, num_checked: stop.length(ids, num_checked, thinking=thinking[row])

    def _assemble(self, prompts: Sequence[Sequence[int]], groups: list[int], rows: list[Sampled]) -> Rollout:
        device = self.policy.device if self.policy is not None else torch.device("cpu")
        prompt_ids, prompt_mask = left_pad([prompts[group] for group in groups], self.pad_token_id)
        shape = (len(rows), max((len(row.ids) for row in rows), default=1))
        completion_ids = torch.full(shape, self.pad_token_id, dtype=torch.long)
        completion_mask = torch.zeros(shape, dtype=torch.bool)
        logprobs = torch.zeros(shape, dtype=torch.float32)
        truncated = torch.zeros(len(rows), dtype=torch.bool)
        for index, row in enumerate(rows):
            length = len(row.ids)
            completion_ids[index, :length] = torch.tensor(row.ids, dtype=torch.long)
            completion_mask[index, :length] = True
            logprobs[index, :length] = torch.tensor(row.logprobs)
            truncated[index] = not row.answered and row.ids[-1] not in self.eos_token_ids
        return Rollout(
            prompt_ids.to(device),
            prompt_mask.to(device),
            completion_ids.to(device),
            completion_mask.to(device),
            torch.tensor(groups, dtype=torch.long, device=device),
            logprobs.to(device),
            truncated.to(device),
        )


def _close(backend: VLLMBackend, loaded: list[Adapter], folders: AdapterFolders | None) -> None:
    for adapter in loaded:
        with suppress(Exception):  # it may be gone already
            backend.unload(adapter)
    loaded.clear()
    backend.close()
    if folders is not None:
        folders.close()


def build_vllm_engine(config: RolloutConfig, policy: Policy, encoder: PromptEncoder) -> VLLMEngine:
    """The engine of a training or an evaluation: over the policy's own base, following its adapters if it has any.

    Raises:
        UserError: vLLM is not installed or can't adapt the model.
        SystemFault: vLLM does not start, or no server answers.
    """
    settings = config.vllm
    settings.check_installed()
    ranks = [layer.rank for _, layer in lora_layers(policy.model)]
    if any(isinstance(layer.base_layer, Conv1D) for _, layer in lora_layers(policy.model)):
        accepted = f"another engine for {type(policy.model).__name__}: vLLM has no adapters for this family"
        raise UserError("model.rollout.engine", "vllm", accepted)
    policy_dtype = policy.model.dtype
    backend: VLLMBackend
    if settings.mode == "server":
        backend, dtype = ServerBackend(settings), policy_dtype
    else:
        dtype = _DTYPES.get(settings.dtype, policy_dtype)
        location = base_location(policy, encoder.tokenizer, policy_dtype, settings.base_cache)
        backend = LocalBackend(
            location, settings, device=policy.device, dtype=dtype, max_lora_rank=max(ranks) if ranks else None
        )
    return VLLMEngine(
        backend,
        encoder.tokenizer,
        policy=policy,
        batch_size=config.batch_size,
        tolerance=probe_tolerance(settings, policy_dtype, dtype),
        adapter_folder=settings.adapter_folder,
    )


def probe_tolerance(settings: VLLMConfig, *dtypes: torch.dtype) -> float:
    """Nats a token that the probe accepts between computations in these number formats."""
    if settings.probe_tolerance is not None:
        return settings.probe_tolerance
    return TOLERANCE_FP32 if all(dtype == torch.float32 for dtype in dtypes) else TOLERANCE
