"""``grpo-lit generate``: answers from a base model, a PEFT adapter or a checkpoint."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from grpo_lit.checkpoint import KEY, check_compatible, read_checkpoint
from grpo_lit.cli.parser import CLIParser
from grpo_lit.cli.train import quiet_third_parties
from grpo_lit.errors import SystemFault, UserError
from grpo_lit.lora import LoRAConfig, load_adapter, read_adapter_config
from grpo_lit.model_source import load_model_config, resolve_model_source
from grpo_lit.policy import Policy, PolicyConfig, load_policy
from grpo_lit.prompts import PromptEncoder, load_tokenizer
from grpo_lit.rollout import HFEngine, SamplingConfig, row_keys


def main(arguments: Sequence[str]) -> int:
    """Parse, load and answer."""
    quiet_third_parties()
    parser = CLIParser(prog="grpo-lit generate", description="Answer prompts with a model.")
    parser.add_argument("--prompt", type=list[str], default=[], help="One or more prompts; standard input if none.")
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
    options = parser.instantiate_classes(parser.parse_args(_as_list(arguments)))
    options.sampling.validate("sampling")
    if options.samples < 1:
        raise UserError("samples", options.samples, "at least 1")
    if options.device is not None:
        check_device(options.device)
    prompts = options.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise UserError("prompt", [], "at least one prompt, here or on standard input")
    policy, encoder = load(options.policy, options.adapter, options.ckpt_path, options.device)
    texts = [render(prompt, encoder, options.chat, options.system_prompt) for prompt in prompts]
    engine = HFEngine(policy, encoder.tokenizer)
    for index, text in enumerate(texts):
        keys = row_keys(options.seed, 0, [index] * options.samples, list(range(options.samples)), "generate")
        rollout = engine.generate([encoder.encode(text)], [options.samples], keys, options.sampling)
        for ids, length in zip(rollout.completion_ids.tolist(), rollout.lengths.tolist(), strict=True):
            print(encoder.decode(ids[:length]), flush=True)
    return 0


def check_device(device: str) -> None:
    """Refuse a device that there is not.

    Raises:
        UserError: not the name of a device.
        SystemFault: CUDA, on a machine without it.
    """
    if re.fullmatch(r"cpu|cuda(:\d+)?", device) is None:
        raise UserError("device", device, "cpu or cuda")
    if device != "cpu" and not torch.cuda.is_available():
        raise SystemFault(f"device={device!r}: no CUDA GPU on this machine; use cpu")


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


def load(
    policy: PolicyConfig, adapter: str | None, ckpt_path: str | None, device: str | None
) -> tuple[Policy, PromptEncoder]:
    """The policy with the adapter or checkpoint in it.

    Raises:
        UserError: no base model, both an adapter and a checkpoint, or one that does not fit the base.
    """
    if adapter is not None and ckpt_path is not None:
        raise UserError("ckpt_path", ckpt_path, "null where adapter is given: one of the two")
    lora: LoRAConfig | None = None
    state: dict[str, torch.Tensor] | None = None
    if adapter is not None:
        config = read_adapter_config(adapter, argument="adapter")
        policy.path = policy.path or config["base_model_name_or_path"]
        lora = LoRAConfig(config["r"], config["lora_alpha"], list(config["target_modules"]))
    if policy.path is None:
        raise UserError("policy.path", None, "the base model, or an adapter that names it")
    source = resolve_model_source(policy.path, argument="policy.path")
    if ckpt_path is not None:
        checkpoint = read_checkpoint(Path(ckpt_path))
        entry = checkpoint.get(KEY) or {}
        lora = LoRAConfig(**entry["lora"]) if entry.get("lora") else None
        check_compatible(entry, load_model_config(source), lora, ckpt_path)
        state = {name.removeprefix("policy."): value for name, value in checkpoint["state_dict"].items()}
    encoder = PromptEncoder(load_tokenizer(source, argument="policy.path"))
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_policy(policy, lora, device=where)
    if adapter is not None:
        load_adapter(loaded.model, adapter)
    if state is not None:
        loaded.load_state_dict(state, strict=False)
    return loaded, encoder


def render(prompt: str, encoder: PromptEncoder, chat: bool | None, system_prompt: str | None) -> str:
    """Prompt text as the model expects it."""
    if not (encoder.has_chat_template if chat is None else chat):
        return prompt
    if not encoder.has_chat_template:
        raise UserError("chat", True, "null or false: this tokenizer has no chat template")
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return encoder.render_chat([*system, {"role": "user", "content": prompt}])
