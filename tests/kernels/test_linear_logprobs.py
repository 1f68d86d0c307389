"""linear_logprobs against full logits in float64, forward and every gradient."""

from __future__ import annotations

import pytest
import torch

from grpo_lit.errors import UserError
from grpo_lit.kernels import linear_logprobs


def _truth(hidden, weight, ids, *, bias=None, temperature=1.0, softcap=None):
    """Full logits in the dtype of the inputs: the definition, written without chunks."""
    z = hidden @ weight.T
    if bias is not None:
        z = z + bias
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    logp = torch.log_softmax(z / temperature, -1)
    return logp.gather(-1, ids[..., None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def _inputs(shape=(3, 5), width=16, vocab=37, seed=0, dtype=torch.float64):
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*shape, width, generator=gen, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=gen, dtype=torch.float64) / 2
    ids = torch.randint(vocab, shape, generator=gen)
    return hidden.to(dtype), weight.to(dtype), ids


@pytest.mark.parametrize("chunk_rows", [None, 1, 4, 15])
@pytest.mark.parametrize(
    ("temperature", "softcap", "with_bias"), [(1.0, None, False), (0.7, None, True), (1.3, 2.0, True)]
)
@pytest.mark.parametrize("use", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("train_head", [False, True])
def test_matches_full_logits_in_float64(chunk_rows, temperature, softcap, with_bias, use, train_head):
    hidden, weight, ids = _inputs()
    bias = torch.linspace(-1, 1, 37, dtype=torch.float64) if with_bias else None
    leaves = [hidden.requires_grad_()]
    if train_head:
        leaves += [t.requires_grad_() for t in (weight, bias) if t is not None]
    options = {"bias": bias, "temperature": temperature, "softcap": softcap}
    gen = torch.Generator().manual_seed(1)
    up_logp, up_ent = torch.randn(2, *ids.shape, generator=gen, dtype=torch.float64)

    def gradients(logprobs, entropy):
        scalar = 0.0
        if use != "entropy":
            scalar = scalar + (up_logp * logprobs).sum()
        if use != "logprobs":
            scalar = scalar + (up_ent * entropy).sum()
        return torch.autograd.grad(scalar, leaves)

    want = _truth(hidden, weight, ids, **options)
    got = linear_logprobs(hidden, weight, ids, impl="torch", chunk_rows=chunk_rows, **options)
    for a, b in zip(got, want, strict=True):
        assert a.shape == ids.shape
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(*got), gradients(*want), strict=True):
        assert b.abs().max() > 1e-2  # the tolerance below could not pass a zero
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_no_grad_gives_the_same_values_and_no_graph():
    hidden, weight, ids = _inputs(dtype=torch.float32)
    with_graph = linear_logprobs(hidden.requires_grad_(), weight, ids)
    with torch.no_grad():
        scored = linear_logprobs(hidden, weight, ids)
    assert not scored[0].requires_grad
    assert scored[0].dtype == scored[1].dtype == torch.float32
    for a, b in zip(scored, with_graph, strict=True):
        assert torch.equal(a, b.detach())


def test_masked_tokens_cost_nothing_and_get_exact_zeros():
    hidden, weight, ids = _inputs(dtype=torch.float32)
    mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < 0.6
    ids = ids.masked_fill(~mask, -100)  # would fail in a gather
    poisoned = hidden.masked_fill(~mask[..., None], float("nan")).requires_grad_()
    logprobs, entropy = linear_logprobs(poisoned, weight, ids, mask=mask)
    (logprobs.sum() + entropy.sum()).backward()
    assert (logprobs[~mask] == 0).all()
    assert (entropy[~mask] == 0).all()
    assert (poisoned.grad[~mask] == 0).all()
    want = _truth(hidden, weight, ids.clamp(min=0))
    torch.testing.assert_close(logprobs[mask], want[0][mask], rtol=1e-5, atol=1e-6)
    assert poisoned.grad[mask].abs().min(-1).values.max() > 0


@pytest.mark.parametrize("share", [0.6, 1.1])
def test_a_known_number_of_tokens_changes_nothing(share):
    hidden, weight, ids = _inputs(dtype=torch.float32)
    mask = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2)) < share
    want = linear_logprobs(hidden, weight, ids, mask=mask)
    got = linear_logprobs(hidden, weight, ids, mask=mask, num_tokens=int(mask.sum()))
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_every_row_masked():
    hidden, weight, ids = _inputs(dtype=torch.float32)
    hidden.requires_grad_()
    logprobs, _ = linear_logprobs(hidden, weight, ids, mask=torch.zeros_like(ids, dtype=torch.bool))
    logprobs.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_a_forbidden_token_does_not_make_the_entropy_nan():
    hidden, weight, ids = _inputs(dtype=torch.float32)
    bias = torch.zeros(37)
    bias[5] = float("-inf")
    ids = ids.masked_fill(ids == 5, 6)
    hidden.requires_grad_()
    logprobs, entropy = linear_logprobs(hidden, weight, ids, bias=bias)
    (logprobs.sum() + entropy.sum()).backward()
    assert entropy.isfinite().all()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_close_as_torch_in_the_same_dtype(dtype):
    hidden, weight, ids = _inputs(shape=(2, 65), width=64, vocab=301, dtype=dtype)
    hidden.requires_grad_()
    exact = hidden.detach().double().requires_grad_()
    want = _truth(exact, weight.double(), ids)
    (same,) = torch.autograd.grad(_truth(hidden, weight, ids)[0].sum(), hidden)
    logprobs, entropy = linear_logprobs(hidden, weight, ids, chunk_rows=32)
    (got,) = torch.autograd.grad(logprobs.sum(), hidden)
    (true,) = torch.autograd.grad(want[0].sum(), exact)
    assert logprobs.dtype == entropy.dtype == torch.float32
    scale = true.abs().max()
    assert (got - true).abs().max() <= 2 * (same - true).abs().max() + 1e-3 * scale
    torch.testing.assert_close(logprobs.double(), want[0], rtol=0, atol=0.05)


