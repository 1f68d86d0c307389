"""``grpo-lit sent``: sample each training prompt, cluster the answers, and write the SENT cache.

Takes the configuration that will be trained, so that model, template and prompts are the same:

    grpo-lit sent --config smollm2_gsm8k --sent.samples 4 --sent.output sent.jsonl
    grpo-lit fit  --config smollm2_gsm8k --data.sent_cache sent.jsonl
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.cli import LightningArgumentParser
from numpy.typing import NDArray

from grpo_lit.cli.parser import GRPOCLI
from grpo_lit.cli.train import build, check_data
from grpo_lit.datamodules.loader import PromptBatch
from grpo_lit.datamodules.math import MathDataModule
from grpo_lit.datamodules.order import SamplerConfig
from grpo_lit.datamodules.sent import cluster_answers, cluster_entropy
from grpo_lit.datamodules.sent_cache import (
    SentCache,
    SentCacheWriter,
    SentEntry,
    first_difference,
    model_key,
    read_sent_cache,
)
from grpo_lit.datamodules.sent_report import draw, markdown
from grpo_lit.errors import SystemFault, UserError, on_stop
from grpo_lit.module import GRPOModule
from grpo_lit.oom import is_out_of_memory
from grpo_lit.paths import output_file
from grpo_lit.policy import load_policy
from grpo_lit.prompts import prefilled_tail
from grpo_lit.rewards import compute_rewards, final_answer
from grpo_lit.rewards.compute import reward_name
from grpo_lit.rollout import Rollout, RolloutEngine, SamplingConfig, build_engine, row_keys


@dataclass
class SentConfig:
    """How prompts are sampled for their semantic entropy; temperature and length are those of model.rollout.sampling.

    Args:
        samples: answers per prompt (M).
        output: the cache; data.sent_cache or sent.jsonl in trainer.default_root_dir by default.
        prompts_per_batch: prompts sampled together, and lost at most when the command is killed.
    """

    samples: int = 4
    output: str | None = None
    prompts_per_batch: int = 32

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise UserError("sent.samples", self.samples, "at least 2 answers per prompt")
        if self.prompts_per_batch < 1:
            raise UserError("sent.prompts_per_batch", self.prompts_per_batch, "at least 1 prompt")


class SentCLI(GRPOCLI):
    """`GRPOCLI` with the section ``sent``."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the section."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(SentConfig, "sent")


def main(arguments: Sequence[str]) -> int:
    """Sample what is missing, write cache, figure and table."""
    cli = build("sent", arguments, SentCLI)
    if cli.config["ckpt_path"]:
        raise UserError("ckpt_path", cli.config["ckpt_path"], "null: the order is made with the model before training")
    config = SentConfig(**vars(cli.config_init["sent"]))
    module, data = cli.model, cli.datamodule
    default = data.sent_cache or str(Path(cli.trainer.default_root_dir) / "sent.jsonl")
    path = output_file(config.output or default, "sent.output")
    if path.suffix in (".md", ".png"):  # table and figure take the cache's name with these endings
        raise UserError("sent.output", str(path), "a file such as sent.jsonl; .md and .png will lie beside it")
    data.sent_cache, data.sent_stage, data.sampler = None, None, SamplerConfig()
    check_data(cli)
    key = cache_key(module, data, config)
    with on_stop(lambda: f"; finished batches are kept in {path}.partial, the same command goes on"):
        cache = finished(path, key) or sample(module, data, config, path, key, cli.trainer.strategy.root_device)
    table = markdown(cache, config.samples)
    path.with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    draw(cache, path.with_suffix(".png"))
    print(table)
    print(
        f"cache: {path} ({path.with_suffix('.md').name}, {path.with_suffix('.png').name}); use it with "
        f"grpo-lit fit ... --data.sent_cache {shlex.quote(str(path))}"
    )
    return 0


def cache_key(module: GRPOModule, data: MathDataModule, config: SentConfig) -> dict[str, Any]:
    """All that the entropies depend on."""
    sampling = asdict(module.rollout_config.sampling)
    return {
        **data.sent_key(module.encoder),
        "model": model_key(module.policy_config),
        "sampling": {**sampling, "samples": config.samples, "seed": module.seed},
        "verdict": module.reward_names[0],
    }


