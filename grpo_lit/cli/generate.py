"""``grpo-lit generate``: answers from a base model, a PEFT adapter, a checkpoint or a run, as they come or at once."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessorList, TextStreamer

from grpo_lit.adapter_config import read_adapter_config
from grpo_lit.cli.parser import CLIParser
from grpo_lit.cli.train import quiet_third_parties
from grpo_lit.datamodules.readers import read_text
from grpo_lit.errors import UserError, typed_names
from grpo_lit.evaluation.config import ModelEntry, Which
from grpo_lit.evaluation.models import (
    ResolvedModel,
    checked,
    encoder_of,
    load_model,
    pick_device,
    positions_of,
    resolve_model,
)
from grpo_lit.policy import Policy, PolicyConfig
from grpo_lit.prompts import Message, PromptEncoder
from grpo_lit.rollout import RolloutConfig, SamplingConfig, SeededSampler, build_engine, row_keys, uniforms
from grpo_lit.rollout.hf import eos_token_ids
from grpo_lit.rollout.vllm_config import INSTALL


def main(arguments: Sequence[str]) -> int:
    """Parse, load and answer."""
    quiet_third_parties()
    parser = CLIParser(prog="grpo-lit generate", description="Answer prompts with a model.")
    parser.add_argument("--prompt", type=list[str], default=[], help="One or more prompts; standard input if none.")
    parser.add_argument(
        "--messages",
        type=str | None,
        default=None,
        help="File of conversations, one JSON list of {role, content} a line; the assistant answers each.",
    )
    parser.add_argument(
        "--stream", type=bool | None, default=None, help="Print tokens as they come; null: on a terminal."
    )
    parser.add_argument("--engine", type=Literal["hf", "graph", "vllm"], default="hf", help="Only hf streams.")
    parser.add_argument("--run", type=str | None, default=None, help="Run folder: its base, format and weights.")
    parser.add_argument("--which", type=Which, default="final", help="Of a run: which of its weights.")
    parser.add_argument("--adapter", type=str | None, default=None, help="PEFT folder to put over the base.")
    parser.add_argument("--ckpt_path", type=str | None, default=None, help="Checkpoint of grpo-lit fit to load.")
    parser.add_argument("--chat", type=bool | None, default=None, help="Use the chat template; null: if there is one.")
    parser.add_argument("--system_prompt", type=str | None, default=None, help="System turn for chat models.")
    parser.add_argument("--samples", type=int, default=1, help="Answers per prompt.")
    parser.add_argument("--seed", type=int, default=42, help="Seed of the sampling.")
    parser.add_argument("--device", type=str | None, default=None, help="cpu or cuda; null: cuda where there is one.")
    parser.add_class_arguments(PolicyConfig, "policy", instantiate=True, skip={"path"})
    parser.add_argument("--policy.path", type=str | None, default=None, help="Base model; an adapter names its own.")
    parser.add_class_arguments(SamplingConfig, "sampling", instantiate=True)
    names = {"models.run.run": "run", "models.run.path": "run", "models.run": "", "model.policy": "policy"}
    with typed_names(names):
        return generate(parser.instantiate_classes(parser.parse_args(_as_list(arguments))))


def generate(options: Any) -> int:
    """Check, load and answer."""
    check_options(options)
    conversations = read_messages(options.messages)
    prompts = options.prompt or ([] if conversations else [line.rstrip("\n") for line in sys.stdin if line.strip()])
    if not prompts and not conversations:
        raise UserError("prompt", [], "at least one prompt, here or on standard input")
    where = pick_device(options.device)
    resolved = resolve(options, where)
    encoder, positions = encoder_of(resolved), positions_of(resolved)
    texts = [render(prompt, encoder, options.chat, options.system_prompt) for prompt in prompts]
    texts += [render_messages(messages, encoder) for messages in conversations]
    length = options.sampling.max_completion_length
    longest = max(len(encoder.encode(text)) for text in texts)
    if positions is not None and length == SamplingConfig().max_completion_length:  # nobody asked for so many
        length = options.sampling.max_completion_length = max(1, min(length, positions - longest))
    if positions is not None and longest + length > positions:
        accepted = f"at most {positions - longest}: the model has {positions} positions, the longest prompt {longest}"
        raise UserError("sampling.max_completion_length", length, accepted)
    policy, _ = load_model(resolved, where)
    stream = sys.stdout.isatty() if options.stream is None else options.stream
    answer(texts, policy, encoder, options, stream=stream and options.samples == 1 and options.engine == "hf")
    return 0


def check_options(options: Any) -> None:
    """Refuse what can't be, before anything loads.

    Raises:
        UserError: a number out of range, an engine that is not installed, or an unknown device.
    """
    options.sampling.validate("sampling")
    if options.seed < 0:
        raise UserError("seed", options.seed, "a whole number of at least 0")
    if options.samples < 1:
        raise UserError("samples", options.samples, "at least 1")
    if options.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError("engine", "vllm", f"hf or graph where vLLM is not installed; it is an extra ({INSTALL})")
    if options.adapter is not None and options.ckpt_path is not None:
        raise UserError("ckpt_path", options.ckpt_path, "null where adapter is given: one of the two")
    if options.run is not None and (options.adapter is not None or options.ckpt_path is not None):
        name = "adapter" if options.adapter is not None else "ckpt_path"
        raise UserError(name, getattr(options, name), "null where run is given: one of the two")
    if options.stream and (options.samples > 1 or options.engine != "hf"):
        raise UserError("stream", True, "null or false with several samples a prompt or another engine than hf")
    if options.device is not None:
        pick_device(options.device)


def answer(texts: Sequence[str], policy: Policy, encoder: PromptEncoder, options: Any, *, stream: bool) -> None:
    """Print the answers to rendered prompts, an answer a paragraph."""
    config = RolloutConfig(engine=options.engine)
    engine = None if stream else build_engine(config, policy, encoder)
    for index, text in enumerate(texts):
        keys = row_keys(options.seed, 0, [index] * options.samples, list(range(options.samples)), "generate")
        if engine is None:
            stream_answer(policy, encoder, encoder.encode(text), keys, options.sampling)
            continue
        rollout = engine.generate([encoder.encode(text)], [options.samples], keys, options.sampling)
        for ids, length in zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True):
            print(encoder.decode(ids[:length]), flush=True)
    if engine is not None:
        engine.close()


def stream_answer(
    policy: Policy, encoder: PromptEncoder, prompt_ids: list[int], keys: NDArray[np.uint64], sampling: SamplingConfig
) -> None:
    """Print one answer word by word; the same tokens as the hf engine draws for this key."""
    tokenizer = encoder.tokenizer
    sampler = SeededSampler(
        uniforms(keys, sampling.max_completion_length).to(policy.device),
        len(prompt_ids),
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
    )
    config = GenerationConfig(
        max_new_tokens=sampling.max_completion_length,
        do_sample=False,
        use_cache=True,
        eos_token_id=eos_token_ids(policy, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    ids = torch.tensor([prompt_ids], device=policy.device)
    with policy.generating() as model:
        model.generate(  # type: ignore[operator]
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=LogitsProcessorList([sampler]),
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )


def read_messages(path: str | None) -> list[list[Message]]:
    """Conversations of a file, one JSON list of messages a line.

    Raises:
        UserError: no such file, or a line that is no conversation.
    """
    if path is None:
        return []
    if not Path(path).is_file():
        raise UserError("messages", path, "an existing file")
    found = []
    for number, line in enumerate(read_text(Path(path), "messages").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            messages = json.loads(line)
            found.append([{"role": m["role"], "content": m["content"]} for m in messages])
        except (json.JSONDecodeError, TypeError, KeyError) as error:
            raise UserError("messages", f"{path}, line {number}", "a JSON list of {role, content}") from error
    return found


def render_messages(messages: list[Message], encoder: PromptEncoder) -> str:
    """A conversation as the chat template writes it."""
    if not encoder.has_chat_template:
        raise UserError("messages", len(messages), "null: this tokenizer has no chat template")
    return encoder.render_chat(messages)


def _as_list(arguments: Sequence[str]) -> list[str]:
    """Let ``--prompt TEXT`` be given several times, as a list: jsonargparse appends with ``--prompt+``."""
    fixed: list[str] = []
    for argument in arguments:
        if argument == "--prompt":
            fixed.append("--prompt+")
        elif argument.startswith("--prompt="):
            fixed.append("--prompt+=" + argument.removeprefix("--prompt="))
        else:
            fixed.append(argument)
    return fixed


def resolve(options: Any, device: str) -> ResolvedModel:
    """Find base, adapter, checkpoint or run, without loading a weight.

    Raises:
        UserError: no base model, both an adapter and a checkpoint, or what is not there or does not belong together.
    """
    if options.run is not None:
        of_run = resolve_model("run", ModelEntry(run=options.run, which=options.which), device)
        default = PolicyConfig(path=None)  # type: ignore[arg-type]
        for field, value in vars(options.policy).items():
            if value not in (getattr(default, field), theirs := getattr(of_run.policy, field)):
                raise UserError(f"policy.{field}", value, f"{theirs!r}, as in the run, or left out")
        return of_run
    policy: PolicyConfig = options.policy
    resolved, given = ResolvedModel(policy), ModelEntry(adapter=options.adapter, ckpt_path=options.ckpt_path)
    if given.adapter is not None:
        config = read_adapter_config(given.adapter, argument="adapter")
        policy.path = policy.path or config["base_model_name_or_path"]
        resolved.adapter = Path(given.adapter)
    if policy.path is None:
        raise UserError("policy.path", None, "the base model, or an adapter that names it")
    if given.ckpt_path is not None:
        resolved.ckpt_path = Path(given.ckpt_path)
    with typed_names({"base.path": "policy.path", "base": ""}):
        return checked("base", resolved)


def render(prompt: str, encoder: PromptEncoder, chat: bool | None, system_prompt: str | None) -> str:
    """Prompt text as the model expects it."""
    if not (encoder.has_chat_template if chat is None else chat):
        return prompt
    if not encoder.has_chat_template:
        raise UserError("chat", True, "null or false: this tokenizer has no chat template")
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return encoder.render_chat([*system, {"role": "user", "content": prompt}])
