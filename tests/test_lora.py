from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from grpo_lit.adapter_config import read_adapter_config
from grpo_lit.base_model import quantize_nf4
from grpo_lit.errors import UserError
from grpo_lit.kernels import lora_linear
from grpo_lit.lora import (
    LoRAConfig,
    LoRALinear,
    adapters_off,
    inject_lora,
    load_adapter,
    lora_layers,
    merge_lora,
    save_adapter,
)


def randomize(model: nn.Module, seed: int = 1) -> None:
    """Give every B a value, as training would."""
    generator = torch.Generator().manual_seed(seed)
    for _, layer in lora_layers(model):
        with torch.no_grad():
            layer.lora_B.copy_(torch.randn(layer.lora_B.shape, generator=generator) * 0.1)


def load(folder: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def test_fresh_adapters_change_nothing_and_only_they_train(tiny_llama: Path) -> None:
    model = load(tiny_llama)
    before = logits(model)
    names = inject_lora(model, 4, 8.0)
    assert len(names) == 2 * 4
    assert torch.equal(logits(model), before)
    assert {name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_forward_is_base_plus_scaled_low_rank() -> None:
    torch.manual_seed(0)
    base = nn.Linear(6, 5)
    layer = LoRALinear(base, rank=2, alpha=6.0)
    with torch.no_grad():
        layer.lora_B.normal_()
    x = torch.randn(3, 6)
    expected = base(x) + 3.0 * (x @ layer.lora_A.T) @ layer.lora_B.T
    assert torch.allclose(layer(x), expected, atol=1e-6)
    assert torch.allclose(layer.delta_weight(), 3.0 * layer.lora_B @ layer.lora_A, atol=1e-6)


def test_bf16_base_keeps_its_dtype_and_trains_fp32_adapters() -> None:
    torch.manual_seed(0)
    layer = LoRALinear(nn.Linear(6, 5).bfloat16(), rank=2, alpha=2.0)
    with torch.no_grad():
        layer.lora_B.normal_()
    y = layer(torch.randn(3, 6, dtype=torch.bfloat16))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.lora_A.grad is not None
    assert layer.lora_A.grad.dtype == torch.float32
    assert layer.base_layer.weight.grad is None


@pytest.mark.parametrize("targets", [("c_attn",), ("c_attn", "c_proj", "c_fc")])
def test_merge_keeps_outputs_also_for_conv1d(tiny_gpt2: Path, targets: tuple[str, ...]) -> None:
    model = load(tiny_gpt2)
    base = logits(model)
    inject_lora(model, 4, 8.0, targets)
    randomize(model)
    adapted = logits(model)
    assert (adapted - base).abs().max() > 1e-2
    merge_lora(model)
    assert not list(lora_layers(model))
    assert torch.allclose(logits(model), adapted, atol=1e-5)


def test_adapters_off_is_the_base_and_is_undone_after_an_error(tiny_llama: Path) -> None:
    model = load(tiny_llama)
    base = logits(model)
    inject_lora(model, 4, 8.0)
    randomize(model)
    adapted = logits(model)
    with pytest.raises(RuntimeError, match="inside"), adapters_off(model):  # noqa: PT012
        assert torch.equal(logits(model), base)
        raise RuntimeError("inside")
    assert torch.equal(logits(model), adapted)


def test_merge_into_four_bits_is_refused(tiny_llama: Path) -> None:
    model = load(tiny_llama)
    quantize_nf4(model, torch.float32, torch.device("cpu"))
    inject_lora(model, 4, 8.0)
    with pytest.raises(UserError, match="floating-point base"):
        merge_lora(model)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt2"])
def test_peft_loads_the_folder_and_agrees(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    peft = pytest.importorskip("peft", reason="peft reads the exported folder; it is in the test extra")
    folder = request.getfixturevalue(name)
    model = load(folder)
    targets = ("c_attn", "c_proj") if name == "tiny_gpt2" else ("q_proj", "v_proj")
    inject_lora(model, 4, 8.0, targets)
    randomize(model)
    save_adapter(model, tmp_path / "adapter", base_model=str(folder))
    theirs = peft.PeftModel.from_pretrained(load(folder), tmp_path / "adapter").eval()
    assert torch.allclose(logits(theirs), logits(model), atol=1e-5)
    again = load(folder)
    load_adapter(again, tmp_path / "adapter")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"use_rslora": True}, {"target_modules": "all-linear"}, {"target_modules": r".*\.(q|v)_proj"}),
        {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
    ],
    ids=str,
)
def test_an_adapter_that_peft_made_is_read_as_peft_reads_it(
    settings: dict[str, object], tiny_llama: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft makes the adapter; it is in the test extra")
    given = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    theirs = peft.get_peft_model(load(tiny_llama), peft.LoraConfig(**{**given, **settings})).eval()
    for name, weights in theirs.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weights, std=0.2)
    theirs.save_pretrained(tmp_path)
    ours = load(tiny_llama)
    load_adapter(ours, tmp_path)
    assert (logits(ours) - logits(load(tiny_llama))).abs().max() > 0.1
    assert torch.allclose(logits(theirs), logits(ours), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"use_dora": True}, "without use_dora"),
        ({"modules_to_save": ["lm_head"]}, "without modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "without rank_pattern"),
        ({"bias": "all"}, "without bias"),
        ({"layers_to_transform": [0]}, "without layers_to_transform"),
        ({"init_lora_weights": "pissa"}, "unchanged base, not one of pissa"),
        ({"target_modules": ".*q_proj"}, "listed by name"),
    ],
    ids=str,
)
def test_an_adapter_that_is_more_than_plain_lora_is_refused(
    settings: dict[str, object], words: str, tmp_path: Path
) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none", **settings}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"adapter=.*{words}"):
        read_adapter_config(tmp_path, argument="adapter")