def finished(path: Path, key: dict[str, Any]) -> SentCache | None:
    """The cache, if it is complete already.

    Raises:
        UserError: there is one with another key.
    """
    if not path.is_file():
        return None
    cache = read_sent_cache(path, argument="sent.output")
    difference = first_difference(key, cache.key)
    if difference is not None:
        raise UserError("sent.output", str(path), f"a path without a cache of other settings ({difference})")
    path.with_name(path.name + ".partial").unlink(missing_ok=True)
    print(f"{path} is complete already")
    return cache


def sample(
    module: GRPOModule, data: MathDataModule, config: SentConfig, path: Path, key: dict[str, Any], device: Any
) -> SentCache:
    """Sample all prompts that the partial file doesn't hold, batch by batch."""
    rollout_config = module.rollout_config
    writer = SentCacheWriter(path, key, {"engine": rollout_config.engine})
    total, done = data.num_train_prompts, len(writer.entries)
    if done:
        print(f"going on after {done} of {total} prompts", flush=True)
    if done < total:
        policy = load_policy(module.policy_config, module.lora_config, device=device, seed=module.seed)
        engine = build_engine(rollout_config, policy, module.encoder)
        start = time.monotonic()
        for first in range(done, total, config.prompts_per_batch):
            positions = range(first, min(first + config.prompts_per_batch, total))
            writer.add(measure(module, engine, data.train_batch(positions), config.samples))
            seconds = time.monotonic() - start
            rate = (positions.stop - done) / seconds
            print(f"{positions.stop} of {total} prompts, {rate:.1f} a second", file=sys.stderr, flush=True)
        engine.close()
    return writer.finish()


def measure(module: GRPOModule, engine: RolloutEngine, batch: PromptBatch, samples: int) -> list[SentEntry]:
    """Entropy and pass rate of each prompt of a batch."""
    indices = [index for index in batch.indices for _ in range(samples)]
    keys = row_keys(module.seed, 0, indices, list(range(samples)) * len(batch), "generate")
    rollout = _generate(engine, batch, samples, keys, module.rollout_config.sampling)
    groups = rollout.group_ids.tolist()
    texts = [
        prefilled_tail(batch.prompts[group]) + module.encoder.decode(ids[:length])
        for ids, length, group in zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), groups, strict=True)
    ]
    columns = {name: [values[group] for group in groups] for name, values in batch.columns.items()}
    function = module.reward_functions[0]
    prompts, limit = [batch.prompts[group] for group in groups], module.reward_timeout_s
    output = compute_rewards([function], prompts, texts, columns, timeout_s=limit)
    rewards = output.per_function[reward_name(function)].tolist()
    entries = []
    for position, index in enumerate(batch.indices):
        rows = [row for row, group in enumerate(groups) if group == position]
        answers = [final_answer(texts[row]).text for row in rows]
        clusters = cluster_answers(answers)
        known = [rewards[row] > 0.5 for row in rows if rewards[row] == rewards[row]]
        rate = sum(known) / len(known) if known else None
        entries.append(SentEntry(index, cluster_entropy(clusters), clusters, rate, answers))
    return entries


def _generate(
    engine: RolloutEngine, batch: PromptBatch, samples: int, keys: NDArray[np.uint64], sampling: SamplingConfig
) -> Rollout:
    """Sample; out of memory, again with half the rows at once: same rows, same draws.

    Raises:
        SystemFault: out of memory at a single row.
    """
    while True:
        try:
            return engine.generate(batch.prompt_ids, [samples] * len(batch), keys, sampling)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            rows = min(engine.batch_size or len(keys), len(keys))
            if rows <= 1:
                raise SystemFault(f"out of memory at a single row ({' '.join(str(error).split())[:120]})") from error
            cause = " ".join(str(error).split())[:60]
        engine.release()
        engine.batch_size = rows // 2
        print(f"out of memory at {rows} rows ({cause}); going on with {rows // 2} at once", file=sys.stderr, flush=True)
