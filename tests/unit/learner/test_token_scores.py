"""Logprobs, entropies and gradients in the logits' memory against the plain formulas."""

from __future__ import annotations

import pytest
import torch

from learner.backends.models import token_scores as module
from learner.backends.models.token_scores import token_scores

VOCAB = 37


def plain(logits, targets, temperature=None):
    logits = (
        logits.double() if temperature is None else logits.double() / temperature.double()[:, None]
    )
    logprobs = logits.log_softmax(-1)
    p = logprobs.exp()
    return logprobs.gather(1, targets[:, None])[:, 0], -torch.where(p > 0, p * logprobs, 0.0).sum(
        -1
    )


def inputs(tokens=11, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, VOCAB, generator=random) * 4).to(dtype)
    targets = torch.randint(0, VOCAB, (tokens,), generator=random)
    return (
        logits,
        targets,
        torch.rand(tokens, generator=random) + 0.5,
        torch.randn(2, tokens, generator=random),
    )


@pytest.fixture(params=[1, 4 * VOCAB * 3, 1 << 20], ids=["a row", "3 rows", "all rows"])
def block(request, monkeypatch):
    monkeypatch.setitem(module.BLOCK_BYTES, "cpu", request.param)


@pytest.mark.parametrize("tempered", [False, True])
@pytest.mark.parametrize("entropy_grad", [False, True])
@pytest.mark.usefixtures("block")
def test_values_and_gradients(tempered, entropy_grad):
    logits, targets, temperature, weights = inputs()
    temperature = temperature if tempered else None
    leaf, other = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = token_scores(leaf * 1.0, targets, temperature, entropy_grad=entropy_grad, owned=True)
    wanted = plain(other, targets, temperature)
    for one, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), expected, rtol=1e-6, atol=2e-6)
    assert found[1].requires_grad == entropy_grad
    parts = zip(weights, found, strict=True) if entropy_grad else [(weights[0], found[0])]
    sum((weight * one).sum() for weight, one in parts).backward()
    parts = zip(weights, wanted, strict=True) if entropy_grad else [(weights[0], wanted[0])]
    sum((weight * one).sum() for weight, one in parts).backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_a_padded_vocabulary_and_certain_tokens(entropy_grad):
    logits, targets, _, weights = inputs()
    logits[:, 30:] = -torch.inf
    logits[3] = -1e4
    logits[3, 5] = 1e4  # probability 1
    targets = targets.clamp_max(29)
    targets[3] = 5
    leaf = logits.clone().requires_grad_()
    logprobs, entropy = token_scores(leaf * 1.0, targets, entropy_grad=entropy_grad, owned=True)
    expected = plain(logits, targets)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-6, atol=2e-6)
    assert (logprobs[3], entropy[3]) == (0, 0)
    (weights[0] * logprobs + (weights[1] * entropy if entropy_grad else 0)).sum().backward()
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[:, 30:].any()
    assert not leaf.grad[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_that_are_not_owned_stay_as_they_are(dtype):
    logits, targets, _, _ = inputs(dtype=dtype)
    before = logits.clone()
    # its float32 copy is written to
    logprobs, _ = token_scores(logits, targets, owned=dtype == torch.bfloat16)
    assert torch.equal(logits, before)
    torch.testing.assert_close(logprobs.double(), plain(before, targets)[0], rtol=1e-6, atol=2e-6)


def test_logits_that_someone_else_needs_are_an_error_and_not_a_wrong_gradient():
    logits, targets, _, _ = inputs()
    capped = logits.clone().requires_grad_().tanh()  # keeps its result for its backward pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        token_scores(capped, targets, owned=True)[0].sum().backward()


def test_a_second_backward_pass_is_an_error_and_not_a_wrong_gradient():
    logits, targets, _, _ = inputs()
    total = token_scores(logits.clone().requires_grad_() * 1.0, targets, owned=True)[0].sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()
