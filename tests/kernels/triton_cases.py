"""The Triton kernels against float64; run by test_triton.py, in a process of its own.

On the CPU under Triton's interpreter (TRITON_INTERPRET=1), on a GPU as compiled code and with larger sizes.
The rule: the error may be at most twice that of plain torch in the same dtype, plus a little, measured on the
scale of the tensor.
"""

from __future__ import annotations

import pytest
import torch

from grpo_lit.kernels import fused_logits_grpo, grpo_token_loss
from grpo_lit.kernels.dispatch import interpreting
from grpo_lit.loss import LossConfig, grpo_loss

DEVICE = "cpu" if interpreting() else "cuda"
# The interpreter cuts float32 off to bfloat16 where the GPU rounds: up to 2^-7 of a value.
SLACK = {torch.float32: 1e-5, torch.bfloat16: 1e-3 if DEVICE == "cuda" else 6e-3, torch.float16: 2e-4}
CONFIGS = {
    "plain": LossConfig(),
    "clip, dual clip, k3": LossConfig(epsilon_high=0.28, delta=1.5, beta=0.1),
    "entropy bonus": LossConfig(beta=0.05, entropy_coef=0.03),
    "cispo": LossConfig(objective="cispo", cispo_cap=1.1),
}
# Rows cut into several programs: aligned, and not. The interpreter takes shorter ones, its programs being shorter.
WIDE, WIDE_EVEN = (9001, 8192) if DEVICE == "cuda" else (2801, 4096)
only_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="a size for the GPU: minutes in the interpreter")


@pytest.fixture(autouse=True)
def short_programs(monkeypatch):
    """In the interpreter, programs of at most two tiles: the same kernel, fewer steps of it one by one."""
    if DEVICE == "cpu":
        from grpo_lit.kernels._triton import logit_rows

        plan = logit_rows.default_plan
        monkeypatch.setattr(logit_rows, "default_plan", lambda *a: plan(*a)._replace(tiles=min(2, plan(*a).tiles)))


def assert_close(got, same_dtype, true, dtype):
    """The rule at the top of this file, for tensors or scalars."""
    got, same_dtype, true = (t.detach().double() for t in (got, same_dtype, true))
    scale = true.abs().max()
    assert scale > 0  # a comparison with nothing would prove nothing
    allowed = 2 * (same_dtype - true).abs().max() + SLACK[dtype] * scale
    assert (got - true).abs().max() <= allowed


