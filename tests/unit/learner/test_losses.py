import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from broker.settings.registry import resolve
from learner.algorithm.losses import LOSSES
from learner.algorithm.losses.base import LossTokens
from learner.algorithm.losses.ppo import ppo
from learner.algorithm.losses.ratios import ratio_metrics, ratio_sums
from learner.algorithm.losses.reinforce import reinforce
from learner.algorithm.losses.sft import sft
from learner.config import AlgorithmSection

LOGS = st.floats(-5, 0)
TOKENS = st.lists(st.tuples(LOGS, LOGS, st.floats(-3, 3)), min_size=1, max_size=20)


def tokens(ratios, advantages):
    """Tokens whose old logprob is -1 and whose ratio is as given."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    new = (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    sequence = torch.zeros(len(ratios), dtype=torch.long)
    return LossTokens(new, old, torch.tensor(advantages, dtype=torch.float64), sequence, 1)


def test_ppo_by_hand():
    # Bounds 0.8 and 1.28. For A > 0 only a ratio above 1.28 is cut, for A < 0 only one below 0.8.
    #   r 1.0, A  2: -2.0                   r 1.0, A -2: 2.0
    #   r 2.0, A  2: max(-4, -2.56) = -2.56 r 2.0, A -2: max(4, 2.56) = 4
    #   r 0.5, A  2: max(-1, -1.6) = -1     r 0.5, A -2: max(1, 1.6) = 1.6
    batch = tokens([1.0, 2.0, 0.5, 1.0, 2.0, 0.5], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    losses, stats = ppo(batch, AlgorithmSection(clip_low=0.2, clip_high=0.28))
    assert losses.tolist() == pytest.approx([-2.0, -2.56, -1.0, 2.0, 4.0, 1.6])
    assert stats.keys() == {"clipped"}
    assert stats["clipped"] == 2


def test_ppo_gradient_by_hand():
    # d(-rA)/d log p = -rA where the plain branch stands, 0 where the clipped one does.
    batch = tokens([1.0, 2.0, 0.5, 1.0, 2.0, 0.5], [2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    losses, _ = ppo(batch, AlgorithmSection(clip_low=0.2, clip_high=0.28))
    losses.sum().backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-2.0, 0.0, -1.0, 2.0, 4.0, 0.0])


def test_dual_clip_by_hand():
    # c = 3: for A = -2 the loss is at most 6. r 5: max(10, 2.4) = 10, cut to 6. A = 2 is never cut.
    batch = tokens([5.0, 2.0, 0.1], [-2.0, -2.0, 2.0])
    losses, stats = ppo(batch, AlgorithmSection(clip_low=0.2, clip_high=0.2, dual_clip=3.0))
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([6.0, 4.0, -0.2])
    assert (stats["clipped"], stats["dual_clipped"]) == (0, 1)
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, 4.0, -0.2])


def test_log_ratios_are_clamped_at_20():
    batch = LossTokens(
        torch.tensor([0.0]), torch.tensor([-90.0]), torch.tensor([-1.0]), torch.tensor([0]), 1
    )
    losses, _ = ppo(batch, AlgorithmSection())
    assert losses.item() == pytest.approx(math.exp(20), rel=1e-5)


def test_reinforce_and_sft_by_hand():
    batch = tokens([1.0, math.e], [2.0, -3.0])  # logprobs -1 and 0
    assert reinforce(batch, AlgorithmSection())[0].tolist() == pytest.approx([2.0, 0.0])
    assert sft(batch, AlgorithmSection())[0].tolist() == pytest.approx([2.0, 0.0])


def plain_ppo(new, old, advantage, low, high, dual):
    """The formula one token at a time in Python's floats."""
    r = math.exp(new - old)
    loss = -min(r * advantage, min(max(r, 1 - low), 1 + high) * advantage)
    return min(loss, -dual * advantage) if dual and advantage < 0 else loss


