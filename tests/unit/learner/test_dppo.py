"""DPPO by hand, both divergences."""

import pytest
import torch
from test_policy_losses import tokens

from learner.algorithm.losses.base import LossTokens
from learner.algorithm.losses.dppo import dppo_kl, dppo_tv
from learner.config import AlgorithmSection


def batch_of(old, new, advantages):
    logprobs = torch.tensor(new, dtype=torch.float64).log().requires_grad_()
    return LossTokens(
        logprobs,
        torch.tensor(old, dtype=torch.float64).log(),
        torch.tensor(advantages, dtype=torch.float64),
        torch.zeros(len(old), dtype=torch.long),
        1,
    )


def test_total_variation_by_hand():
    # Bounds 0.15. 0.5 to 0.8 differs by 0.3: masked for A > 0; for A < 0 it moved against the
    # gradient's direction, so it stays, weight 1.6. 0.5 to 0.3 differs by 0.2: masked for A < 0,
    # weight 0.6 for A > 0. 0.01 to 0.03 differs by 0.02 and stays, weight 3, where PPO would clip.
    batch = batch_of(
        [0.5, 0.5, 0.5, 0.5, 0.01], [0.8, 0.8, 0.3, 0.3, 0.03], [1.0, -1.0, -1.0, 1.0, 1.0]
    )
    losses, stats = dppo_tv(batch, AlgorithmSection(clip_low=0.15, clip_high=0.15))
    losses.sum().backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, 1.6, 0.0, -0.6, -3.0])
    assert losses.tolist() == pytest.approx((batch.logprobs.grad * batch.logprobs).tolist())
    assert stats["clipped"] == 2


def test_binary_divergence_by_hand():
    # KL(0.5 || 0.8) = 0.2231 and KL(0.5 || 0.3) = 0.5 ln(5/3) + 0.5 ln(5/7) = 0.0872 exceed 0.05.
    # KL(0.01 || 0.03) = 0.01 ln(1/3) + 0.99 ln(0.99/0.97) = 0.0092 does not.
    old, new = [0.5, 0.5, 0.01], [0.8, 0.3, 0.03]
    batch = batch_of(old, new, [1.0, -1.0, 1.0])
    losses, stats = dppo_kl(batch, AlgorithmSection(clip_low=0.05, clip_high=0.05))
    losses.sum().backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, 0.0, -3.0])
    assert stats["clipped"] == 2
    # with room for less likely tokens alone
    stats = dppo_kl(batch_of(old, new, [1.0, -1.0, 1.0]), AlgorithmSection(clip_low=0.09))[1]
    assert stats["clipped"] == 1


def test_ratios_are_truncated():
    # From e^-12 to 50 e^-12 = 3.1e-4, far below the divergence's bound: the ratio of 50 is cut to 20.
    batch = tokens([50.0], [1.0], old=-12.0)
    dppo_tv(batch, AlgorithmSection(ratio_cap=20.0))[0].sum().backward()
    assert batch.logprobs.grad.item() == pytest.approx(-20.0)
