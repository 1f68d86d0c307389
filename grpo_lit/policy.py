"""The policy: a causal language model, frozen or not, quantized or not, that scores completions.

`load_policy` builds it from a `PolicyConfig`; `Policy.score` gives the log-probs and entropies of completions at
the sampling temperature without ever holding the (N, T, V) logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from grpo_lit.base_model import DTYPES, load_base_model, quantize_nf4
from grpo_lit.errors import UserError
from grpo_lit.fused_decoder import FusedDecoder, choose_fused
from grpo_lit.kernels import linear_logprobs
from grpo_lit.lora import LoRAConfig, inject_lora
from grpo_lit.memory.checkpointing import LayerCheckpointing, tile_mlps
from grpo_lit.memory.offload import ActivationOffload
from grpo_lit.memory.quantized_table import quantize_tables
from grpo_lit.model_source import ModelSource, resolve_model_source


@dataclass
class PolicyConfig:
    """Which model is trained and in which number format its base is held."""

    path: str
    """Hub id, folder with config.json, .gguf file, or package:NAME[/path] for files inside an installed package."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Dtype of the weights that are not quantized, and of the computation."""
    quantization: Literal["nf4"] | None = None
    """nf4 holds the linear layers of the frozen base in 4 bits (bitsandbytes, double quantization); needs LoRA."""
    head_quantization: Literal["nf4", "int8"] | None = None
    """Hold token embedding and output layer in 4 or 8 bits: in a small model with a 4-bit base they are half of the
    memory. Needs LoRA. int8 costs next to no accuracy."""
    random_weights: bool = False
    """Draw the weights instead of loading them: the model's shape, nothing learnt. For tests and benchmarks."""
    tokenizer: str | None = None
    """Where the tokenizer comes from, if not from path."""
    attn_implementation: str = "sdpa"
    """Attention of transformers: sdpa, eager, flash_attention_2, ..."""
    gradient_checkpointing: bool | int | Literal["auto"] = False
    """Recompute layers in the backward pass instead of keeping their activations: slower, far smaller. true is all
    layers, a number that many, auto starts with all and gives up as many as memory allows."""
    activation_offload: bool = False
    """Keep the inputs of checkpointed layers in pinned host memory until the backward pass needs them."""
    mlp_tile_tokens: int | None = None
    """Run each MLP over this many tokens at a time, each tile recomputed in the backward pass: for long completions,
    whose MLP intermediates would be the largest thing in memory. null is off."""
    fused_layers: bool | None = None
    """Run the decoder layers through grpo_lit.fused_layers (packed tokens, one autograd node a layer) when scoring
    and training; null does so on CUDA where the model is of a supported family over a frozen base."""
    cpu_threads: int | None = None
    """Threads of torch on the CPU; null leaves torch's choice. A tiny model is faster with 1, above all on a busy
    machine, where threads wait for each other after every small operation."""

    def __post_init__(self) -> None:
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise UserError("model.policy.cpu_threads", self.cpu_threads, "at least 1, or null")
        layers = self.gradient_checkpointing
        if isinstance(layers, int) and layers < 0:
            raise UserError("model.policy.gradient_checkpointing", layers, "true, false, auto or a number of layers")
        if self.activation_offload and not self.gradient_checkpointing:
            accepted = "false without model.policy.gradient_checkpointing: only layer inputs are offloaded"
            raise UserError("model.policy.activation_offload", True, accepted)
        if self.mlp_tile_tokens is not None and self.mlp_tile_tokens < 1:
            raise UserError("model.policy.mlp_tile_tokens", self.mlp_tile_tokens, "at least 1 token, or null")


class TokenScores(NamedTuple):
    """What the policy says of sampled tokens; zeros where the mask is False."""

    logprobs: Tensor
    """(N, T) float32, log-probability of each sampled token at the sampling temperature."""
    entropy: Tensor
    """(N, T) float32, entropy in nats of the distribution each token was drawn from."""


