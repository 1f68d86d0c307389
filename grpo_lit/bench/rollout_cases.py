"""What ``bench rollout`` times: a model of a given shape with random weights, and the engines that are installed."""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from grpo_lit.bench.shapes import write_model_folder
from grpo_lit.lora import LoRAConfig
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.rollout import HFEngine, RolloutEngine, SamplingConfig, row_keys
from grpo_lit.rollout.base import Progress
from grpo_lit.rollout.graph import GraphEngine

GROUP_SIZE = 4
FORMATS = ("bf16", "bf16+lora", "nf4+lora")
_NEVER = -1  # an EOS that no row samples, so that every row runs to its last token


def build_policy(shape: str, weights: str, folder: Path, device: torch.device) -> Policy:
    """A policy with random weights, and random adapters where the format has them.

    Args:
        shape: a key of `grpo_lit.bench.shapes.SHAPES`.
        weights: one of `FORMATS`.
        folder: where config.json is written for loading.
        device: where the weights go.
    """
    write_model_folder(shape, folder)
    dtype = "bf16" if device.type == "cuda" else "fp32"
    quantization: Any = "nf4" if weights.startswith("nf4") else None
    config = PolicyConfig(str(folder), dtype=dtype, quantization=quantization, random_weights=True)  # type: ignore[arg-type]
    policy = load_policy(config, LoRAConfig() if weights.endswith("lora") else None, device=device)
    policy.requires_grad_(False)
    for name, parameter in policy.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.01)
    return policy


def tokenizer() -> PreTrainedTokenizerFast:
    """The least that an engine asks of one."""
    backend = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


def build_engine(name: str, policy: Policy) -> RolloutEngine:
    """An engine whose rows never end early."""
    engine = GraphEngine(policy, tokenizer()) if name == "graph" else HFEngine(policy, tokenizer())
    engine.eos_token_ids = [_NEVER]
    return engine


def installed_engines() -> list[str]:
    """Engines that run on weights held in memory."""
    return ["graph", "hf"]


@dataclass
class Measurement:
    """Speed and memory of one engine at one size.

    Attributes:
        seconds: of each timed call, prefill and recording included.
        num_tokens: tokens a row in the timed calls.
        startup_seconds: what the first call at this size took longer: compiling and loading kernels.
        base_mib: memory allocated before.
        peak_mib: most memory allocated during a call.
    """

    seconds: list[float]
    num_tokens: int
    startup_seconds: float
    base_mib: float
    peak_mib: float

    @property
    def ms_per_step(self) -> float:
        """Median over the calls: wall-clock time of a whole call over tokens a row."""
        return statistics.median(self.seconds) / self.num_tokens * 1e3


def generate(
    engine: RolloutEngine, rows: int, num_tokens: int, prompt_tokens: int, vocab: int, progress: Progress | None = None
) -> None:
    """One rollout of `rows` rows in groups of `GROUP_SIZE`, random prompts."""
    counts = [min(GROUP_SIZE, rows - start) for start in range(0, rows, GROUP_SIZE)]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(2, vocab, (len(counts), prompt_tokens), generator=generator).tolist()
    keys = row_keys(0, 0, [g for g, n in enumerate(counts) for _ in range(n)], [i for n in counts for i in range(n)])
    engine.generate(prompts, counts, keys, SamplingConfig(max_completion_length=num_tokens), progress)


def measure(
    engine: RolloutEngine, rows: int, num_tokens: int, prompt_tokens: int, vocab: int, *, samples: int
) -> Measurement:
    """Time whole rollouts, with `release` between them as in training."""
    device = engine.policy.device  # type: ignore[attr-defined]
    base = 0.0
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated(device) / 2**20
    seconds: list[float] = []
    peak = 0.0
    start = time.perf_counter()
    generate(engine, rows, num_tokens, prompt_tokens, vocab)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    first = time.perf_counter() - start
    for _ in range(samples):
        engine.release()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        generate(engine, rows, num_tokens, prompt_tokens, vocab)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            peak = max(peak, torch.cuda.max_memory_allocated(device) / 2**20)
        seconds.append(time.perf_counter() - start)
    engine.release()
    startup = max(0.0, first - statistics.median(seconds))
    return Measurement(seconds, num_tokens, startup, base, peak)


@contextmanager
def quiet() -> Iterator[None]:
    """No log lines of transformers between the rows of a table."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