class Batch:
    """Logits and what a loss needs beside them; some tokens are masked, ratios lie around the clip."""

    def __init__(self, n, t, vocab, dtype, *, padded=0, seed=0, temperature=1.0):
        gen = torch.Generator(DEVICE).manual_seed(seed)
        made = {"generator": gen, "device": DEVICE}
        self.vocab, self.temperature, self.dtype = vocab, temperature, dtype
        self.logits = (torch.randn(n, t, vocab + padded, **made) * 3).to(dtype)
        self.ids = torch.randint(vocab, (n, t), **made)
        logp = (self.logits[..., :vocab].double() / temperature).log_softmax(-1)
        self.logp = logp.gather(-1, self.ids[..., None]).squeeze(-1)
        self.old = (self.logp + 0.3 * torch.randn(n, t, **made)).float()
        self.ref = (self.logp + 0.3 * torch.randn(n, t, **made)).float()
        self.advantages = torch.randn(n, **made)
        self.weights = (torch.rand(n, t, **made) + 0.1) / (n * t)
        if n * t > 2:
            self.weights[torch.rand(n, t, **made) < 0.3] = 0
        self.weights[0, 0] = 0.2
        self.old[0, 0] = self.logp[0, 0] + 0.05  # one token at least that no clip holds

    def loss(self, logits, config, **options):
        return fused_logits_grpo(
            logits,
            self.ids,
            self.old,
            self.advantages,
            self.weights,
            ref_logprobs=self.ref,
            temperature=self.temperature,
            vocab_size=self.vocab,
            config=config,
            **options,
        )

    def truth(self, config):
        """Loss and logits' gradient by autograd in float64, with the plain loss of the package."""
        z = self.logits.double().requires_grad_()
        log_p = (z[..., : self.vocab] / self.temperature).log_softmax(-1)
        logp = log_p.gather(-1, self.ids[..., None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        args = (self.old.double(), self.advantages.double(), self.weights.double(), self.weights != 0)
        loss = grpo_loss(logp, *args, ref_logprobs=self.ref.double(), entropy=entropy, config=config).loss
        return loss, torch.autograd.grad(loss, z)[0], logp.detach(), entropy.detach()


def gradient(loss, *leaves):
    return torch.autograd.grad(loss, leaves)


SIZES = [
    (2, 3, 37, 0),
    (1, 1, 5, 0),
    (2, 4, 7, 0),
    (3, 1, 300, 20),
    (2, 2, 1003, 5),
    (1, 3, WIDE_EVEN, 0),
    (2, 2, WIDE, 31),
]
LARGE = [(4, 33, 50257, 0), (2, 65, 151936, 0), (2, 65, 151643, 293), (1, 7, 262144, 0), (3, 11, 262143, 0)]


@pytest.mark.parametrize("dtype", list(SLACK), ids=str)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("size", SIZES + [pytest.param(size, marks=only_gpu) for size in LARGE], ids=str)
def test_logits(size, config, dtype):
    n, t, vocab, padded = size
    batch = Batch(n, t, vocab, dtype, padded=padded, temperature=0.8 if vocab % 2 else 1.0)
    true_loss, true_grad, true_logp, true_entropy = batch.truth(config)
    results = {}
    for impl in ("torch", "triton"):
        leaf = batch.logits.clone().requires_grad_()
        loss, stats = batch.loss(leaf, config, impl=impl, return_stats=True)
        results[impl] = (loss, gradient(loss, leaf)[0], stats)
    loss, grad, stats = results["triton"]
    same_loss, same_grad, same_stats = results["torch"]
    # a sum of signed terms: its scale is theirs, not what is left of them
    slack = SLACK[torch.float32] * batch.weights.sum()
    assert abs(loss - true_loss) <= 2 * abs(same_loss - true_loss) + slack < 0.1 * abs(true_loss)
    assert_close(grad, same_grad, true_grad, dtype)
    live = batch.weights != 0
    assert_close(stats.logprobs[live], same_stats.logprobs[live], true_logp[live], torch.float32)
    assert_close(stats.entropy[live], same_stats.entropy[live], true_entropy[live], torch.float32)
    assert (stats.logprobs[~live] == 0).all()
    assert (stats.entropy[~live] == 0).all()
    assert (grad[~live] == 0).all()
    assert (grad[..., vocab:] == 0).all()
    assert grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masked_rows_are_not_read(dtype):
    batch = Batch(3, 4, WIDE, dtype)
    dead = batch.weights == 0
    assert dead.any()
    clean = batch.logits.clone().requires_grad_()
    poisoned = batch.logits.masked_fill(dead[..., None], float("nan")).requires_grad_()
    config = LossConfig()
    want = batch.loss(clean, config, impl="triton")
    batch.ids = batch.ids.masked_fill(dead, -100)
    for name in ("old", "ref"):
        setattr(batch, name, getattr(batch, name).masked_fill(dead, float("nan")))
    got = batch.loss(poisoned, config, impl="triton")
    assert torch.equal(got, want)
    assert torch.equal(*gradient(got, poisoned), *gradient(want, clean))


@pytest.mark.parametrize("vocab", [37, WIDE])
def test_masked_rows_may_stay_untouched(vocab):
    """In place, where what was there before is known: live rows as ever, the others still hold their logits."""
    batch = Batch(3, 4, vocab, torch.float32)
    dead = batch.weights == 0
    assert dead.any()
    leaf = batch.logits.clone().requires_grad_()
    (want,) = gradient(batch.loss(leaf, None, impl="triton"), leaf)
    work = batch.logits.clone().requires_grad_()
    (got,) = gradient(batch.loss(work, None, impl="triton", inplace=True, masked_rows="untouched"), work)
    assert torch.equal(got[~dead], want[~dead])
    assert torch.equal(got[dead], batch.logits[dead])


@pytest.mark.parametrize("dtype", list(SLACK), ids=str)
@pytest.mark.parametrize("vocab", [37, 1003, WIDE, 2 * WIDE_EVEN])
def test_in_place_is_the_same_bits(dtype, vocab):
    batch = Batch(2, 3, vocab, dtype)
    leaf = batch.logits.clone().requires_grad_()
    (want,) = gradient(batch.loss(leaf, None, impl="triton"), leaf)
    work = batch.logits.clone().requires_grad_()
    (got,) = gradient(batch.loss(work, None, impl="triton", inplace=True), work)
    assert torch.equal(got, want)
    assert got.data_ptr() == work.data_ptr()


@pytest.mark.parametrize("layout", ["without the last step", "time first", "every second column"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [48, 1003, WIDE])
def test_non_contiguous_logits(layout, dtype, vocab):
    n, t = (2, 2) if vocab == WIDE else (3, 4)  # a wide row takes the interpreter long
    batch = Batch(n, t, vocab, dtype)
    wide = torch.full((n, t + 1, vocab), float("nan"), dtype=dtype, device=DEVICE)
    if layout == "without the last step":
        wide[:, :-1] = batch.logits
        view = wide.requires_grad_()[:, :-1]
    elif layout == "time first":
        wide = batch.logits.transpose(0, 1).contiguous().requires_grad_()
        view = wide.transpose(0, 1)
    else:
        wide = batch.logits.repeat_interleave(2, -1).requires_grad_()
        view = wide[..., ::2]
    leaf = batch.logits.clone().requires_grad_()
    want = batch.loss(leaf, None, impl="triton")
    got = batch.loss(view, None, impl="triton")
    # another alignment cuts rows elsewhere, so sums run in another order
    close = {"rtol": 2e-5 if dtype == torch.float32 else 1.6e-2, "atol": 1e-7}
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    (want_grad,) = gradient(want, leaf)
    torch.testing.assert_close(*gradient(got, view), want_grad, **close)
    if layout != "every second column":
        with torch.no_grad():
            copy = torch.empty_like(wide).copy_(wide)
        inside = copy[:, :-1] if layout == "without the last step" else copy.transpose(0, 1)
        inside.requires_grad_()
        (got_inplace,) = gradient(batch.loss(inside, None, impl="triton", inplace=True), inside)
        torch.testing.assert_close(got_inplace, want_grad, **close)
        if layout == "without the last step":
            assert copy[:, -1].isnan().all()  # nothing written outside the view


def test_a_factor_from_above_scales_the_gradient():
    batch = Batch(2, 3, 1003, torch.float32)
    leaf = batch.logits.clone().requires_grad_()
    (one,) = gradient(batch.loss(leaf, None, impl="triton"), leaf)
    (scaled,) = gradient(-2.5 * batch.loss(leaf, None, impl="triton"), leaf)
    torch.testing.assert_close(scaled, -2.5 * one, rtol=1e-6, atol=0)


def test_no_old_logprobs_means_ratio_one():
    batch = Batch(2, 3, 1003, torch.float32)
    leaf = batch.logits.clone().requires_grad_()
    loss, stats = batch.loss(leaf, None, impl="triton", return_stats=True)
    batch.old = stats.logprobs
    (want,) = gradient(batch.loss(leaf, None, impl="triton"), leaf)
    batch.old = None
    (got,) = gradient(batch.loss(leaf, None, impl="triton"), leaf)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_forbidden_tokens():
    batch = Batch(2, 2, 1003, torch.float32)
    batch.logits[..., 100:900] = float("-inf")
    batch.ids.clamp_(max=99)
    leaf = batch.logits.clone().requires_grad_()
    loss, stats = batch.loss(leaf, CONFIGS["entropy bonus"], impl="triton", return_stats=True)
    (grad,) = gradient(loss, leaf)
    assert stats.entropy.isfinite().all()
    assert grad.isfinite().all()
    assert (grad[..., 100:900] == 0).all()
    assert (grad[0, 0, :100] != 0).all()


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 64, 1000, 3072, 46_341, 70_000])
def test_rows_out_of_order_are_all_the_rows(rows):
    from grpo_lit.kernels._triton.logit_rows import row_step

    step = row_step(rows)
    assert step * (rows - 1) < 2**31
    assert len({row * step % rows for row in range(rows)}) == rows
    assert step > rows // 2 or rows < 4 or rows > 46_340


@only_gpu
@pytest.mark.parametrize(("rows", "vocab"), [(70_000, 7), (70_000, 1003), (70_000, 9001)])
def test_more_rows_than_a_grid_dimension_holds(rows, vocab):
    batch = Batch(rows, 1, vocab, torch.bfloat16)
    leaf = batch.logits.clone().requires_grad_()
    (got,) = gradient(batch.loss(leaf, None, impl="triton"), leaf)
    (want,) = gradient(batch.loss(leaf, None, impl="torch"), leaf)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3 * want.abs().max().item())
    assert (got[-100:].abs().amax(-1) > 0).any()  # the last rows were reached


