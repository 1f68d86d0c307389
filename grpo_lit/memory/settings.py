"""From a configuration's sections to the planner's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from grpo_lit.memory.plan import MIB, Formats, StepSizes
from grpo_lit.memory.quantized_table import BYTES_PER_WEIGHT

if TYPE_CHECKING:
    from grpo_lit.module import GRPOModule

_WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}
_FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def formats_of(module: GRPOModule, *, on_cuda: bool = True, model_type: str = "llama") -> Formats:
    """Formats and levers of a module, as its configuration has them; what is loaded already is asked itself.

    Args:
        module: the module, its model loaded or not.
        on_cuda: whether it will run on a CUDA device.
        model_type: of the model's configuration, where the model is not loaded.
    """
    policy, lora = module.policy_config, module.lora_config
    wanted = policy.gradient_checkpointing
    live = module.policy
    if live is not None and live.checkpointing is not None:
        checkpointed: int | None = live.checkpointing.count
    else:
        checkpointed = None if wanted is True or wanted == "auto" else int(wanted)
    fused = policy.fused_layers
    if live is not None:
        fused = live.fused is not None
    elif fused is None:
        fused = on_cuda and lora is not None and model_type in _FUSED_FAMILIES
    loss = module.loss_config
    return Formats(
        width=_WIDTHS[policy.dtype],
        nf4=policy.quantization == "nf4",
        head_bytes=None if policy.head_quantization is None else BYTES_PER_WEIGHT[policy.head_quantization],
        lora_rank=None if lora is None else lora.rank,
        lora_targets=() if lora is None else tuple(lora.targets),
        lora_width=4 if lora is None else _WIDTHS[lora.dtype],
        moment_bytes=moment_bytes(module, _WIDTHS[policy.dtype]),
        checkpointed=checkpointed,
        offload=policy.activation_offload,
        mlp_tile=policy.mlp_tile_tokens,
        fused=bool(fused),
        chunk_tokens=policy.mlp_tile_tokens or 2048,
        engine=engine_of(module, on_cuda),  # type: ignore[arg-type]
        scores=loss.needs_reference or loss.token_rule != "none",
        workspace=workspace_bytes() if on_cuda else 0,
    )


def engine_of(module: GRPOModule, on_cuda: bool) -> str:
    """graph, hf or vllm: how a rollout's keys and values are held."""
    name = getattr(getattr(module, "engine", None), "name", None) or module.rollout_config.engine
    if name.startswith("vllm"):
        return "vllm"
    return "hf" if name == "hf" or (name == "auto" and not on_cuda) else "graph"


def moment_bytes(module: GRPOModule, width: int) -> float:
    """Optimizer state on the device for each trained weight, found by making the optimizer over one weight.

    bitsandbytes' 8-bit moments take 2 bytes and their scales, its paged ones wait in host memory when there is
    little room; they are counted as if they were on the device.
    """
    probe = torch.nn.Parameter(torch.zeros(1))
    optimizer: Any = module.optimizer_callable([probe])
    kind = type(optimizer)
    if kind.__module__.startswith("bitsandbytes."):
        return 2.04 if "8bit" in kind.__name__ else 8.0
    each = 4 if module.lora_config is not None and module.lora_config.dtype == "fp32" else width
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return 2.0 * each
    if isinstance(optimizer, torch.optim.SGD):
        return float(each) if optimizer.param_groups[0].get("momentum") else 0.0
    return 2.0 * each


def workspace_bytes() -> int:
    """What cuBLAS takes from the allocator for a thread: the main one, and autograd's, which runs the backward.

    32.1 MiB from Hopper on, 8.1 MiB on earlier cards and where unknown (getChosenWorkspaceSize in torch's
    CublasHandlePool.cpp).
    """
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    return (32 if hopper else 8) * MIB + 128 * 1024


def step_sizes_of(module: GRPOModule, *, prompt_tokens: int, prompts: int, rows: int | None = None) -> StepSizes:
    """The largest step that a module's configuration can make.

    Args:
        module: the module.
        prompt_tokens: longest prompt.
        prompts: prompts of a step.
        rows: rows of a step on this device; None for prompts times group size.
    """
    rollout = module.rollout_config
    rows = prompts * rollout.group_size if rows is None else rows
    engine = getattr(module, "engine", None)
    batch = (None if engine is None else engine.batch_size) or rollout.batch_size or rows
    micro = min(module.micro_batch_size, rows)
    return StepSizes(
        prompt_tokens=prompt_tokens,
        completion_tokens=rollout.sampling.max_completion_length,
        rollout_rows=min(batch, rows),
        prompts=prompts,
        micro_rows=micro,
        score_rows=min(getattr(module, "score_batch_size", None) or micro, rows),
    )