class Policy(nn.Module):
    """A causal language model with the two things GRPO asks of it: generate (through `model`) and score.

    Args:
        model: a transformers causal language model, adapters included.
        source: where it came from.
        checkpointing: which layers recompute their activations in the backward pass; None for none.
    """

    def __init__(
        self, model: PreTrainedModel, source: ModelSource, checkpointing: LayerCheckpointing | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.source = source
        self.checkpointing = checkpointing
        self.fused: FusedDecoder | None = None
        self._head = _OutputHead.of(model)
        self.eos_token_ids = _eos_token_ids(model)
        # A model's own sampling defaults (penalties, suppressed tokens) would make rollouts differ from scoring.
        model.generation_config = GenerationConfig()

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.device

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Policy:
        """Weights move or change their dtype: nothing made of the old ones may stay behind on their device."""
        moved = super()._apply(fn, recurse)
        if self.fused is not None:
            self.fused.forget()
        return moved  # type: ignore[no-any-return]

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter of everything that is trained, in a fixed order."""
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """Eval mode without gradients: checkpointing off and the KV cache on; the mode before is restored."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield self.model
        finally:
            self.model.train(was_training)

    def score(
        self,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        *,
        temperature: float = 1.0,
        scored: Tensor | None = None,
    ) -> TokenScores:
        """Log-probs and entropies of completions, differentiable where the policy is.

        Args:
            prompt_ids: (N, P) long, left-padded.
            prompt_mask: (N, P) bool, True at real tokens.
            completion_ids: (N, T) long, right-padded.
            completion_mask: (N, T) bool, True at real tokens, first EOS included.
            temperature: the logits are divided by it, as in sampling.
            scored: (N, T) bool, the tokens wanted; the others skip the output layer and are 0. None: all real ones.

        Returns:
            `TokenScores` of (N, T) float32 tensors.
        """
        wanted = completion_mask if scored is None else completion_mask & scored
        counts = wanted.reshape(-1).nonzero().squeeze(-1)
        if self.fused is not None:
            rows = self.fused(prompt_ids, prompt_mask, completion_ids, completion_mask, counts)
        else:
            rows = self._rows_before(prompt_ids, prompt_mask, completion_ids, counts)
        logprobs, entropy = linear_logprobs(
            rows,
            self._head.weight,
            completion_ids.reshape(-1)[counts],
            bias=self._head.bias,
            temperature=temperature / self._head.logit_scale,
            softcap=self._head.softcap,
        )
        nothing = torch.zeros(completion_ids.numel(), dtype=torch.float32, device=rows.device)
        logprobs, entropy = (nothing.index_copy(0, counts, values.float()) for values in (logprobs, entropy))
        return TokenScores(logprobs.view(completion_ids.shape), entropy.view(completion_ids.shape))

    def _rows_before(self, prompt_ids: Tensor, prompt_mask: Tensor, completion_ids: Tensor, counts: Tensor) -> Tensor:
        """(M, H) final hidden states before the M of the N T completion tokens that ``counts`` lists."""
        # Every row starts in the first column, padding at its end, where causal attention never looks: then no mask
        # is needed, which attention kernels would expand to (N, P + T, P + T), and positions are 0, 1, 2, ...
        width = prompt_ids.shape[1] + completion_ids.shape[1]
        lengths = prompt_mask.sum(dim=1, keepdim=True)  # (N, 1), of the prompts
        columns = torch.arange(width, device=prompt_ids.device) + (prompt_ids.shape[1] - lengths)
        ids = torch.cat([prompt_ids, completion_ids], dim=1).gather(1, columns.remainder(width))  # (N, P + T)
        self.model.train(self.checkpointing is not None and torch.is_grad_enabled())
        hidden: Tensor = self._head.decoder(input_ids=ids, use_cache=False).last_hidden_state  # (N, P + T, H)
        # The hidden state before a token predicts it; only tokens that count are taken along.
        before = torch.arange(completion_ids.shape[1], device=ids.device) + lengths - 1  # (N, T) columns
        before = before + width * torch.arange(len(ids), device=ids.device).unsqueeze(-1)
        return hidden.flatten(0, 1).index_select(0, before.reshape(-1)[counts])


class _OutputHead(NamedTuple):
    """How a model's hidden states become logits: softcap(scale * (W h + b))."""

    decoder: nn.Module
    layer: nn.Module
    bias: Tensor | None
    logit_scale: float
    softcap: float | None

    @property
    def weight(self) -> Tensor:
        """W (V, H); of a quantized layer made anew at every use."""
        weight: Tensor = self.layer.weight  # type: ignore[assignment]
        return weight

    @staticmethod
    def of(model: PreTrainedModel) -> _OutputHead:
        head = model.get_output_embeddings()
        decoder = getattr(model, model.base_model_prefix, None)
        if head is None or decoder is None or decoder is model:
            raise UserError("model.policy.path", type(model).__name__, "a causal language model with an output layer")
        config = model.config
        scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
        softcap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
        return _OutputHead(decoder, head, getattr(head, "bias", None), scale, softcap)


def _eos_token_ids(model: PreTrainedModel) -> list[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    if configured is None:
        configured = getattr(model.config, "eos_token_id", None)
    return [] if configured is None else [configured] if isinstance(configured, int) else list(configured)


def load_policy(
    config: PolicyConfig, lora: LoRAConfig | None = None, *, device: torch.device | str = "cpu", seed: int = 0
) -> Policy:
    """Build the policy that a configuration describes.

    Args:
        config: model location and number format.
        lora: adapters over a frozen base; None trains every weight.
        device: where the weights go; 4-bit quantization happens there.
        seed: of the adapters' and random weights' initial values, so that every rank draws the same.

    Raises:
        UserError: the location is no causal language model, or 4-bit without LoRA.
        SystemFault: the model hub or the device can't be reached.
    """
    if (config.quantization or config.head_quantization) and lora is None:
        raise UserError("model.lora", None, "a LoRA section: quantized weights can't be trained themselves")
    source = resolve_model_source(config.path)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        model = load_base_model(config, source, torch.device(device))
        if config.quantization == "nf4":
            quantize_nf4(model, DTYPES[config.dtype], torch.device(device))
        if config.head_quantization is not None:
            quantize_tables(model, config.head_quantization, DTYPES[config.dtype], torch.device(device))
        model.to(torch.device(device))  # type: ignore[arg-type]
        if lora is not None:
            inject_lora(model, lora.rank, lora.alpha, tuple(lora.targets), dtype=DTYPES[lora.dtype])
    if devices:
        torch.cuda.empty_cache()  # quantizing leaves blocks of sizes that training has no use for
    if config.mlp_tile_tokens is not None:
        tile_mlps(model, config.mlp_tile_tokens)
    policy = Policy(model, source, _checkpointing(config, model))
    policy.fused = choose_fused(model, policy.checkpointing, config.fused_layers, config.mlp_tile_tokens)
    return policy


def _checkpointing(config: PolicyConfig, model: nn.Module) -> LayerCheckpointing | None:
    wanted = config.gradient_checkpointing
    if wanted is False or wanted == 0:
        return None
    offload = ActivationOffload() if config.activation_offload else None
    return LayerCheckpointing(model, None if wanted is True or wanted == "auto" else wanted, offload)
