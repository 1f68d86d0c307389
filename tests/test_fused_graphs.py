"""Layers recorded as CUDA graphs: the same numbers as unrecorded, on a GPU; what is padded, anywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_lit.fused_decoder import FusedDecoder
from grpo_lit.fused_graphs import LayerGraphs
from grpo_lit.kernels.packed_attention import Sequences
from grpo_lit.lora import inject_lora
from grpo_lit.memory.checkpointing import LayerCheckpointing
from grpo_lit.memory.plan import padded_tokens


def test_sizes_of_recordings() -> None:
    sizes = [padded_tokens(n) for n in range(1, 5000)]
    assert all(n <= size for n, size in enumerate(sizes, 1))
    assert all(size <= n * 1.125 + 64 for n, size in enumerate(sizes, 1))
    assert len(set(sizes[2047:4096])) <= 9
    assert padded_tokens(3584) == 3584


def test_padding_is_a_sequence_of_its_own() -> None:
    x, positions = torch.randn(100, 4), torch.arange(100)
    padded, turned, where = LayerGraphs.padded(x, positions, Sequences.of([40, 60], x.device))
    assert torch.equal(padded[:100], x)
    assert not padded[100:].any()
    assert len(padded) == len(turned) == 128
    assert where.lengths == [40, 60, 28, 0]
    assert where.starts.tolist() == [0, 40, 100, 128, 128]


def _decoder(record: bool) -> FusedDecoder:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=100, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).bfloat16().cuda()
    inject_lora(model, 4, 8.0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.1)
    decoder = FusedDecoder(model, LayerCheckpointing(model), chunk_tokens=64)
    decoder.graphs = LayerGraphs(decoder, min_free=0 if record else 1 << 60)
    decoder.model = model  # type: ignore[attr-defined]
    return decoder


def _batch(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 100, (3, 80), generator=generator)
    prompt_mask = torch.arange(30) >= torch.tensor([[0], [12], [25]])
    mask = torch.arange(50) < torch.randint(1, 51, (3, 1), generator=generator)
    mask[0] = True
    return tuple(t.cuda() for t in (ids[:, :30], prompt_mask, ids[:, 30:], mask, mask.flatten().nonzero().squeeze(-1)))


def _pass(decoder: FusedDecoder, batch: tuple[Tensor, ...]) -> tuple[Tensor, list[Tensor]]:
    parameters = [p for p in decoder.model.parameters() if p.requires_grad]  # type: ignore[attr-defined]
    hidden = decoder(*batch)
    generator = torch.Generator("cuda").manual_seed(5)
    up = torch.randn(hidden.shape, generator=generator, device="cuda")
    return hidden.detach(), list(torch.autograd.grad((hidden.float() * up).sum(), parameters))


def _assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    for mine, true in zip(got, want, strict=True):  # attention's backward adds up in no fixed order
        assert true.abs().max() > 0
        assert (mine - true).norm() <= 1e-2 * true.norm()


@pytest.mark.gpu
def test_recorded_layers_give_the_numbers_of_unrecorded_ones() -> None:
    plain, recorded = _decoder(False), _decoder(True)
    assert recorded.graphs is not None
    for attempt in range(4):
        batch = _batch(attempt % 2)
        want, want_grads = _pass(plain, batch)
        got, got_grads = _pass(recorded, batch)
        assert torch.equal(got, want)
        _assert_close(got_grads, want_grads)
    assert recorded.graphs.pool_bytes > 0
    assert recorded.graphs.buffer_bytes > 0
    recorded.graphs.release()
    assert recorded.graphs.pool_bytes == recorded.graphs.buffer_bytes == 0


@pytest.mark.gpu
def test_a_backward_after_another_forward_is_still_its_own() -> None:
    recorded = _decoder(True)
    first, second = _batch(0), _batch(1)
    for _ in range(2):
        want = [_pass(recorded, first)[1], _pass(recorded, second)[1]]
    parameters = [p for p in recorded.model.parameters() if p.requires_grad]  # type: ignore[attr-defined]
    outputs = [recorded(*first), recorded(*second)]
    for hidden, grads in zip(outputs, want, strict=True):
        generator = torch.Generator("cuda").manual_seed(5)
        up = torch.randn(hidden.shape, generator=generator, device="cuda")
        _assert_close(list(torch.autograd.grad((hidden.float() * up).sum(), parameters)), grads)


@pytest.mark.gpu
def test_new_weights_are_seen_and_moved_ones_too() -> None:
    plain, recorded = _decoder(False), _decoder(True)
    for _ in range(3):
        _pass(recorded, _batch(0))
    for decoder in (plain, recorded):
        with torch.no_grad():
            for name, parameter in decoder.model.named_parameters():  # type: ignore[attr-defined]
                if name.endswith("lora_A"):
                    parameter.mul_(1.5)
                if name.endswith("lora_B"):
                    parameter.data = parameter.data * 1.25
    assert torch.equal(_pass(recorded, _batch(0))[0], _pass(plain, _batch(0))[0])


@pytest.mark.gpu
def test_recordings_end_with_the_passes_and_come_back_sooner() -> None:
    recorded, batch = _decoder(True), _batch(0)
    graphs = recorded.graphs
    assert graphs is not None
    first = _pass(recorded, batch)
    assert not graphs.buffer_bytes
    for _ in range(2):
        _pass(recorded, batch)
        assert graphs.buffer_bytes
    graphs.release()
    again = _pass(recorded, batch)
    assert graphs.buffer_bytes, "three uses pay for a recording at once"
    assert torch.equal(again[0], first[0])
    _assert_close(again[1], first[1])


@pytest.mark.gpu
def test_layers_run_unrecorded_where_memory_runs_out_while_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, recorded, batch = _decoder(False), _decoder(True), _batch(0)
    want, want_grads = _pass(plain, batch)
    backward = LayerGraphs._backward

    def short(self: LayerGraphs, recording: object) -> None:
        backward(self, recording)  # type: ignore[arg-type]
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(LayerGraphs, "_backward", short)
    for _ in range(4):
        got, got_grads = _pass(recorded, batch)
        assert (got.float() - want.float()).norm() <= 1e-2 * want.float().norm()
        _assert_close(got_grads, want_grads)
    assert recorded.graphs is not None
    assert recorded.graphs.pool_bytes == 0
