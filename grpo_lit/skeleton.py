"""What a model without weights tells: whether transformers can build it so, and whether adapters fit its layers."""

from __future__ import annotations

import logging

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from grpo_lit.base_model import DTYPES
from grpo_lit.errors import UserError
from grpo_lit.lora import LoRAConfig, inject_lora, lora_layers
from grpo_lit.model_source import load_model_config, resolve_model_source
from grpo_lit.policy import PolicyConfig

_log = logging.getLogger(__name__)


def build_skeleton(policy: PolicyConfig, *, argument: str = "model.policy.path") -> PreTrainedModel:
    """The model on the meta device, where tensors have shapes and no memory.

    Raises:
        UserError: no causal language model, or no such attention.
    """
    config = load_model_config(resolve_model_source(policy.path, argument=argument), argument=argument)
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=DTYPES[policy.dtype], attn_implementation=policy.attn_implementation
            )
    except (ValueError, ImportError) as error:
        text = " ".join(str(error).split())[:200]
        if "attn" in text or "ttention" in text:
            accepted = f"an attention that transformers has here, such as sdpa ({text})"
            raise UserError("model.policy.attn_implementation", policy.attn_implementation, accepted) from error
        raise UserError(argument, policy.path, f"a causal language model ({text})") from error
    return model


def check_skeleton(policy: PolicyConfig, lora: LoRAConfig | None) -> None:
    """See that the model can be built, and that the adapters fit it.

    A rank above a matrix's smaller side adds parameters and nothing that they could express. PEFT takes it without a
    word, and some take 256 where the keys have 128 columns: that is logged. Above every matrix it is a mistake.

    Raises:
        UserError: no causal language model, no such attention, a target that there is not, or too high a rank.
    """
    model = build_skeleton(policy)
    if lora is None:
        return
    inject_lora(model, lora.rank, lora.alpha, tuple(lora.targets))
    sizes = {name.rpartition(".")[2]: min(layer.in_features, layer.out_features) for name, layer in lora_layers(model)}
    if lora.rank > max(sizes.values()):
        raise UserError("model.lora.rank", lora.rank, f"at most {max(sizes.values())}, the rank of the largest matrix")
    if small := [f"{name} ({size})" for name, size in sizes.items() if lora.rank > size]:
        _log.warning("model.lora.rank=%d is above the rank of %s: more parameters, no more effect", lora.rank, small)