@only_gpu
def test_offsets_beyond_two_to_the_31():
    batch = Batch(4, 1, 262144, torch.bfloat16)
    rows = 2**31 // 262144 + 8
    big = torch.empty(1, rows, 262144, dtype=torch.bfloat16, device=DEVICE)
    big[:, -4:] = batch.logits.transpose(0, 1)
    weights = torch.zeros(1, rows, device=DEVICE)
    weights[:, -4:] = 0.25
    ids = torch.zeros(1, rows, dtype=torch.long, device=DEVICE)
    ids[:, -4:] = batch.ids.T
    big.requires_grad_()
    loss = fused_logits_grpo(big, ids, None, torch.ones(1, device=DEVICE), weights, inplace=True, impl="triton")
    (got,) = gradient(loss, big)
    leaf = batch.logits.clone().requires_grad_()
    ones = torch.ones(4, device=DEVICE)
    want = fused_logits_grpo(leaf, batch.ids, None, ones, torch.full((4, 1), 0.25, device=DEVICE), impl="torch")
    (grad,) = gradient(want, leaf)
    torch.testing.assert_close(got[:, -4:].transpose(0, 1), grad, rtol=2e-2, atol=1e-4)
    assert not got[:, :-4].any()


@pytest.mark.parametrize("dtype", list(SLACK), ids=str)
@pytest.mark.parametrize("config", [CONFIGS[name] for name in CONFIGS if name != "entropy bonus"], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (3, 7), (2, 1025), (1, 2048)], ids=str)
def test_token_loss(shape, config, dtype):
    gen = torch.Generator(DEVICE).manual_seed(3)
    made = {"generator": gen, "device": DEVICE}
    logp = (-torch.rand(shape, **made) * 3).to(dtype)
    old = (logp.double() + 0.3 * torch.randn(shape, **made)).float()
    ref = (logp.double() + 0.3 * torch.randn(shape, **made)).float()
    advantages = torch.randn(shape[0], **made)
    weights = torch.rand(shape, **made) + 0.1
    weights[torch.rand(shape, **made) < 0.3] = 0
    weights[0, 0] = 1.0
    results = {}
    for impl in ("torch", "triton"):
        leaf = logp.clone().requires_grad_()
        loss = grpo_token_loss(leaf, old, advantages, weights, ref_logprobs=ref, config=config, impl=impl)
        results[impl] = (loss, *gradient(loss, leaf))
    leaf = logp.double().requires_grad_()
    doubles = (old.double(), advantages.double(), weights.double())
    true = grpo_loss(leaf, *doubles, weights != 0, ref_logprobs=ref.double(), config=config).loss
    (true_grad,) = gradient(true, leaf)
    # the loss is a sum of signed terms: its scale is theirs
    assert abs(results["triton"][0] - true) <= 2 * abs(results["torch"][0] - true) + 1e-5 * weights.sum()
    if true_grad.any():
        assert_close(results["triton"][1], results["torch"][1], true_grad, dtype)
    assert (results["triton"][1][weights == 0] == 0).all()


