"""vLLM beside the training: an engine process of its own on the same device, driven through vLLM's `LLM`.

The engine lives in a child process, so its thread pools, process groups and CUDA allocator never meet those of the
training, and a Ctrl-C meant for the training does not end it in the middle of a rollout.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import Any

import torch

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.rollout.base import SamplingConfig
from grpo_lit.rollout.vllm_backend import Adapter, OnRow, RowEnd, Sampled
from grpo_lit.rollout.vllm_config import VLLMConfig
from grpo_lit.rollout.vllm_guard import ChildGuard, DeathWatch, new_children

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM reserves space for."""
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class LocalBackend:
    """A vLLM engine in a child process.

    Args:
        location: folder or hub id of the base.
        config: memory, lengths, graphs.
        device: where it runs.
        dtype: number format of weights and computation.
        max_lora_rank: largest rank of an adapter; None for none.

    Raises:
        UserError: vLLM does not know the model, or not with adapters; settings that do not fit.
        SystemFault: it does not start, mostly because memory is short.
    """

    def __init__(
        self, location: str, config: VLLMConfig, *, device: torch.device, dtype: torch.dtype, max_lora_rank: int | None
    ) -> None:
        import torch._dynamo  # noqa: F401  reads its own variables now, not those meant for the engine's process

        on_gpu = device.type == "cuda"
        self.device_sleeps = config.sleep and on_gpu
        with _environment(_variables(config, device)), _child_ignores_ctrl_c(), new_children() as pids:
            try:
                from vllm import LLM
            except Exception as error:  # whatever its own imports raise, such as a torchvision of another torch
                raise SystemFault(f"vLLM is installed but can't be imported: {' '.join(str(error).split())}") from error
            try:
                self._llm: Any = LLM(
                    location,
                    seed=0,
                    generation_config="vllm",  # the model's own sampling defaults stay out
                    logprobs_mode="processed_logprobs",
                    enable_prefix_caching=True,
                    **_engine_arguments(config, on_gpu, dtype, max_lora_rank),
                )
            except (ValueError, RuntimeError, OSError) as error:
                raise _start_fault(error, location) from error
        self._guard = ChildGuard(pids)
        self._engine: Any = self._llm.llm_engine
        self._watch = DeathWatch(pids, self._engine.engine_core)
        self.max_model_len = int(self._engine.model_config.max_model_len)
        self._asleep = False

    def load(self, adapter: Adapter) -> None:
        """Read an adapter from its folder."""
        with _faults("the adapter was not accepted"):
            if not self._engine.add_lora(_lora_request(adapter)):
                raise SystemFault(f"vLLM already has an adapter number {adapter.number}")

    def unload(self, adapter: Adapter) -> None:
        """Forget an adapter."""
        with _faults("an adapter could not be removed"):
            self._engine.remove_lora(adapter.number)

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
        """One completion a prompt; see `VLLMBackend.sample`. The prompt's cached keys serve its whole group."""
        longest = max((len(prompt) for prompt in prompts), default=0)
        if longest + sampling.max_completion_length > self.max_model_len:
            accepted = f"at least {longest + sampling.max_completion_length}: longest prompt plus completion"
            raise UserError("model.rollout.vllm.max_model_len", self.max_model_len, accepted)
        waiting = list(range(len(prompts)))[::-1]
        running: dict[str, int] = {}
        checked = [0] * len(prompts)
        limit = rows_in_flight or len(prompts)
        try:
            with _faults("a rollout failed"):
                while waiting or running:
                    while waiting and len(running) < limit:
                        row = waiting.pop()
                        name = f"row-{row}"
                        parameters = _sampling_params(sampling, seeds[row], stop_ids, row_end is not None)
                        self._add(name, prompts[row], parameters, adapter)
                        running[name] = row
                    for output in self._engine.step():
                        if output.request_id not in running:  # ended at its answer, while the engine was a step ahead
                            continue
                        row = running[output.request_id]
                        ids = output.outputs[0].token_ids
                        end = None if row_end is None else row_end(row, list(ids), checked[row])
                        checked[row] = len(ids)
                        if end is not None or output.finished:
                            del running[output.request_id]
                            sampled = _sampled(output)
                            on_row(row, sampled if end is None else sampled.cut(end))
                        if end is not None and not output.finished:
                            self._engine.abort_request([output.request_id], internal=False)
        except BaseException:
            self._abort(list(running))
            raise

    def _add(self, name: str, prompt: Sequence[int], parameters: Any, adapter: Adapter | None) -> None:
        from vllm.inputs import tokens_input

        request = None if adapter is None else _lora_request(adapter)
        self._engine.add_request(name, tokens_input(list(prompt)), parameters, lora_request=request)

    def _abort(self, names: list[str]) -> None:
        """Leave no request behind; the engine may be dead by now, which its next use will tell."""
        with suppress(Exception):
            self._engine.abort_request(names, internal=False)

    def score(self, rows: Sequence[Sequence[int]], adapter: Adapter | None) -> list[list[float]]:
        """Log-probs at temperature 1 of the tokens of each row from its second on."""
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, seed=0)
        request = None if adapter is None else _lora_request(adapter)
        scores = []
        with _faults("log-probs could not be computed"):
            # One at a time: vLLM's LoRA layers on the CPU can't do prompt log-probs of several requests in one batch.
            for row in rows:
                prompt = {"prompt_token_ids": list(row)}
                (output,) = self._llm.generate(prompt, parameters, lora_request=request, use_tqdm=False)
                entries = zip(output.prompt_logprobs[1:], row[1:], strict=True)
                scores.append([float(entry[token].logprob) for entry, token in entries])
        return scores

    def sleep(self) -> None:
        """Move the weights to RAM and give up the KV cache, on a GPU."""
        if self.device_sleeps and not self._asleep:
            with _faults("it could not be put to sleep"):
                self._llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        """Bring the weights back."""
        if self._asleep:
            with _faults("it could not be woken; is there memory enough?"):
                self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """End the engine process."""
        self._watch.stop()
        with suppress(Exception):
            self._engine.engine_core.shutdown()
        self._guard.release()


