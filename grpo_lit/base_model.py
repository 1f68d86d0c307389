"""The base model's weights: loaded or drawn at random, and held in 4 bits where asked for."""

from __future__ import annotations

from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from grpo_lit.errors import SystemFault, UserError
from grpo_lit.gguf_files import read_once
from grpo_lit.hub import announce_download
from grpo_lit.model_source import ModelSource, load_model_config

if TYPE_CHECKING:
    from grpo_lit.policy import PolicyConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DROPOUT_FIELDS = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "dropout")


def load_base_model(config: PolicyConfig, source: ModelSource, device: torch.device) -> PreTrainedModel:
    """The model without adapters, its weights loaded on the CPU or drawn on ``device``.

    Args:
        config: of the policy.
        source: where the model is.
        device: random weights are drawn there, and quantized where the configuration asks for 4 bits.

    Raises:
        UserError: the location is no causal language model.
        SystemFault: it does not fit into memory.
    """
    model_config = without_dropout(load_model_config(source))
    common: dict[str, Any] = {"dtype": DTYPES[config.dtype], "attn_implementation": config.attn_implementation}
    if config.random_weights:
        model_config.quantization_config = None
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(model_config, **common)
        draw_weights(model, device, DTYPES[config.dtype] if config.quantization == "nf4" else None)
        return model
    if not source.is_local:
        announce_download(source.location)
    try:
        with read_once(source.gguf_file):
            model = AutoModelForCausalLM.from_pretrained(
                source.location, config=model_config, **source.kwargs, **common
            )
    except torch.OutOfMemoryError as error:
        raise SystemFault(f"model.policy.path={source.spec!r}: does not fit into memory ({error})") from error
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UserError("model.policy.path", source.spec, f"a causal language model ({one_line(error)})") from error
    except (SafetensorError, UnpicklingError, EOFError, RuntimeError) as error:
        accepted = f"a model whose weights are whole and run no code when they are read ({one_line(error)})"
        raise UserError("model.policy.path", source.spec, accepted) from error
    if source.gguf_file:
        # The tensors are plain floating point by now; these marks would make transformers refuse to save the model.
        if hasattr(model.config, "quantization_config"):  # set by some releases of transformers 5
            del model.config.quantization_config
        for mark in ("hf_quantizer", "quantization_method", "is_quantized"):
            vars(model).pop(mark, None)
    return model


def draw_weights(model: PreTrainedModel, device: torch.device, nf4: torch.dtype | None = None) -> None:
    """Give a model on the meta device its initial random weights, one module at a time, on ``device``.

    Args:
        model: a transformers model on the meta device.
        device: where the weights are drawn and stay.
        nf4: quantize each linear layer but the output layer as soon as it is drawn, with this compute dtype, so that
            the floating-point weights never exist together; None leaves them as they are.
    """
    head = model.get_output_embeddings()
    for name in [name for name, _ in model.named_modules()]:  # no list of modules: it would keep what is replaced
        module = model.get_submodule(name)
        module.to_empty(device=device, recurse=False)
        model._initialize_weights(module)
        if nf4 is not None and type(module) is nn.Linear and module is not head:
            _quantize_layer(model, name, module, nf4, device)
    model.tie_weights()
    model.eval()


def without_dropout(config: PretrainedConfig) -> PretrainedConfig:
    """Set every dropout rate of a model configuration to 0.

    The importance ratio compares two passes over the same tokens; dropout would make it noise.
    """
    for name in _DROPOUT_FIELDS:
        if isinstance(getattr(config, name, None), float):
            setattr(config, name, 0.0)
    return config


def quantize_nf4(model: nn.Module, compute_dtype: torch.dtype, device: torch.device) -> int:
    """Hold every linear layer but the output layer in NF4 with double quantization (QLoRA, 2305.14314), in place.

    Embedding and output layer stay as they are: their rows are looked up or scored one by one, and 4 bits there
    cost accuracy on every token.

    Args:
        model: a transformers causal language model on the CPU.
        compute_dtype: dtype the 4-bit blocks are dequantized to.
        device: where the quantization happens and the layer stays.

    Returns:
        The number of quantized layers.

    Raises:
        SystemFault: bitsandbytes is not installed or does not support the device.
    """
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linear = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    layers = [(name, module) for name, module in linear if type(module) is nn.Linear and module is not head]
    if len(linear) <= (head is not None):
        raise UserError("model.policy.quantization", "nf4", "null: this model has no nn.Linear layers to quantize")
    count = len(layers)
    del linear
    while layers:  # popped, so that the floating-point weight goes when its layer is done
        _quantize_layer(model, *layers.pop(), compute_dtype, device)
    return count


def _quantize_layer(
    model: nn.Module, name: str, layer: nn.Linear, compute_dtype: torch.dtype, device: torch.device
) -> None:
    try:
        from grpo_lit.frozen4bit import FrozenLinear4bit
    except ImportError as error:
        raise SystemFault("model.policy.quantization=nf4 needs bitsandbytes: pip install bitsandbytes") from error
    model.set_submodule(name, FrozenLinear4bit.from_linear(layer, compute_dtype, device))


def one_line(error: BaseException, limit: int = 200) -> str:
    """An exception's text on one line, cut to a readable length."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else text[: limit - 3] + "..."
