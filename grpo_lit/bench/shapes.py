"""Models of a known shape with nothing learnt, for benchmarks: a folder with a config and a small tokenizer."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from grpo_lit.errors import UserError

# DeepSeek-R1-Distill-Qwen-1.5B's config.json
_QWEN2_1_5B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": _QWEN2_1_5B,
    # SmolLM2-135M's config.json
    "135m": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "tiny": {
        **_QWEN2_1_5B,
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


def check_lengths(shape: str, prompt_tokens: int, completion_tokens: int, argument: str) -> None:
    """See that a shape has positions for a prompt and its completion.

    Raises:
        UserError: it has not; ``argument`` is the option of the completion's length.
    """
    positions = SHAPES[shape]["max_position_embeddings"]
    if prompt_tokens + completion_tokens > positions:
        accepted = f"at most {positions - prompt_tokens}: the model has {positions} positions"
        raise UserError(argument, completion_tokens, accepted)


def write_model_folder(shape: str, folder: Path) -> Path:
    """Write config.json of a shape and the tokenizer of the quick start's model; no weights.

    Train it with ``model.policy.random_weights: true``.

    Raises:
        UserError: for an unknown shape.
    """
    if shape not in SHAPES:
        raise UserError("shape", shape, " | ".join(SHAPES))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=2))
    assets = Path(__file__).parent.parent / "assets" / "tiny_arithmetic"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (assets / name).exists():
            shutil.copy(assets / name, folder / name)
    return folder


def noise(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that differs between completions and means nothing: 0 or 1 by a hash of prompt and completion."""
    del columns
    return [float(hashlib.sha256((p + c).encode()).digest()[0] & 1) for p, c in zip(prompts, completions, strict=True)]