def test_adapter_of_another_shape_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    model = load(tiny_llama)
    inject_lora(model, 4, 8.0)
    save_adapter(model, tmp_path, base_model="x")
    other = load(tiny_llama)
    inject_lora(other, 8, 8.0)
    with pytest.raises(UserError, match="an adapter of this model"):
        load_adapter(other, tmp_path)
    with pytest.raises(UserError, match="PEFT adapter folder"):
        load_adapter(other, tmp_path / "missing")


def test_unknown_target_names_the_accepted_ones(tiny_gpt2: Path) -> None:
    model = load(tiny_gpt2)
    assert any(isinstance(module, Conv1D) for module in model.modules())
    with pytest.raises(UserError, match="'q_proj'.*c_attn, c_fc, c_proj"):
        inject_lora(model, 4, 8.0)


@pytest.mark.parametrize(("field", "value"), [("rank", 0), ("alpha", 0.0), ("targets", [])])
def test_config_refuses(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"model.lora.{field}"):
        LoRAConfig(**{field: value})


def _bases() -> dict[str, nn.Module]:
    from grpo_lit.frozen4bit import FrozenLinear4bit

    torch.manual_seed(0)
    dense, conv = nn.Linear(64, 24), Conv1D(24, 64)
    nf4 = FrozenLinear4bit.from_linear(nn.Linear(64, 24), torch.float32, torch.device("cpu"))
    nn.init.normal_(conv.bias)
    return {"linear": dense, "conv1d": conv, "nf4": nf4}


@pytest.mark.parametrize("kind", ["linear", "conv1d", "nf4"])
def test_the_fused_product_is_the_layers_own_forward(kind: str) -> None:
    """What runs on CUDA, on this machine's numbers: outputs and gradients."""
    layer = LoRALinear(_bases()[kind], rank=2, alpha=3.0)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(5, 64, requires_grad=True)
    weight = layer.fused_weight(torch.float32)
    assert weight is not None
    results = []
    for y in (layer(x), lora_linear(x, weight, layer.lora_A, layer.lora_B, layer.scaling, bias=layer.base_layer.bias)):
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, layer.lora_A, layer.lora_B))))
    for own, fused in zip(*results, strict=True):
        assert own.abs().max() > 0.1
        torch.testing.assert_close(fused, own, rtol=1e-4, atol=1e-4)
    assert layer.fused_weight(torch.bfloat16) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "conv1d", "nf4"])
def test_layers_on_cuda_take_the_fused_product(kind: str) -> None:
    layer = LoRALinear(_bases()[kind].cuda(), rank=2, alpha=3.0)
    nn.init.normal_(layer.lora_B)
    x = torch.randn(3, 50, 64, device="cuda")
    assert "LoRALinear" in type(layer(x).grad_fn.next_functions[0][0]).__name__
    few = layer(x[:1])
    torch.testing.assert_close(layer(x)[:1], few, rtol=1e-4, atol=1e-4)