@given(TOKENS, st.floats(0, 1), st.floats(0, 2), st.one_of(st.none(), st.floats(1.01, 5)))
def test_ppo_equals_the_formula(rows, low, high, dual):
    new, old, advantages = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    batch = LossTokens(new, old, advantages, torch.zeros(len(rows), dtype=torch.long), 1)
    losses, stats = ppo(batch, AlgorithmSection(clip_low=low, clip_high=high, dual_clip=dual))
    assert losses.tolist() == pytest.approx(
        [plain_ppo(*row, low, high, dual) for row in rows], rel=1e-9, abs=1e-12
    )
    assert 0 <= stats["clipped"] <= len(rows)


# those hold weights back
HELD_WEIGHTS = ("gspo", "cispo", "topr", "gmpo", "dppo_tv", "dppo_kl")


@pytest.mark.parametrize("name", [name for name in LOSSES if name not in HELD_WEIGHTS])
def test_every_loss_has_the_gradient_of_its_values(name):
    generator = torch.Generator().manual_seed(4)
    new, old, advantages = (
        torch.randn(30, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    loss, sequence = resolve("losses", name, LOSSES), torch.arange(30) // 5

    def values(logprobs):
        return loss(
            LossTokens(logprobs, old, advantages, sequence, 6), AlgorithmSection(dual_clip=3.0)
        )[0]

    assert torch.autograd.gradcheck(values, new.requires_grad_())


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_is_silent_where_the_advantage_is_zero(name):
    generator = torch.Generator().manual_seed(5)
    new, old, advantages = (torch.randn(12, generator=generator) for _ in range(3))
    advantages[4:8] = 0
    batch = LossTokens(new.requires_grad_(), old, advantages, torch.arange(12) // 4, 3)
    losses, stats = resolve("losses", name, LOSSES)(batch, AlgorithmSection())
    losses.sum().backward()
    assert losses.shape == (12,)
    assert not losses[4:8].any()
    assert not new.grad[4:8].any()
    assert new.grad[:4].any()
    assert all(value.ndim == 0 for value in stats.values())


def test_ratio_figures_by_hand():
    # Weights 1, 2, 0.5: kl = -(0 + ln 2 - ln 2)/3 = 0; k3 = (0 + (2 - 1 - ln 2) + (0.5 - 1 + ln
    # 2))/3 = 0.5/3; mean 3.5/3; ess = 3.5^2 / (3 * (1 + 4 + 0.25)) = 12.25/15.75.
    old = torch.tensor([-1.0, -2.0, -0.5])
    sums = ratio_sums(old + torch.tensor([1.0, 2.0, 0.5]).log(), old)
    metrics = ratio_metrics({name: value.item() for name, value in sums.items()}, 3)
    assert metrics == pytest.approx(
        {
            "rollout_corr/kl": 0.0,
            "rollout_corr/k3_kl": 0.5 / 3,
            "rollout_corr/is_mean": 3.5 / 3,
            "rollout_corr/ess": 12.25 / 15.75,
        },
        abs=1e-6,
    )


@given(st.lists(st.tuples(LOGS, LOGS), min_size=2, max_size=30), st.integers(1, 29))
def test_ratio_sums_add_up_over_micro_batches(rows, where):
    new, old = (torch.tensor(column) for column in zip(*rows, strict=True))
    where = min(where, len(rows) - 1)
    whole, first, second = (
        ratio_sums(new, old),
        ratio_sums(new[:where], old[:where]),
        ratio_sums(new[where:], old[where:]),
    )
    for name, value in whole.items():
        assert (first[name] + second[name]).item() == pytest.approx(
            value.item(), rel=1e-9, abs=1e-9
        )
    metrics = ratio_metrics({name: value.item() for name, value in whole.items()}, len(rows))
    assert 0 < metrics["rollout_corr/ess"] <= 1 + 1e-9
    assert metrics["rollout_corr/k3_kl"] >= -1e-9
    assert np.isfinite(list(metrics.values())).all()


def test_no_tokens_mean_no_movement():
    assert ratio_metrics({}, 0) == {
        "rollout_corr/kl": 0,
        "rollout_corr/k3_kl": 0,
        "rollout_corr/is_mean": 1,
        "rollout_corr/ess": 1,
    }
