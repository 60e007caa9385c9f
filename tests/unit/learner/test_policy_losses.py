"""Losses beyond plain PPO, by numbers worked out by hand and by what must hold for each."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.settings.registry import resolve
from learner.algorithm.losses import LOSSES
from learner.algorithm.losses.base import LossTokens
from learner.algorithm.losses.cispo import cispo
from learner.algorithm.losses.gspo import gspo
from learner.algorithm.losses.ppo import ppo
from learner.algorithm.losses.raft import raft_plus_plus
from learner.algorithm.losses.starpo import starpo, starpo_s
from learner.algorithm.losses.topr import topr
from learner.config import AlgorithmSection

some = settings(max_examples=60, deadline=None)
CLIP = AlgorithmSection(clip_low=0.2, clip_high=0.28)
ROWS = st.lists(
    st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.floats(-3, 3), st.integers(0, 3)),
    min_size=1,
    max_size=20,
)


def tokens(ratios, advantages, sequence=None, old=-1.0):
    """Tokens whose old logprob is -1 and whose ratio is as given."""
    olds = torch.full((len(ratios),), old, dtype=torch.float64)
    new = (olds + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    rows = torch.tensor(sequence or [0] * len(ratios))
    return LossTokens(
        new, olds, torch.tensor(advantages, dtype=torch.float64), rows, int(rows.max()) + 1
    )


def test_gspo_by_hand():
    # Sequence 0: token ratios 4 and 1, s = exp((ln 4 + ln 1)/2) = 2. A = 1: max(-2, -1.28) = -1.28,
    # cut, no gradient. Sequence 1: the same with A = -1: max(2, 1.28) = 2, gradient -s A = 2 at
    # each token. Sequence 2: ratios 1/4 and 1, s = 0.5. A = 1: max(-0.5, -0.8) = -0.5, gradient
    # -0.5. Token 5 alone would have been at 1.
    batch = tokens(
        [4.0, 1.0, 4.0, 1.0, 0.25, 1.0], [1.0, 1.0, -1.0, -1.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2]
    )
    losses, stats = gspo(batch, CLIP)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-1.28, -1.28, 2.0, 2.0, -0.5, -0.5])
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 2.0, 2.0, -0.5, -0.5])
    assert stats["clipped"] == 2


@some
@given(ROWS)
def test_gspo_in_the_sequence_mean_is_the_sequence_form(rows):
    # With one advantage per sequence, the mean over tokens of the token form has the gradient of
    # -min(s A, clip(s) A) itself.
    new, old, advantages, _ = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)
    )
    advantages = advantages[:1].expand(len(rows))
    one, other = new.clone().requires_grad_(), new.clone().requires_grad_()
    gspo(LossTokens(one, old, advantages, torch.zeros(len(rows), dtype=torch.long), 1), CLIP)[
        0
    ].mean().backward()
    s = torch.exp((other - old).mean())
    if min(abs(s.item() - 0.8), abs(s.item() - 1.28)) < 1e-9:
        return  # on the edge either side is a gradient
    torch.maximum(-s * advantages[0], -s.clamp(0.8, 1.28) * advantages[0]).backward()
    torch.testing.assert_close(one.grad, other.grad)


def test_cispo_by_hand():
    # Logprobs -1 + ln r. Weights: r 3 cut to 1.28, r 0.5 raised to 0.8, r 1.1 as it is. Loss -w A
    # log p, gradient -w A everywhere.
    batch = tokens([3.0, 0.5, 1.1], [2.0, 1.0, -1.0])
    losses, stats = cispo(batch, CLIP)
    losses.sum().backward()
    expected = [-2.56 * (math.log(3) - 1), -0.8 * (math.log(0.5) - 1), 1.1 * (math.log(1.1) - 1)]
    assert losses.tolist() == pytest.approx(expected)
    assert batch.logprobs.grad.tolist() == pytest.approx([-2.56, -0.8, 1.1])
    assert stats["clipped"] == 2


def test_cispo_without_a_lower_bound():
    batch = tokens([0.01], [1.0])
    cispo(batch, AlgorithmSection(clip_low=1.0, clip_high=2.0))[0].sum().backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-0.01])


def test_topr_by_hand():
    # Sequence 0, A = 2: weight 1, gradient -2 whatever r is. Sequence 1, A = -1, ratios 0.5 and
    # 0.5: product 0.25, gradient 0.25. Sequence 2, A = -1, ratios 4 and 0.5: product 2, tapered to
    # 1, gradient 1; both its tokens count as clipped.
    batch = tokens(
        [5.0, 0.1, 0.5, 0.5, 4.0, 0.5], [2.0, 2.0, -1.0, -1.0, -1.0, -1.0], [0, 0, 1, 1, 2, 2]
    )
    losses, stats = topr(batch, AlgorithmSection())
    losses.sum().backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-2.0, -2.0, 0.25, 0.25, 1.0, 1.0])
    assert losses.tolist() == pytest.approx((batch.logprobs.grad * batch.logprobs).tolist())
    assert stats["clipped"] == 2


def test_topr_by_token_by_hand():
    # Ratios 4 and 0.5 by themselves: 1 and 0.5.
    batch = tokens([4.0, 0.5], [-1.0, -1.0])
    topr(batch, AlgorithmSection(importance_sampling_level="token"))[0].sum().backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([1.0, 0.5])


def test_raft_plus_plus_by_hand():
    # Good: r 1.1 gives -1.1, r 2 is cut to -1.28, r 0.5 stays -0.5 (max(-0.5, -0.8)). Bad ones are
    # left out.
    batch = tokens([1.1, 2.0, 0.5, 2.0, 0.5], [1.0, 1.0, 1.0, -1.0, -5.0])
    losses, stats = raft_plus_plus(batch, CLIP)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([-1.1, -1.28, -0.5, 0.0, 0.0])
    assert batch.logprobs.grad.tolist() == pytest.approx([-1.1, 0.0, -0.5, 0.0, 0.0])
    assert stats["clipped"] == 1


def test_starpo_is_ppo_over_the_whole_trajectory():
    # r 2, A 1: -1.28; r 2, A -1: 2; as in PPO.
    for loss in (starpo, starpo_s, ppo):
        losses, _ = loss(tokens([2.0, 2.0], [1.0, -1.0]), CLIP)
        assert losses.tolist() == pytest.approx([-1.28, 2.0])


def batch_of(rows):
    """Sorted by sequence, the sequences numbered from 0 without gaps."""
    rows = sorted(rows, key=lambda row: row[3])
    names = {name: i for i, name in enumerate(sorted({row[3] for row in rows}))}
    new, old, advantages = (
        torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(3)
    )
    return LossTokens(
        new.requires_grad_(),
        old,
        advantages,
        torch.tensor([names[row[3]] for row in rows]),
        len(names),
    )


def gradient(loss, batch):
    """Of the sum of the losses; zeros where none depends on the policy."""
    losses, _ = loss(batch, CLIP)
    return torch.autograd.grad(losses.sum(), batch.logprobs)[0]


@pytest.mark.parametrize("name", LOSSES)
@some
@given(rows=ROWS)
def test_a_sequence_alone_has_the_gradient_it_has_among_others(name, rows):
    loss, whole = resolve("losses", name, LOSSES), batch_of(rows)
    together = gradient(loss, whole)
    for number in range(whole.num_sequences):
        mine = whole.sequence == number
        zeros = torch.zeros(int(mine.sum()), dtype=torch.long)
        alone = LossTokens(
            whole.logprobs[mine].detach().requires_grad_(),
            whole.old_logprobs[mine],
            whole.advantages[mine],
            zeros,
            1,
        )
        torch.testing.assert_close(gradient(loss, alone), together[mine])


@pytest.mark.parametrize("name", LOSSES)
@some
@given(rows=ROWS)
def test_zero_advantages_give_zero_gradients(name, rows):
    whole = batch_of([(new, old, 0.0, row) for new, old, _, row in rows])
    assert not gradient(resolve("losses", name, LOSSES), whole).any()


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "raft++"])
@some
@given(rows=ROWS)
def test_on_policy_every_loss_has_the_gradient_of_the_plain_policy_gradient(name, rows):
    # Nothing has moved: all ratios are 1, nothing is clipped. raft++ leaves the bad samples out on
    # purpose.
    whole = batch_of([(new, new, advantage, row) for new, _, advantage, row in rows])
    torch.testing.assert_close(gradient(resolve("losses", name, LOSSES), whole), -whole.advantages)
