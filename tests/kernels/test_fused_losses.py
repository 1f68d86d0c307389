"""The fused losses in torch against the package's plain loss in float64, and the manners of all ops."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from grpo_lit.errors import UserError
from grpo_lit.kernels import (
    default_impl,
    fused_linear_grpo,
    fused_logits_grpo,
    grpo_token_loss,
    linear_logprobs,
)
from grpo_lit.loss import LossConfig, grpo_loss

CONFIGS = {
    "plain": LossConfig(),
    "clip, dual clip, k3": LossConfig(epsilon_high=0.28, delta=1.5, beta=0.1),
    "entropy bonus": LossConfig(beta=0.05, entropy_coef=0.03),
    "cispo": LossConfig(objective="cispo", cispo_cap=1.1),
}


class Case:
    """Hidden states, a trainable head and ratios on all sides of the clip, in float64."""

    def __init__(self, n=3, t=5, width=8, vocab=40):
        gen = torch.Generator().manual_seed(0)
        double = {"generator": gen, "dtype": torch.float64}
        self.hidden = torch.randn(n, t, width, **double).requires_grad_()
        self.weight = torch.randn(vocab, width, **double).requires_grad_()
        self.bias = torch.randn(vocab, **double).requires_grad_()
        self.ids = torch.randint(vocab, (n, t), generator=gen)
        self.advantages = torch.randn(n, **double)
        self.weights = torch.rand(n, t, **double) / (n * t)
        self.weights[1, 2:] = 0
        self.mask = self.weights != 0
        self.logp, self.entropy = linear_logprobs(self.hidden, self.weight, self.ids, bias=self.bias, temperature=0.8)
        self.old = (self.logp + 0.4 * torch.randn(n, t, **double)).detach()
        self.ref = (self.logp + 0.4 * torch.randn(n, t, **double)).detach()

    @property
    def leaves(self):
        return self.hidden, self.weight, self.bias

    @property
    def tokens(self):
        return self.ids, self.old, self.advantages, self.weights

    def truth(self, config):
        loss = grpo_loss(
            self.logp,
            self.old,
            self.advantages,
            self.weights,
            self.mask,
            ref_logprobs=self.ref,
            entropy=self.entropy,
            config=config,
        ).loss
        return loss, torch.autograd.grad(loss, self.leaves)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("chunk_rows", [None, 2])
def test_fused_linear(config, chunk_rows):
    case = Case()
    want, want_grads = case.truth(config)
    options = {"ref_logprobs": case.ref, "temperature": 0.8, "config": config, "chunk_rows": chunk_rows}
    got = fused_linear_grpo(case.hidden, case.weight, *case.tokens, bias=case.bias, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for a, b in zip(torch.autograd.grad(-3 * got, case.leaves), want_grads, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, -3 * b, rtol=1e-11, atol=1e-14)
    frozen = (case.hidden, case.weight.detach(), *case.tokens)
    got = fused_linear_grpo(*frozen, bias=case.bias.detach(), **options)
    torch.testing.assert_close(torch.autograd.grad(got, case.hidden)[0], want_grads[0], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_fused_logits(config, inplace, dims):
    case = Case()
    want, want_grads = case.truth(config)
    logits = case.hidden @ case.weight.T + case.bias
    tokens = [case.ids, case.old, case.advantages, case.weights]
    ref = case.ref
    if dims == 2:
        logits, ref = logits.flatten(0, 1), ref.flatten()
        tokens[2] = case.advantages[:, None].expand(case.ids.shape)
        tokens = [t.flatten() for t in tokens]
    options = {"ref_logprobs": ref, "temperature": 0.8, "config": config, "inplace": inplace}
    got, stats = fused_logits_grpo(logits, *tokens, return_stats=True, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for a, b in zip(torch.autograd.grad(got, case.leaves), want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)
    want_stats = torch.where(case.mask, case.logp, 0), torch.where(case.mask, case.entropy, 0)
    for a, b in zip(stats, want_stats, strict=True):
        assert not a.requires_grad
        torch.testing.assert_close(a.reshape(b.shape), b.detach(), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "entropy bonus"])
@pytest.mark.parametrize("per_token", [False, True])
def test_token_loss(name, per_token):
    case = Case()
    leaf = case.logp.detach().requires_grad_()
    args = (case.old, case.advantages, case.weights)
    options = {"ref_logprobs": case.ref, "config": CONFIGS[name]}
    want = grpo_loss(leaf, *args, case.mask, **options).loss
    if per_token:
        args = (case.old, case.advantages[:, None].expand(leaf.shape), case.weights)
    got = grpo_token_loss(leaf, *args, **options)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    (a,), (b,) = torch.autograd.grad(2 * got, leaf), torch.autograd.grad(2 * want, leaf)
    assert b.abs().max() > 1e-3
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


def test_the_clip_quadrants_by_hand():
    # ratios 1.1 and 1.5 with A = 1, 0.9 and 0.5 with A = -1, a quarter of weight each, clip 0.2
    logp = torch.tensor([[1.1, 1.5], [0.9, 0.5]], dtype=torch.float64).log().requires_grad_()
    zeros, weights = torch.zeros(2, 2, dtype=torch.float64), torch.full((2, 2), 0.25, dtype=torch.float64)
    loss = grpo_token_loss(logp, zeros, torch.tensor([1.0, -1.0]), weights)
    torch.testing.assert_close(loss.item(), (-1.1 - 1.2 + 0.9 + 0.8) / 4)
    (grad,) = torch.autograd.grad(loss, logp)
    torch.testing.assert_close(grad, torch.tensor([[-1.1, 0.0], [0.9, 0.0]], dtype=torch.float64) / 4)


def test_a_zero_advantage_beside_an_infinite_ratio_gives_zero():
    logp = torch.tensor([[0.0, -1.0]], requires_grad=True)
    old = torch.tensor([[-200.0, -1.0]])
    loss = grpo_token_loss(logp, old, torch.tensor([[0.0, 1.0]]), torch.ones(1, 2))
    assert loss.item() == -1.0
    assert torch.autograd.grad(loss, logp)[0].tolist() == [[0.0, -1.0]]


def test_no_old_logprobs_is_ratio_one():
    case = Case()
    want = grpo_token_loss(case.logp, case.logp.detach(), case.advantages, case.weights)
    (want_grad,) = torch.autograd.grad(want, case.hidden, retain_graph=True)
    tokens = (case.ids, None, case.advantages, case.weights)
    got = fused_linear_grpo(case.hidden, case.weight, *tokens, bias=case.bias, temperature=0.8)
    torch.testing.assert_close(torch.autograd.grad(got, case.hidden)[0], want_grad)


def test_a_second_backward_fails_loudly():
    case = Case()
    loss = fused_linear_grpo(case.hidden, case.weight, *case.tokens)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_without_grad_nothing_is_overwritten():
    case = Case()
    logits = (case.hidden @ case.weight.T).detach()
    before = logits.clone()
    loss = fused_logits_grpo(logits, *case.tokens, inplace=True)
    assert not loss.requires_grad
    assert torch.equal(logits, before)


def test_masked_rows_may_stay_untouched():
    case = Case()
    grads = {}
    for choice in ("zeros", "untouched"):
        logits = (case.hidden @ case.weight.T).detach().requires_grad_()
        before = logits.detach().clone()
        loss = fused_logits_grpo(logits, *case.tokens, inplace=True, masked_rows=choice)
        grads[choice] = torch.autograd.grad(loss, logits)[0]
    assert torch.equal(grads["untouched"][case.mask], grads["zeros"][case.mask])
    assert torch.equal(grads["untouched"][~case.mask], before[~case.mask])
    assert not grads["zeros"][~case.mask].any()
    with pytest.raises(UserError, match="masked_rows"):
        fused_logits_grpo(logits.detach(), *case.tokens, masked_rows="kept")


def test_torch_compile_sees_whole_graphs():
    case = Case()
    weight = case.weight.detach()

    def step(hidden):
        loss = fused_logits_grpo(hidden @ weight.T, *case.tokens, inplace=True)
        logp, entropy = linear_logprobs(hidden, weight, case.ids)
        return loss + grpo_token_loss(logp, case.old, case.advantages, case.weights) - entropy.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    want, got = step(case.hidden), compiled(case.hidden)
    torch.testing.assert_close(got, want)
    (a,), (b,) = (torch.autograd.grad(loss, case.hidden) for loss in (got, want))
    torch.testing.assert_close(a, b)


def test_ops_are_registered_right():
    case = Case()
    numbers = [0.2, 0.2, float("inf"), 0.1, 0.01, 5.0, 0.0]
    flat = [t.detach().flatten() for t in (case.old, case.advantages[:, None].expand(3, 5), case.weights, case.ref)]
    rows = [case.ids.flatten(), *flat, numbers]
    hidden, weight, bias = (t.detach() for t in (case.hidden.flatten(0, 1), case.weight, case.bias))
    logits = (hidden @ weight.T)[None]
    head = (0.8, 0.0, 4, "torch", False)
    ops = torch.ops.grpo_lit
    calls = [
        (ops.fused_logits_grpo, (logits, *rows, 0.8, 0.0, 40, "torch", True, True, True)),
        (ops.fused_logits_grpo_, (logits.clone(), *rows, 0.8, 0.0, 40, "torch", True, True)),
        (ops.linear_logprobs, (hidden, weight, rows[0], bias, *head, True)),
        (ops.linear_logprobs_backward, (hidden, weight, rows[0], bias, flat[0], flat[1], *head, [True] * 3)),
        (ops.fused_linear_grpo, (hidden, weight, bias, *rows, *head, True, [True] * 3)),
        (
            ops.grpo_token_loss,
            (case.logp.detach(), case.old, flat[1].view(3, 5), case.weights, case.ref, numbers, "torch"),
        ),
        (ops.scale_, (logits.clone(), torch.tensor(2.0))),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


REFUSED = {
    "ratio": LossConfig(ratio="sequence"),
    "objective": LossConfig(objective="sapo"),
    "kl_weighted": LossConfig(beta=0.1, kl_weighted=True),
    "off_policy_threshold": LossConfig(off_policy_threshold=1.0),
    "token_rule": LossConfig(token_rule="kl_cov"),
    "rollout_correction": LossConfig(rollout_correction="token_truncate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_cannot_do_is_refused(name):
    case = Case()
    with pytest.raises(UserError, match=rf"config\.{name}.*linear_logprobs"):
        fused_logits_grpo(case.hidden @ case.weight.T, *case.tokens, config=REFUSED[name])
    with pytest.raises(UserError, match=name):
        fused_linear_grpo(case.hidden, case.weight, *case.tokens, config=REFUSED[name])
    with pytest.raises(UserError, match=name):
        grpo_token_loss(case.logp, *case.tokens[1:], config=REFUSED[name])


def test_mistakes_are_named():
    case = Case()
    logits = case.hidden @ case.weight.T
    ids, old, adv, weights = case.tokens
    for call, named in [
        (lambda: fused_logits_grpo(logits, ids, old[:, 1:], adv, weights), "old_logprobs"),
        (lambda: fused_logits_grpo(logits, ids, old, adv[1:], weights), "advantages"),
        (lambda: fused_logits_grpo(logits, ids, old, adv, weights, vocab_size=41), "vocab_size"),
        (lambda: fused_logits_grpo(logits, ids, old, adv, weights, temperature=-1), "temperature"),
        (lambda: fused_logits_grpo(logits.long(), ids, old, adv, weights), "logits.dtype"),
        (lambda: fused_logits_grpo(logits[0, 0], ids, old, adv, weights), "logits"),
        (
            lambda: fused_logits_grpo(logits, ids, old, adv, weights, config=LossConfig(beta=0.1)),
            "ref_logprobs",
        ),
        (lambda: fused_logits_grpo(logits.mT.contiguous().mT, *case.tokens, inplace=True), "stride"),
        (lambda: grpo_token_loss(case.logp, old, adv, weights[:1]), "weights"),
        (
            lambda: grpo_token_loss(case.logp, old, adv, weights, config=LossConfig(entropy_coef=0.1)),
            "entropy_coef",
        ),
        (
            lambda: fused_linear_grpo(case.hidden, case.weight[:, 1:], ids, old, adv, weights),
            "lm_head_weight",
        ),
        (
            lambda: fused_linear_grpo(case.hidden, case.weight, *case.tokens, logits_dtype=torch.int8),
            "logits_dtype",
        ),
    ]:
        with pytest.raises(UserError, match=named):
            call()


def test_triton_is_refused_on_the_cpu_and_never_picked(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    case = Case()
    assert default_impl("cpu") == "torch"
    with pytest.raises(UserError, match="impl"):
        grpo_token_loss(case.logp, *case.tokens[1:], impl="triton")


def test_the_choice_is_logged_once(caplog):
    case = Case()
    with caplog.at_level("INFO", logger="grpo_lit.kernels"):
        from grpo_lit.kernels import dispatch

        dispatch._logged.clear()
        for _ in range(2):
            grpo_token_loss(case.logp, *case.tokens[1:])
    assert [record.getMessage() for record in caplog.records] == ["grpo_token_loss runs as torch on cpu (by device)"]


def test_importing_the_package_imports_no_triton():
    code = "import sys, grpo_lit.kernels; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
