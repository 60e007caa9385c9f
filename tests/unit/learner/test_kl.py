import math

import pytest
import torch

from learner.algorithm.kl import kl_penalty, weighted_penalty


# p = 0.5, ref = 0.25: d = ln 2 = 0.693147. k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d = 0.5 - 1 +
# d.
@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)]
)
def test_by_hand(estimator, expected):
    got = kl_penalty(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), estimator)
    assert got.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expectation_against_the_true_divergence(estimator):
    # All tokens of a small vocabulary, weighted by p: k1 and k3 give KL(p || ref) exactly, k2 comes
    # near for near policies.
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    ref = torch.tensor([0.45, 0.33, 0.22], dtype=torch.float64)
    exact = (p * (p / ref).log()).sum().item()
    expected = (p * kl_penalty(p.log(), ref.log(), estimator)).sum().item()
    assert expected == pytest.approx(exact, rel=0.05 if estimator == "k2" else 1e-9)


def test_k2_has_the_gradient_of_the_true_divergence():
    # As a loss on sampled tokens the sampling weights carry no gradient.
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.1, -0.3], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    (true,) = torch.autograd.grad(
        (logprobs.exp() * (logprobs - ref)).sum(), logits, retain_graph=True
    )
    sampled = {
        k: torch.autograd.grad(
            (logprobs.exp().detach() * kl_penalty(logprobs, ref, k)).sum(),
            logits,
            retain_graph=True,
        )[0]
        for k in ("k1", "k2")
    }
    assert sampled["k2"].tolist() == pytest.approx(true.tolist(), abs=1e-12)
    assert sampled["k1"].tolist() == pytest.approx([0, 0, 0], abs=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_plus_has_the_value_of_one_and_the_gradient_of_k2(estimator):
    new, ref = torch.randn(2, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours, theirs = new.clone().requires_grad_(), new.clone().requires_grad_()
    values = kl_penalty(ours, ref, f"{estimator}+")
    assert torch.equal(values, kl_penalty(new, ref, estimator))
    values.sum().backward()
    kl_penalty(theirs, ref, "k2").sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_importance_weighted_by_hand():
    # p 0.5, ref 0.25, β 0.25: r = 2, k3 = 0.193147, so 0.386294; k1 = 0.693147, so 1.386294.
    p, ref = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    assert weighted_penalty(p, ref, ref, "k3").item() == pytest.approx(0.386294, abs=1e-6)
    assert weighted_penalty(p, ref, ref, "k1").item() == pytest.approx(1.386294, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_importance_weighted_has_the_true_divergence_and_gradient_off_policy(estimator):
    # Tokens come from β, far from p: expectations are over β, whose probabilities have no gradient.
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.1, -0.3], dtype=torch.float64).log_softmax(0)
    rollout = torch.tensor([1.0, -1.0, 0.2], dtype=torch.float64).log_softmax(0)
    logprobs = logits.log_softmax(0)
    true = (logprobs.exp() * (logprobs - ref)).sum()
    expected = (rollout.exp() * weighted_penalty(logprobs, ref, rollout, estimator)).sum()
    assert expected.item() == pytest.approx(true.item(), abs=1e-12)
    slopes = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (true, expected)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient(estimator):
    new, ref = torch.randn(2, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.autograd.gradcheck(
        lambda x: kl_penalty(x, ref, estimator), new.clone().requires_grad_()
    )


def test_unknown_estimator():
    with pytest.raises(ValueError, match="k4"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")
