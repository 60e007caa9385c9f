"""Clip-Cov and KL-Cov by hand, for tokens that were selected before."""

import dataclasses
import math

import pytest
import torch
from test_policy_losses import tokens

from learner.algorithm.losses.covariance import clip_cov, kl_cov
from learner.algorithm.losses.ppo import ppo
from learner.config import AlgorithmSection

BATCH = ([1.1, 1.1, 2.0], [2.0, 2.0, 2.0])


def selected(*choices):
    return dataclasses.replace(tokens(*BATCH), selected=torch.tensor(choices))


def test_selected_tokens_have_no_gradient_in_clip_cov():
    # r 1.1, A 2: -2.2; r 2 is cut to 1.2: -2.4, without gradient.
    batch = selected(True, False, False)
    losses, stats = clip_cov(batch, AlgorithmSection())
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([0.0, -2.2, -2.4])
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, -2.2, 0.0])
    assert stats["clipped"] == 2
    plain = clip_cov(tokens(*BATCH), AlgorithmSection())[0]
    assert torch.equal(plain, ppo(tokens(*BATCH), AlgorithmSection())[0])


def test_selected_tokens_are_held_back_in_kl_cov():
    # -r A = -2.2, -2.2, -4: not clipped. The first pays 3 |ln 1.1| = 0.2859305; its gradient is
    # -2.2 + 3.
    batch = selected(True, False, False)
    losses, stats = kl_cov(batch, AlgorithmSection(kl_cov_coef=3.0))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-2.2 + 3 * math.log(1.1), -2.2, -4.0])
    assert batch.logprobs.grad.tolist() == pytest.approx([0.8, -2.2, -4.0])
    assert stats["clipped"] == 1
    assert kl_cov(tokens(*BATCH), AlgorithmSection())[0].tolist() == pytest.approx(
        [-2.2, -2.2, -4.0]
    )
