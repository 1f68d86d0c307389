"""The same training step in TRL with PEFT and bitsandbytes, for ``bench step``; needs trl, datasets and peft.

Nothing here is used in training. A few tokens are generated first, to warm up. TRL then reuses a batch of completions
for two optimizer steps (``num_iterations=2``), so that the second one is training alone, warm: its parts and its
optimizer step are the training time; generation is timed where it happens, without the scoring of old log-probs that
TRL does after it in this setting.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo_lit.bench.shapes import noise, write_model_folder
from grpo_lit.bench.step import note
from grpo_lit.errors import SystemFault


def run_trl(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Seconds by phase and peaks in MiB, under the names of our own candidates.

    Raises:
        SystemFault: TRL or what it needs is not installed.
    """
    try:
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoTokenizer, BitsAndBytesConfig, TrainerCallback

        trl = importlib.import_module("trl")  # no dependency of this package
    except ImportError as error:
        raise SystemFault(f"the candidate trl needs trl, datasets, peft and bitsandbytes: {error}") from error

    on_cuda = torch.cuda.is_available() and not options.cpu
    dtype = torch.bfloat16 if on_cuda else torch.float32
    folder = _weights(options.shape, scratch / "model", dtype, "cuda" if on_cuda else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    watch = _Watch(on_cuda)
    parts = max(1, options.prompts * options.rows // options.micro_batch)
    trainer = _timed(trl.GRPOTrainer, watch)(
        model=str(folder),
        reward_funcs=noise,
        args=_settings(trl.GRPOConfig, options, parts, str(scratch / "out"), dtype),
        train_dataset=Dataset.from_dict({"prompt": _prompts(tokenizer, options.prompts, options.prompt_tokens)}),
        processing_class=tokenizer,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        ),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
        ),
        callbacks=[_marks(TrainerCallback, watch, parts)],
    )
    note("model loaded")
    _warm_up(trainer.model, options.rows)
    note("warmed up")
    trainer.train()
    lengths = [
        line["completions/mean_length"] for line in trainer.state.log_history if "completions/mean_length" in line
    ]
    return watch.result(parts) | {"completion_length": lengths[0] if lengths else None, "kernels": None}


def _timed(trainer: Any, watch: _Watch) -> Any:
    """TRL's trainer, whose own methods are timed from outside."""

    class Timed(trainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            found = watch.timed("generate", super()._generate_and_score_completions, inputs)
            note(f"generated: {watch.seconds['generate'][-1]:.3f} s")
            return found

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            if watch.inside != "generate":
                return super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return watch.timed("score", super()._get_per_token_logps_and_entropies, *args, **kwargs)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return watch.timed("training_step", super().training_step, *args, **kwargs)

    return Timed


def _marks(callback: Any, watch: _Watch, parts: int) -> Any:
    """Notes when an optimizer step begins and ends."""

    class Marks(callback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            watch.mark("before optimizer")

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            watch.mark("after optimizer")
            note(f"optimizer step after parts of {[round(s, 3) for s in watch.seconds['training_step'][-parts:]]} s")

    return Marks()


def _settings(kind: Any, options: argparse.Namespace, parts: int, folder: str, dtype: torch.dtype) -> Any:
    """TRL's own settings for two optimizer steps over one batch of completions."""
    on_cuda = dtype == torch.bfloat16
    return kind(
        output_dir=folder,
        per_device_train_batch_size=options.micro_batch,
        gradient_accumulation_steps=parts,
        num_generations=options.rows,
        num_iterations=2,
        max_completion_length=options.completion_tokens,
        max_steps=2,
        learning_rate=1e-4,
        bf16=on_cuda,
        use_cpu=not on_cuda,
        gradient_checkpointing=True,
        beta=0.0,
        temperature=1.0,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        optim="adamw_torch",
        disable_tqdm=True,
        model_init_kwargs={"dtype": dtype} | ({"device_map": {"": 0}} if on_cuda else {}),
    )


def _warm_up(model: Any, rows: int) -> None:
    """A few tokens, so that what is loaded and chosen once does not count as generation."""
    ids = torch.full((rows, 8), 5, device=next(model.parameters()).device)
    with torch.no_grad():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0)


def _weights(shape: str, folder: Path, dtype: torch.dtype, device: str) -> Path:
    """A model folder with random weights, drawn on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_model_folder(shape, folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    model.generation_config.eos_token_id = None  # every completion runs to its full length
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


def _prompts(tokenizer: Any, count: int, tokens: int) -> list[str]:
    """Different texts of exactly so many tokens."""
    texts = []
    for i in range(count):
        text = ""
        digit = 0
        while len(tokenizer(text)["input_ids"]) < tokens:
            text += str((digit * (i + 2) + digit // 7) % 10)
            digit += 1
        texts.append(text)
    return texts


class _Watch:
    """Durations of nested calls, with the device waited for, and peaks of memory."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.inside = ""
        self.seconds: dict[str, list[float]] = {}
        self.marks: list[tuple[str, float]] = []
        self.peaks: dict[str, list[float]] = {}

    def _now(self) -> float:
        if self.on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def mark(self, name: str) -> None:
        """Note the time of an event."""
        self.marks.append((name, self._now()))

    def timed(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call and note how long it took, and the peak of allocated memory within."""
        outer, self.inside = self.inside, name
        if self.on_cuda and name in ("generate", "training_step"):
            torch.cuda.reset_peak_memory_stats()
        start = self._now()
        out = call(*args, **kwargs)
        self.seconds.setdefault(name, []).append(self._now() - start)
        if self.on_cuda:
            self.peaks.setdefault(name, []).append(torch.cuda.max_memory_allocated() / 2**20)
        self.inside = outer
        return out

    def result(self, parts: int) -> dict[str, Any]:
        """The figures of a step: one generation, and the training of the second optimizer step."""
        score = sum(self.seconds.get("score", []))
        rollout = self.seconds["generate"][0] - score
        train = sum(self.seconds["training_step"][-parts:])
        last = {name: at for name, at in self.marks}
        optimizer = last["after optimizer"] - last["before optimizer"]
        found: dict[str, Any] = {
            "rollout_s": rollout,
            "reward_s": 0.0,
            "score_s": 0.0,
            "train_s": train,
            "optimizer_s": optimizer,
            "step_s": rollout + train + optimizer,
        }
        if self.on_cuda:
            found["train_peak_mib"] = max(self.peaks["training_step"][-parts:])  # the first ones generate inside
            found["peak_mib"] = max(max(peaks) for peaks in self.peaks.values())
            found["reserved_mib"] = torch.cuda.max_memory_reserved() / 2**20
        return found
