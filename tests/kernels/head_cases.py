"""The Triton kernels behind the output layer and under NF4 weights against float64; run by test_triton.py.

Where and how as in triton_cases.py.
"""

from __future__ import annotations

import pytest
import torch
from triton_cases import CONFIGS, DEVICE, WIDE, Batch, assert_close, gradient, only_gpu, short_programs  # noqa: F401

from grpo_lit.kernels import Nf4Weight, fused_linear_grpo, grpo_token_loss, linear_logprobs, nf4_matmul
from grpo_lit.loss import grpo_loss


class Head(Batch):
    """Hidden states and an output layer beside the loss's inputs."""

    def __init__(self, n, t, width, vocab, dtype, *, seed=0):
        super().__init__(n, t, vocab, torch.float32, seed=seed)
        gen = torch.Generator(DEVICE).manual_seed(seed + 1)
        self.hidden = torch.randn(n, t, width, generator=gen, device=DEVICE).to(dtype)
        self.weight = (torch.randn(vocab, width, generator=gen, device=DEVICE) / width**0.5 * 2).to(dtype)
        self.bias = torch.randn(vocab, generator=gen, device=DEVICE).to(dtype)
        self.options = {"temperature": 0.9, "softcap": 5.0}

    def leaves(self, dtype, train_head):
        made = [t.to(dtype).detach().clone() for t in (self.hidden, self.weight, self.bias)]
        for leaf in made if train_head else made[:1]:
            leaf.requires_grad_()
        return made

    def truth(self, config, train_head, up):
        h, w, b = self.leaves(torch.float64, train_head)
        z = 5.0 * torch.tanh((h @ w.T + b) / 5.0) / 0.9
        log_p = z.log_softmax(-1)
        logp = log_p.gather(-1, self.ids[..., None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        self.old = (logp.detach() + 0.3 * torch.sign(self.old)).float()
        self.ref = (logp.detach() + 0.1).float()
        args = (self.old.double(), self.advantages.double(), self.weights.double(), self.weights != 0)
        loss = grpo_loss(logp, *args, ref_logprobs=self.ref.double(), entropy=entropy, config=config).loss
        leaves = [t for t in (h, w, b) if t.requires_grad]
        out = (logp.detach(), entropy.detach(), loss.detach())
        mixed = (up[0] * logp).sum() + (up[1] * entropy).sum()
        return out, torch.autograd.grad(loss, leaves, retain_graph=True), gradient(mixed, *leaves)


@pytest.mark.parametrize("train_head", [False, True], ids=["frozen head", "trained head"])
@pytest.mark.parametrize(
    ("dtype", "narrow"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16, float32 logits", "bfloat16, 16-bit logits"],
)
@pytest.mark.parametrize(
    "size", [(2, 5, 16, 301), (1, 3, 32, WIDE), pytest.param((2, 333, 256, 151936), marks=only_gpu)], ids=str
)
def test_head(size, dtype, narrow, train_head):
    head = Head(*size, dtype)
    config = CONFIGS["entropy bonus"]
    gen = torch.Generator(DEVICE).manual_seed(9)
    up = torch.randn(2, *size[:2], generator=gen, device=DEVICE)
    (logp, entropy, loss), loss_grads, mixed_grads = head.truth(config, train_head, up.double())
    results = {}
    for impl in ("torch", "triton"):
        h, w, b = head.leaves(dtype, train_head)
        leaves = [t for t in (h, w, b) if t.requires_grad]
        options = head.options | {"bias": b, "impl": impl, "chunk_rows": 4 if size[1] < 10 else 128}
        options["logits_dtype"] = dtype if narrow else None
        got = linear_logprobs(h, w, head.ids, **options)
        only_logp = gradient(got[0].mul(up[0]).sum(), *leaves)
        got = linear_logprobs(h, w, head.ids, **options)
        mixed = gradient((up[0] * got[0]).sum() + (up[1] * got[1]).sum(), *leaves)
        args = (h, w, head.ids, head.old, head.advantages, head.weights)
        fused = fused_linear_grpo(*args, ref_logprobs=head.ref, config=config, **options)
        results[impl] = [*got, fused, only_logp, mixed, gradient(fused, *leaves)]
    torch_out, triton_out = results["torch"], results["triton"]
    value_dtype = torch.bfloat16 if narrow else torch.float32
    for got, same, true in zip(triton_out[:2], torch_out[:2], (logp, entropy), strict=True):
        assert_close(got, same, true, value_dtype)
    assert abs(triton_out[2] - loss) <= 2 * abs(torch_out[2] - loss) + 0.02 * abs(loss)
    for got, same, true in zip(triton_out[4], torch_out[4], mixed_grads, strict=True):
        assert_close(got, same, true, dtype)
    for got, same, true in zip(triton_out[5], torch_out[5], loss_grads, strict=True):
        assert_close(got, same, true, dtype)


@pytest.mark.parametrize("nested", [True, False], ids=["double quantization", "plain scales"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 17, 64])
@pytest.mark.parametrize(
    "size",
    [(100, 64), (70, 1344), pytest.param((8960, 1536), marks=only_gpu), pytest.param((1536, 8960), marks=only_gpu)],
    ids=str,
)
def test_nf4_matmul(size, rows, dtype, nested):
    if DEVICE == "cpu" and dtype == torch.float16 and rows != 5:
        pytest.skip("takes the interpreter too long; one of each is run")
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes isn't installed")
    gen = torch.Generator(DEVICE).manual_seed(0)
    matrix = torch.randn(*size, generator=gen, device=DEVICE).bfloat16()
    quantized = functional.quantize_4bit(matrix, quant_type="nf4", compress_statistics=nested, blocksize=64)
    weight = Nf4Weight.from_bitsandbytes(*quantized)
    x = torch.randn(rows, size[1], generator=gen, device=DEVICE).to(dtype)
    bias = torch.randn(size[0], generator=gen, device=DEVICE).to(dtype)
    true = x.double() @ weight.dequantize(torch.float64).T + bias.double()
    got, same = (nf4_matmul(x, weight, bias=bias, impl=impl) for impl in ("triton", "torch"))
    assert got.dtype == dtype
    assert_close(got, same, true, dtype)


def test_gradients_that_are_one_number_expanded():
    # what a plain .sum() sends back: a tensor of stride 0
    head = Head(2, 5, 16, WIDE, torch.float32)
    results = []
    for impl in ("torch", "triton"):
        h, w, b = head.leaves(torch.float32, train_head=False)
        logp, entropy = linear_logprobs(h, w, head.ids, bias=b, impl=impl)
        results.append(gradient(logp.sum() - 2 * entropy.sum(), h)[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    leaf = head.logp.float().clone().requires_grad_()
    expanded = head.weights[:1, :1].expand(head.weights.shape)
    losses = [grpo_token_loss(leaf, head.old, head.advantages, expanded, impl=i) for i in ("torch", "triton")]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