def test_a_frozen_head_gets_no_gradient_and_no_buffer_of_its_size(monkeypatch):
    hidden, weight, ids = _inputs(dtype=torch.float32)
    hidden.requires_grad_()
    made = []
    zeros = torch.zeros

    def record(*args, **kwargs):
        made.append(args)
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", record)
    logprobs, entropy = linear_logprobs(hidden, weight, ids)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is None
    assert (weight.shape,) not in made


def test_mixed_dtypes_take_the_heads_dtype():
    hidden, weight, ids = _inputs(dtype=torch.float32)
    got, _ = linear_logprobs(hidden.bfloat16(), weight, ids)
    want, _ = linear_logprobs(hidden.bfloat16().float(), weight, ids)
    assert torch.equal(got, want)


def test_autocast_does_not_change_the_result():
    hidden, weight, ids = _inputs(dtype=torch.float32)
    want, _ = linear_logprobs(hidden, weight, ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, _ = linear_logprobs(hidden, weight, ids)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"softcap": -1.0}, "softcap"),
        ({"impl": "cuda"}, "impl"),
        ({"chunk_rows": 0}, "chunk_rows"),
        ({"bias": torch.zeros(3)}, "bias"),
        ({"mask": torch.ones(3, 5)}, "mask"),
        ({"completion_ids": torch.zeros(2, dtype=torch.long)}, "completion_ids"),
    ],
)
def test_mistakes_are_named(change, named):
    hidden, weight, ids = _inputs(dtype=torch.float32)
    arguments = {"hidden": hidden, "lm_head_weight": weight, "completion_ids": ids} | change
    with pytest.raises(UserError, match=named):
        linear_logprobs(**arguments)


def test_a_long_row_adds_up_to_one():
    """50,000 tokens: sums taken in single steps would be 1e-5 off, and with them every gradient."""
    gen = torch.Generator().manual_seed(3)
    logits, ids = 4 * torch.randn(8, 50_000, generator=gen), torch.randint(50_000, (8,), generator=gen)
    hidden = torch.eye(8, requires_grad=True)  # the logits are the weight, rounded nowhere
    weight, bias = logits.T.contiguous(), torch.zeros(50_000, requires_grad=True)
    logprobs, _ = linear_logprobs(hidden, weight, ids, bias=bias, impl="torch")
    truth = logits.double().log_softmax(-1).gather(-1, ids[:, None]).squeeze(-1)
    assert float((logprobs.detach() - truth).abs().max()) < 5e-6
    dhidden, dbias = torch.autograd.grad(logprobs.sum(), (hidden, bias))
    assert float(dbias.abs().sum()) > 1
    assert abs(float(dbias.double().sum())) < 4e-6  # the sum over rows and tokens of 1[v = a] - p_v
    expected = weight.double()[ids] - logits.double().softmax(-1) @ weight.double()
    torch.testing.assert_close(dhidden.double(), expected, rtol=0, atol=4e-6 * float(expected.abs().max()))
