"""Settings of the vllm engine, importable without vLLM."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from grpo_lit.errors import UserError

INSTALL = "pip install 'grpo-lit[vllm]'"


@dataclass
class VLLMConfig:
    """Settings of ``model.rollout.engine=vllm``; the server's own command line decides what is marked colocate."""

    mode: Literal["colocate", "server"] = "colocate"
    """colocate: an engine process beside the training, on the same device, asleep between rollouts. server: a running
    ``vllm serve``, here or on another machine that sees adapter_folder."""
    server_url: str = "http://127.0.0.1:8000"
    """server: its address, without /v1."""
    server_timeout_s: float = 600.0
    """server: seconds to wait for one completion."""
    memory_share: float = 0.3
    """colocate on a GPU: share of its memory for weights and KV cache while awake. The policy is there too."""
    kv_cache_gib: float | None = None
    """colocate: size of the KV cache. null: what memory_share leaves on a GPU, 1 GiB on a CPU."""
    max_model_len: int | None = None
    """colocate: longest prompt plus completion, in tokens. null: what the model and the memory allow."""
    max_num_seqs: int | None = None
    """colocate: rows in one batch; null leaves vLLM's choice. model.rollout.batch_size limits the rows handed over."""
    dtype: Literal["policy", "bf16", "fp16", "fp32"] = "policy"
    """colocate: number format of vLLM's weights; policy: that of model.policy.dtype."""
    enforce_eager: bool | None = None
    """colocate: no CUDA graphs and no compiling: starts sooner, decodes slower. null: only on a CPU."""
    sleep: bool = True
    """colocate on a GPU: between rollouts the weights move to RAM and the KV cache is given up."""
    adapter_folder: str | None = None
    """Where adapters lie while they are handed over. null: RAM (/dev/shm), or the temporary folder where there is
    none. A server must see the same path."""
    base_cache: str | None = None
    """Where a base that vLLM can't read itself (GGUF, NF4) is written once, dequantized. null: ~/.cache/grpo-lit."""
    probe_tolerance: float | None = None
    """Nats: largest mean difference between the policy's and vLLM's log-probs of a few tokens after each hand-over.
    null: 1e-3 where both compute in fp32, else 0.1."""

    def __post_init__(self) -> None:
        name = "model.rollout.vllm"
        if urlsplit(self.server_url).scheme not in ("http", "https") or not urlsplit(self.server_url).netloc:
            raise UserError(f"{name}.server_url", self.server_url, "an address such as http://127.0.0.1:8000")
        if not 0 < self.memory_share <= 1:
            raise UserError(f"{name}.memory_share", self.memory_share, "a number above 0 and at most 1")
        for field in ("server_timeout_s", "kv_cache_gib", "max_model_len", "max_num_seqs", "probe_tolerance"):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise UserError(f"{name}.{field}", value, "a number above 0")

    def check_installed(self) -> None:
        """Find out, before any model loads, whether the engine can be had.

        Raises:
            UserError: naming the extra that brings vLLM.
        """
        if self.mode == "colocate" and importlib.util.find_spec("vllm") is None:
            accepted = f"an engine that is installed: vLLM is an extra ({INSTALL}), or model.rollout.vllm.mode=server"
            raise UserError("model.rollout.engine", "vllm", accepted)

    def check_server(self) -> None:
        """Find out, before any model loads or a folder moves, whether the server is there.

        Raises:
            SystemFault: nobody answers there, or not a vLLM.
        """
        if self.mode == "server":
            from grpo_lit.rollout.vllm_server import ServerBackend

            ServerBackend(self)