@pytest.mark.parametrize("small", [1e-6, 1e-4, 0.1, 0.26, 5.0, 30.0, 200.0, -1e-5, -0.2, -50.0])
def test_k3_is_exact_near_zero_and_finite_far_away(small):
    config = LossConfig(beta=1.0)
    ones = torch.ones(1, 1, device=DEVICE)
    leaf = torch.zeros(1, 1, device=DEVICE, requires_grad=True)
    loss = grpo_token_loss(leaf, None, 0 * ones[0], ones, ref_logprobs=small * ones, config=config, impl="triton")
    d = torch.tensor(small, dtype=torch.float32).double()
    bounded = d.clamp(max=20)
    want = bounded.expm1() - bounded + bounded.expm1() * (d - bounded)
    torch.testing.assert_close(loss.double().cpu(), want, rtol=3e-6, atol=0)
    torch.testing.assert_close(gradient(loss, leaf)[0].double().cpu(), -bounded.expm1()[None, None], rtol=3e-6, atol=0)


@pytest.mark.parametrize("broken", [torch.zeros_like, torch.neg, lambda g: 1.2 * g], ids=["zero", "negated", "scaled"])
@pytest.mark.parametrize("dtype", list(SLACK), ids=str)
def test_a_broken_gradient_fails_the_comparison(broken, dtype):
    batch = Batch(2, 3, 1003, dtype)
    _, true, _, _ = batch.truth(LossConfig())
    leaf = batch.logits.clone().requires_grad_()
    (same,) = gradient(batch.loss(leaf, None, impl="torch"), leaf)
    assert_close(same, same, true, dtype)
    with pytest.raises(AssertionError):
        assert_close(broken(same), same, true, dtype)
