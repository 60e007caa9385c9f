"""Rewards before the estimator: penalties, normalisation, clip; which groups are chosen."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_more_advantages import trajectory

from broker.contract import wire
from learner.algorithm.selection import most_varied
from learner.algorithm.shaping import (
    is_truncated,
    minus_kl,
    needs_batch,
    normalize_rewards,
    overlong_penalty,
    shape_rewards,
)
from learner.config import AlgorithmSection, RewardNormalization

some = settings(max_examples=60, deadline=None)


def group(
    ticket: int, rewards: list[float], *, domain: str = "lake", anchors: str = ""
) -> wire.Group:
    trajectories = [
        trajectory([(1, 3, r, anchors[i : i + 1])], 4, episode=i) for i, r in enumerate(rewards)
    ]
    return wire.Group(
        ticket=ticket,
        domain=domain,
        task_index=0,
        min_version=0,
        hub="h",
        deliveries=1,
        pools=[],
        trajectories=trajectories,
    )


def rewards(groups: list[wire.Group]) -> list[list[float]]:
    return [[one.reward for one in each.trajectories] for each in groups]


def test_nothing_is_asked_for_and_nothing_changes() -> None:
    given_groups = [group(1, [1.0, 0.0])]
    assert shape_rewards(given_groups, AlgorithmSection()) == given_groups


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (200, -1.0)]
)
def test_overlong_penalty_by_hand(length: int, penalty: float) -> None:
    # L 100, buffer 20: from 80 on -(length - 80) / 20, floored at -factor; with a factor of 3 three
    # times that.
    assert overlong_penalty(length, 100, 20) == pytest.approx(penalty)
    assert overlong_penalty(length, 100, 20, 3.0) == pytest.approx(3 * penalty)


def test_penalties_by_hand() -> None:
    # Three sampled tokens, L 4, buffer 2: -(3 - 2)/2 = -0.5. Two invalid turns of three cost 0.1
    # each. 1 - 0.5 - 0.2 = 0.3.
    one = trajectory([(1, 2, 0.0, ""), (3, 4, 0.0, ""), (5, 6, 1.0, "")], 6)
    one = msgspec.structs.replace(
        one, turns=[msgspec.structs.replace(t, valid=i == 2) for i, t in enumerate(one.turns)]
    )
    given_group = msgspec.structs.replace(group(1, [0.0]), trajectories=[one])
    (shaped,) = shape_rewards(
        [given_group], AlgorithmSection(format_penalty=0.1, overlong_length=4, overlong_buffer=2)
    )
    assert shaped.trajectories[0].reward == pytest.approx(0.3)
    assert [turn.reward for turn in shaped.trajectories[0].turns] == pytest.approx(
        [-0.1, -0.1, 1.0]
    )


def test_the_clip_comes_last() -> None:
    assert rewards(shape_rewards([group(1, [5.0, -0.5])], AlgorithmSection(reward_clip=1.0))) == [
        [1.0, -0.5]
    ]


BY_HAND = [
    group(1, [0.0, 2.0], anchors="xy"),
    group(2, [4.0, 6.0], domain="sea", anchors="xx"),
    group(3, [8.0, 10.0], anchors="yy"),
]


@pytest.mark.parametrize(
    ("grouping", "mean", "std", "expected"),
    [
        # Groups have means 1, 5, 9 and a deviation of sqrt(2); the batch a mean of 5 and a
        # deviation of sqrt(70/5) = 3.7416574.
        ("traj_group_id", "group", None, [-1, 1, -1, 1, -1, 1]),
        ("traj_group_id", "group", "group", [-0.7071063, 0.7071063] * 3),
        ("traj_group_id", "group", "batch", [-0.2672612, 0.2672612] * 3),
        ("traj_group_id", "batch", None, [-5, -3, -1, 1, 3, 5]),
        ("batch", "group", None, [-5, -3, -1, 1, 3, 5]),
        (
            "batch",
            "batch",
            "batch",
            [-1.3363059, -0.8017835, -0.2672612, 0.2672612, 0.8017835, 1.3363059],
        ),
        # Lake has 0, 2, 8, 10 with mean 5; sea 4, 6 with mean 5.
        ("inductive", "group", None, [-5, -3, -1, 1, 3, 5]),
        # From x in lake 0 alone; from x in sea 4 and 6; from y 2, 8, 10 with mean 20/3.
        ("state", "group", None, [0, 2 - 20 / 3, -1, 1, 8 - 20 / 3, 10 - 20 / 3]),
        (
            "traj_group_id",
            None,
            "group",
            [0, 1.4142126, 2.8284251, 4.2426377, 5.6568502, 7.0710628],
        ),
        ("batch", None, None, [0, 2, 4, 6, 8, 10]),
    ],
)
def test_normalisation_by_hand(
    grouping: str, mean: str | None, std: str | None, expected: list[float]
) -> None:
    section = AlgorithmSection(
        reward_normalization=RewardNormalization(
            grouping=grouping, norm_mean_type=mean, norm_std_type=std
        )  # type: ignore[arg-type]
    )
    shaped = shape_rewards(BY_HAND, section)
    assert np.concatenate(rewards(shaped)).tolist() == pytest.approx(expected, abs=1e-6)


def test_turns_are_scaled_with_their_trajectory() -> None:
    # Reward 2 of a group with mean 1 and deviation sqrt(2): the turn's reward becomes sqrt(2), the
    # shift comes after it.
    section = AlgorithmSection(
        reward_normalization=RewardNormalization(norm_mean_type="group", norm_std_type="group")
    )
    one = shape_rewards([group(1, [0.0, 2.0])], section)[0].trajectories[1]
    assert one.turns[0].reward == pytest.approx(2**0.5, abs=1e-5)
    assert one.reward == pytest.approx(0.5**0.5, abs=1e-5)


@some
@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=12))
def test_every_sample_keeps_a_value_and_equal_rewards_become_zero(
    pairs: list[tuple[float, int]],
) -> None:
    values, keys = np.array([value for value, _ in pairs]), [key for _, key in pairs]
    for kinds in (("group", "group"), ("batch", "group"), ("group", "batch"), ("batch", "batch")):
        shift, scale = normalize_rewards(values, keys, *kinds)
        assert np.isfinite((values - shift) / scale).all()
    shift, _ = normalize_rewards(np.full(len(pairs), 0.1), keys, "group", "group")
    assert (shift == 0.1).all()


def test_greedy_baselines_have_no_part_in_means() -> None:
    given_group = group(1, [0.0, 2.0, 100.0])
    given_group.trajectories[2] = msgspec.structs.replace(given_group.trajectories[2], greedy=True)
    section = AlgorithmSection(reward_normalization=RewardNormalization(norm_mean_type="group"))
    assert rewards(shape_rewards([given_group], section)) == [[-1.0, 1.0, 99.0]]


@pytest.mark.parametrize(
    ("grouping", "mean", "std", "waits"),
    [
        ("traj_group_id", "group", "group", False),
        ("traj_group_id", "group", "batch", True),
        ("state", "group", None, True),
        ("batch", None, None, False),
    ],
)
def test_what_needs_the_whole_batch(
    grouping: str, mean: str | None, std: str | None, waits: bool
) -> None:
    section = RewardNormalization(grouping=grouping, norm_mean_type=mean, norm_std_type=std)  # type: ignore[arg-type]
    assert needs_batch(section) == waits


def test_kl_comes_off_the_turn_it_belongs_to() -> None:
    # Tokens 1, 2 and 4 cost 0.1, 0.2 and 0.4.
    one = minus_kl(trajectory([(1, 3, 1.0, ""), (4, 5, 2.0, "")], 6), np.array([0.1, 0.2, 0.4]))
    assert one.reward == pytest.approx(2.3)
    assert [turn.reward for turn in one.turns] == pytest.approx([0.7, 1.6])


def test_truncation() -> None:
    plain = trajectory([(1, 3, 1.0, "")], 4)
    cut = msgspec.structs.replace(
        plain, turns=[msgspec.structs.replace(plain.turns[0], finish_reason="length")]
    )
    assert [
        is_truncated(one) for one in (plain, cut, msgspec.structs.replace(plain, end="length"))
    ] == [
        False,
        True,
        True,
    ]


def test_the_most_varied_groups_by_hand() -> None:
    # Variances 0.5, 0, 8, 2, 0.5: a quarter of five is 1.25, so two: 8 and 2; three: the earlier of
    # the two with 0.5 as well.
    groups = [group(i, [0.0, r]) for i, r in enumerate((1.0, 0.0, 4.0, 2.0, 1.0))]
    assert [one.ticket for one in most_varied(groups, 0.25)] == [2, 3]
    assert [one.ticket for one in most_varied(groups, 0.6)] == [0, 2, 3]
    assert most_varied(groups, 1.0) == groups
    assert [one.ticket for one in most_varied(groups[:1], 0.25)] == [0]
