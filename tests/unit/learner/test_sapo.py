"""SAPO by hand: the gate's value and slope."""

import pytest
from test_policy_losses import tokens

from learner.algorithm.losses.sapo import sapo
from learner.config import AlgorithmSection


def test_gate_by_hand():
    # f(r) = 4 / tau sigmoid(tau (r - 1)). At r = 1: 2 / tau, slope 4 * 1/4 = 1. r 2, A 2, tau 1: f =
    # 4 * 0.7310586 = 2.9242343, slope by log p r * 4 * 0.7310586 * 0.2689414 = 1.5728954. r 2, A
    # -1, tau 1.05: f = 3.8095238 * sigmoid(1.05) = 3.8095238 * 0.7407749 = 2.8219995, slope 2 * 4 *
    # 0.7407749 * 0.2592251 = 1.5362199.
    batch = tokens([1.0, 2.0, 2.0], [3.0, 2.0, -1.0])
    losses, stats = sapo(batch, AlgorithmSection(sapo_tau_pos=1.0, sapo_tau_neg=1.05))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-6.0, -5.8484686, 2.8219995], abs=1e-6)
    assert batch.logprobs.grad.tolist() == pytest.approx([-3.0, -3.1457908, 1.5362199], abs=1e-6)
    assert stats == {}


def test_far_ratios_lose_their_gradient():
    # r 5, tau 2: the slope 5 * 4 * sigmoid(8) sigmoid(-8) = 20 * 3.3523e-4 = 6.7045e-3.
    batch = tokens([5.0], [1.0])
    sapo(batch, AlgorithmSection(sapo_tau_pos=2.0))[0].sum().backward()
    assert batch.logprobs.grad.item() == pytest.approx(-6.7045e-3, rel=1e-4)
