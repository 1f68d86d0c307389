"""vLLM behind HTTP: a running ``vllm serve``, spoken to through its OpenAI-compatible endpoints.

What the server must have been started with, and `serve_command` prints:

- the policy's own base (`grpo_lit.rollout.vllm_base` writes it where vLLM can't read it itself)
- ``--enable-lora`` with room for the rank, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, which opens the adapter endpoints
- ``--logprobs-mode processed_logprobs``: log-probs at the sampling temperature; the probe finds out if it is missing

Whoever can reach that port can load adapters from the server's disk: keep it on localhost or a network of your own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import requests
import torch
from requests.adapters import HTTPAdapter

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.rollout.base import SamplingConfig
from grpo_lit.rollout.vllm_backend import Adapter, OnRow, RowEnd, Sampled
from grpo_lit.rollout.vllm_config import VLLMConfig
from grpo_lit.rollout.vllm_local import lora_rank

MAX_CONNECTIONS = 256
"""Requests in flight where no batch size limits them: as many rows as vLLM batches by default."""
_CONNECT_TIMEOUT_S = 10.0
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class ServerBackend:
    """A running vLLM server.

    Args:
        config: address and time-out.

    Raises:
        SystemFault: nobody answers there, or not a vLLM.
    """

    device_sleeps = False

    def __init__(self, config: VLLMConfig) -> None:
        self.url = config.server_url.rstrip("/").removesuffix("/v1")
        self._timeout = (_CONNECT_TIMEOUT_S, config.server_timeout_s)
        self._local = threading.local()
        self.base_name, self.max_model_len = self._find_base()

    def _find_base(self) -> tuple[str, int | None]:
        models = self._call("GET", "/v1/models").json().get("data", [])
        bases = [model for model in models if not model.get("parent")]
        if not bases:
            raise SystemFault(f"model.rollout.vllm.server_url={self.url!r}: the server there serves no model")
        length = bases[0].get("max_model_len")
        return str(bases[0]["id"]), None if length is None else int(length)

    def load(self, adapter: Adapter) -> None:
        """Have the server read an adapter from its folder."""
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder)}
        try:
            self._call("POST", "/v1/load_lora_adapter", body)
        except _RefusedError as error:
            if error.status == 404 and "adapter" not in error.text.lower():
                raise SystemFault(
                    f"the vLLM server at {self.url} takes no adapters at run time: start it with --enable-lora and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                ) from error
            raise

    def unload(self, adapter: Adapter) -> None:
        """Have the server forget an adapter."""
        self._call("POST", "/v1/unload_lora_adapter", {"lora_name": adapter.name})

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
        """One request a row, so that each has its own seed; see `VLLMBackend.sample`."""
        longest = max((len(prompt) for prompt in prompts), default=0) + sampling.max_completion_length
        if self.max_model_len is not None and longest > self.max_model_len:
            accepted = f"at most {self.max_model_len} tokens together with the prompt: the server's --max-model-len"
            raise UserError("max_completion_length", sampling.max_completion_length, accepted)
        shared = _sampling_fields(sampling, stop_ids) | {"model": self.base_name if adapter is None else adapter.name}
        pool = ThreadPoolExecutor(min(rows_in_flight or MAX_CONNECTIONS, max(len(prompts), 1)))
        try:
            futures = {
                pool.submit(self._complete, shared | {"prompt": list(prompt), "seed": seed}): row
                for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            }
            _collect(futures, on_row, row_end)
        finally:
            # After an error nothing new starts; what is in flight ends with its connection's thread.
            pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, body: dict[str, Any]) -> Sampled:
        choice = self._call("POST", "/v1/completions", body).json()["choices"][0]
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs")
        if ids is None or logprobs is None:
            raise SystemFault(f"the server at {self.url} returns no token ids or log-probs: it is no vLLM of this age")
        return Sampled([int(token) for token in ids], [float(value) for value in logprobs["token_logprobs"]])

    def score(self, rows: Sequence[Sequence[int]], adapter: Adapter | None) -> list[list[float]]:
        """Log-probs at temperature 1 of the tokens of each row from its second on."""
        shared = {
            "model": self.base_name if adapter is None else adapter.name,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        scores = []
        for row in rows:
            choice = self._call("POST", "/v1/completions", shared | {"prompt": list(row)}).json()["choices"][0]
            entries = choice["prompt_logprobs"][1:]
            scores.append([float(entry[str(token)]["logprob"]) for entry, token in zip(entries, row[1:], strict=True)])
        return scores

    def sleep(self) -> None:
        """Nothing: the server's memory is its own."""

    def wake(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing: the server goes on for others."""

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        try:
            response = self._session().request(method, self.url + path, json=body, timeout=self._timeout)
        except requests.RequestException as error:
            text = " ".join(str(error).split())[:200]
            raise SystemFault(f"model.rollout.vllm.server_url={self.url!r}: no vLLM server answers ({text})") from error
        if response.status_code >= 400:
            raise _RefusedError(self.url + path, response)
        return response

    def _session(self) -> requests.Session:
        """One session a thread: requests does not promise that threads can share one."""
        session: requests.Session | None = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.trust_env = False  # no proxy between here and a server of one's own
            retrying = HTTPAdapter(
                max_retries=requests.adapters.Retry(total=None, connect=2, read=0, backoff_factor=0.2)
            )
            session.mount("http://", retrying)
            session.mount("https://", retrying)
        return session


class _RefusedError(SystemFault):
    """The server answered with an error."""

    def __init__(self, address: str, response: requests.Response) -> None:
        self.status = response.status_code
        try:
            self.text = str(response.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            self.text = response.text
        super().__init__(f"vLLM server, {address}: {response.status_code} {' '.join(self.text.split())[:300]}")


def _collect(futures: dict[Future[Sampled], int], on_row: OnRow, row_end: RowEnd | None) -> None:
    """Hand rows on as they come; a row is cut at its answer here, since the server knows no such rule."""
    waiting = set(futures)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            row, sampled = futures[future], future.result()
            end = None if row_end is None else row_end(row, sampled.ids, 0)
            on_row(row, sampled if end is None else sampled.cut(end))


def _sampling_fields(sampling: SamplingConfig, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Body of a completion request, all but model, prompt and seed."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,  # the model's own sampling defaults stay out
        "max_tokens": sampling.max_completion_length,
        "logprobs": 0,
        "return_token_ids": True,
        "ignore_eos": True,
        "stop_token_ids": list(stop_ids),
        "skip_special_tokens": False,
    }


def serve_command(location: str, dtype: torch.dtype, rank: int) -> str:
    """The command line that serves a base for training."""
    return (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve "
        f"{location} --dtype {_DTYPES[dtype]} --enable-lora --max-loras 1 --max-lora-rank {lora_rank(rank)} "
        "--logprobs-mode processed_logprobs --generation-config vllm"
    )
