import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.contract import wire
from broker.settings.registry import resolve
from learner.algorithm.advantages import ADVANTAGES, grpo, reinforce, rloo
from learner.algorithm_checks import estimators_with
from learner.config import AlgorithmSection

REWARDS = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=1, max_size=12)


def trajectory(reward: float, spans: list[tuple[int, int, float]], n: int) -> wire.Trajectory:
    mask = np.zeros(n, np.uint8)
    for start, end, _ in spans:
        mask[start:end] = 1
    return wire.Trajectory(
        episode=0,
        token_ids=wire.column(np.arange(n), "<i4"),
        loss_mask=wire.column(mask, "|u1"),
        logprobs=wire.column(np.where(mask, -1.0, 0.0), "<f4"),
        version_runs=wire.column([3, int(mask.sum())], "<i4"),
        turns=[
            wire.Turn(start=a, end=b, reward=r, valid=True, finish_reason="stop", server="s")
            for a, b, r in spans
        ],
        reward=reward,
        reward_parts={},
        success=False,
        end="terminated",
    )


def test_grpo_by_hand():
    # Mean 0.5; squared deviations 4 * 0.25 = 1, over 3 degrees of freedom: std = sqrt(1/3) =
    # 0.5773502692. 0.5 / (0.5773502692 + 1e-6) = 0.8660239.
    got = grpo.group_advantages(np.array([1.0, 0.0, 0.0, 1.0]))
    assert got == pytest.approx([0.8660239, -0.8660239, -0.8660239, 0.8660239], abs=1e-7)


def test_grpo_without_std_by_hand():
    assert grpo.group_advantages(np.array([3.0, 1.0, 2.0]), norm_std=False) == pytest.approx(
        [1.0, -1.0, 0.0]
    )


def test_rloo_by_hand():
    # 3 - (1 + 2) / 2 = 1.5;  1 - (3 + 2) / 2 = -1.5;  2 - (3 + 1) / 2 = 0.
    assert rloo.leave_one_out_advantages(np.array([3.0, 1.0, 2.0])) == pytest.approx(
        [1.5, -1.5, 0.0]
    )


def test_reinforce_by_hand():
    # Turns earn 1, 0, 2; the total of 5 has 2 more from reward hubs, after the last turn: to go 5,
    # 4, 4.
    (values,) = reinforce.estimate(
        [trajectory(5.0, [(1, 2, 1.0), (2, 3, 0.0), (3, 4, 2.0)], 4)], AlgorithmSection()
    )
    assert values.tolist() == [0, 5, 4, 4]


def test_reinforce_discounts_over_sampled_tokens_only():
    # gamma 0.5; rewards 1 on token 2, 4 on token 5 (3 of its own, 1 from reward hubs), tokens 3 and
    # 4 are the environment's. Backwards: 4; 1 + 0.5 * 4 = 3; 0.5 * 3 = 1.5.
    (values,) = reinforce.estimate(
        [trajectory(5.0, [(1, 3, 1.0), (5, 6, 3.0)], 6)], AlgorithmSection(gamma=0.5)
    )
    assert values.tolist() == [0, 1.5, 3, 0, 0, 4]


@given(st.floats(-1e6, 1e6), st.integers(1, 20))
def test_equal_rewards_give_exactly_zero(reward, size):
    # thrice 0.1 has a mean that is not 0.1: rounding must not become a signal
    rewards = np.full(size, reward)
    assert not grpo.group_advantages(rewards).any()
    assert not grpo.group_advantages(rewards, norm_std=False).any()
    assert not rloo.leave_one_out_advantages(rewards).any()


@given(REWARDS)
def test_group_advantages_sum_to_zero_and_keep_the_order(rewards):
    values = np.array(rewards)
    for advantages in (
        grpo.group_advantages(values),
        grpo.group_advantages(values, norm_std=False),
        rloo.leave_one_out_advantages(values),
    ):
        assert advantages.sum() == pytest.approx(
            0.0, abs=1e-6 * len(values) * max(1.0, np.abs(values).max())
        )
        assert (np.diff(advantages[np.argsort(values, kind="stable")]) >= -1e-9).all()


@given(REWARDS)
def test_rloo_is_the_centred_reward_scaled(rewards):
    # R_i - (S - R_i)/(n - 1) = n/(n - 1) (R_i - S/n)
    values, n = np.array(rewards), len(rewards)
    expected = grpo.group_advantages(values, norm_std=False) * (n / (n - 1) if n > 1 else 1.0)
    assert rloo.leave_one_out_advantages(values) == pytest.approx(expected, abs=1e-9)


def test_reinforce_discounts_per_turn():
    # Turns earn 1, and 3 with what reward hubs added. gamma 0.5 per turn: 3 on the last, 1 + 1.5 =
    # 2.5 on both tokens of the first. Per token it would be 1.25, 2.5, 3.
    group = [trajectory(4.0, [(1, 3, 1.0), (4, 5, 2.0)], 6)]
    (values,) = reinforce.estimate(group, AlgorithmSection(gamma=0.5, discount="turn"))
    assert values.tolist() == [0, 2.5, 2.5, 0, 3, 0]
    (values,) = reinforce.estimate(group, AlgorithmSection(gamma=0.5))
    assert values.tolist() == [0, 1.25, 2.5, 0, 3, 0]


def test_spread_over_sampled_tokens():
    group = [
        trajectory(1.0, [(2, 4, 0.0), (5, 6, 1.0)], 7),
        msgspec.structs.replace(trajectory(0.0, [(1, 3, 0.0)], 4), episode=1),
    ]
    first, second = grpo.estimate(group, AlgorithmSection(norm_std=False))
    assert first.tolist() == [0, 0, 0.5, 0.5, 0, 0.5, 0]
    assert second.tolist() == [0, -0.5, -0.5, 0]


def test_reinforce_gives_each_turn_what_came_after():
    (values,) = reinforce.estimate(
        [trajectory(4.0, [(1, 3, 1.0), (4, 5, 2.0)], 6)], AlgorithmSection()
    )
    assert values.tolist() == [0, 4, 4, 0, 3, 0]


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - set(estimators_with("whole_batch"))))
def test_every_estimator_gives_one_finite_array_per_trajectory_and_nothing_off_the_mask(name):
    group = [trajectory(r, [(2, 4, r / 2), (5, 7, r / 2)], 8) for r in (0.0, 1.0, 0.25)] + [
        trajectory(0.5, [], 3)
    ]
    group[1] = msgspec.structs.replace(
        group[1], turns=[msgspec.structs.replace(turn, anchor="A") for turn in group[1].turns]
    )
    estimated = resolve("advantages", name, ADVANTAGES)(group, AlgorithmSection())
    assert [len(a) for a in estimated] == [8, 8, 8, 3]
    for values, one in zip(estimated, group, strict=True):
        assert np.isfinite(values).all()
        assert not values[one.loss_mask.array() == 0].any()