def _engine_arguments(
    config: VLLMConfig, on_gpu: bool, dtype: torch.dtype, max_lora_rank: int | None
) -> dict[str, Any]:
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}.get(config.dtype, dtype)
    arguments: dict[str, Any] = {
        "dtype": _DTYPES[wanted],
        "enforce_eager": not on_gpu if config.enforce_eager is None else config.enforce_eager,
        "max_model_len": config.max_model_len if config.max_model_len is not None else -1 if on_gpu else None,
        "max_num_seqs": config.max_num_seqs,
        "use_tqdm_on_load": False,
    }
    if max_lora_rank is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_cpu_loras": 1,
            "max_lora_rank": lora_rank(max_lora_rank),
        }
    if on_gpu:
        arguments |= {"gpu_memory_utilization": config.memory_share, "enable_sleep_mode": config.sleep}
    if config.kv_cache_gib is not None or not on_gpu:
        arguments["kv_cache_memory_bytes"] = int((config.kv_cache_gib or 1) * 2**30)
    return arguments


def lora_rank(rank: int) -> int:
    """The smallest rank that vLLM reserves space for and that holds `rank`.

    Raises:
        UserError: the rank is larger than all.
    """
    for known in LORA_RANKS:
        if rank <= known:
            return known
    raise UserError("model.lora.rank", rank, f"at most {LORA_RANKS[-1]} with model.rollout.engine=vllm")


def _lora_request(adapter: Adapter) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.number, str(adapter.folder))


def _sampling_params(sampling: SamplingConfig, seed: int, stop_ids: Sequence[int], every_token: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        max_tokens=sampling.max_completion_length,
        logprobs=0,  # of the sampled token alone
        ignore_eos=True,  # every token that ends a completion is in stop_token_ids
        stop_token_ids=list(stop_ids),
        detokenize=False,
        output_kind=RequestOutputKind.CUMULATIVE if every_token else RequestOutputKind.FINAL_ONLY,
    )


def _sampled(output: Any) -> Sampled:
    completion = output.outputs[0]
    ids = [int(token) for token in completion.token_ids]
    return Sampled(ids, [float(entry[token].logprob) for entry, token in zip(completion.logprobs, ids, strict=True)])


def _variables(config: VLLMConfig, device: torch.device) -> dict[str, str | None]:
    """Environment of the engine process; None takes a variable away. What the user set himself wins."""
    wanted: dict[str, str | None] = dict.fromkeys(_RANK_VARIABLES)
    defaults = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes a core for itself, which the training needs too
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    wanted |= {name: os.environ.get(name, value) for name, value in defaults.items()}
    wanted |= {"VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if device.type == "cuda":
        index = device.index or 0
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        wanted["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    elif device.type == "cpu":
        wanted["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads()))
        if config.enforce_eager is not False:  # parts of its sampler are compiled all the same, for a minute and more
            wanted["TORCHDYNAMO_DISABLE"] = os.environ.get("TORCHDYNAMO_DISABLE", "1")
    return wanted


@contextmanager
def _environment(variables: dict[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set(variables)
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _child_ignores_ctrl_c() -> Iterator[None]:
    """Children started inside inherit a mask that blocks SIGINT, which a terminal sends to the whole process group."""
    resource_tracker.ensure_running()  # its start, if it came later, would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _faults(what: str) -> Iterator[None]:
    """Errors of vLLM's as one line; running out of memory passes, so that the rollout can be repeated smaller."""
    try:
        yield
    except (UserError, SystemFault, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise SystemFault(f"vLLM: {what} ({' '.join(str(error).split())[:300] or type(error).__name__})") from error


def _start_fault(error: Exception, location: str) -> Exception:
    text = " ".join(str(error).split())
    if "does not support LoRA" in text or "not supported" in text and "architectures" in text.lower():
        return UserError("model.rollout.engine", "vllm", f"an engine that can run {location} ({text[:200]})")
    return SystemFault(
        f"vLLM does not start: {text[:300]}; more room: model.rollout.vllm.memory_share, kv_cache_gib, max_model_len. "
        "VLLM_LOGGING_LEVEL=INFO shows its own log"
    )
