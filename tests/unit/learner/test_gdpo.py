"""Advantages of rewards that are normalised apart, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_assembly import group, trained

from broker.errors import ConfigError
from broker.settings.registry import resolve
from learner.algorithm.advantages import ADVANTAGES, gdpo, grpo
from learner.algorithm.advantages.base import BatchRow
from learner.algorithm.assembly import SampleAssembler
from learner.config import AlgorithmSection

# (1 - 0.5) / std(0, 1), ddof 1, which is 0.7071068.
HALF = 0.7071068


def make_row(
    number: int, parts: Mapping[str, float], num_tokens: int = 1, *, trained: bool = True
) -> BatchRow:
    return BatchRow(number, np.zeros(num_tokens), trained=trained, parts=parts)


def advantages(rows: list[BatchRow], **section: Any) -> list[list[float]]:
    algorithm = AlgorithmSection(adv_estimator="gdpo", **section)
    return [estimate.advantages.tolist() for estimate in gdpo.estimate(rows, algorithm)]


def test_combinations_that_grpo_confuses_stay_apart() -> None:
    # The example of the paper: two rewards of 0 or 1, two episodes. Of totals 0 and 1, and 0 and 2,
    # GRPO makes the same +-0.7071068. Here the second pair gets it once for each reward.
    one = [{"right": 0.0, "format": 1.0}, {"right": 1.0, "format": 1.0}]
    both = [{"right": 0.0, "format": 0.0}, {"right": 1.0, "format": 1.0}]
    for totals in ([1.0, 2.0], [0.0, 2.0]):
        assert grpo.group_advantages(np.array(totals)).tolist() == pytest.approx(
            [-HALF, HALF], rel=1e-5
        )
    assert gdpo.weighted_advantages(one, None).tolist() == pytest.approx([-HALF, HALF], rel=1e-5)
    assert gdpo.weighted_advantages(both, None).tolist() == pytest.approx(
        [-2 * HALF, 2 * HALF], rel=1e-5
    )


def test_sums_are_normalised_over_the_batch_by_episodes() -> None:
    # Sums -+0.7071068 and -+1.4142136: mean 0, squares 0.5, 0.5, 2, 2, over 3: std 1.2909944, so
    # -+0.5477226 and -+1.0954451, on every token; the long episode counts no more than a short one.
    rows = [
        make_row(1, {"right": 0.0, "format": 1.0}, 1),
        make_row(1, {"right": 1.0, "format": 1.0}, 3),
        make_row(2, {"right": 0.0, "format": 0.0}, 1),
        make_row(2, {"right": 1.0, "format": 1.0}, 2),
    ]
    expected = [[-0.5477226], [0.5477226] * 3, [-1.0954451], [1.0954451] * 2]
    for values, wanted in zip(advantages(rows), expected, strict=True):
        assert values == pytest.approx(wanted, rel=1e-5)


def test_weights_count_after_the_normalisation() -> None:
    # A reward of thousands weighs as much as one of tenths. 1 * (-+0.7071) + 0.5 * (+-0.7071).
    parts = [{"right": 0.1, "length": 3000.0}, {"right": 0.2, "length": 1000.0}]
    weights = {"right": 1.0, "length": 0.5}
    assert gdpo.weighted_advantages(parts, weights).tolist() == pytest.approx(
        [-0.5 * HALF, 0.5 * HALF], rel=1e-4
    )
    assert gdpo.weighted_advantages(parts, {"right": 2.0}).tolist() == pytest.approx(
        [-2 * HALF, 2 * HALF], rel=1e-4
    )
    # Without the division: (0.15 - 0.1) and 0.5 * 1000.
    assert gdpo.weighted_advantages(parts, weights, norm_std=False).tolist() == pytest.approx(
        [499.95, -499.95]
    )


def test_notes_and_what_is_not_named_do_not_count() -> None:
    parts = [{"right": 0.0, "judge/cost": 7.0}, {"right": 1.0, "judge/cost": 1.0, "late": 4.0}]
    # "late" is 0 in the episode that lacks it.
    assert gdpo.weighted_advantages(parts, None).tolist() == pytest.approx(
        [-2 * HALF, 2 * HALF], rel=1e-5
    )
    assert gdpo.weighted_advantages(parts, {"judge/cost": 1.0}).tolist() == pytest.approx(
        [HALF, -HALF], rel=1e-5
    )
    with pytest.raises(
        ConfigError, match=r"gdpo_weights: {'speed': 1\.0} is not allowed; names of .*: right, jud"
    ):
        gdpo.weighted_advantages(parts, {"speed": 1.0})


def test_equal_rewards_and_untrained_episodes_add_nothing() -> None:
    same = {"right": 1.0, "format": 0.0}
    assert advantages([make_row(1, same), make_row(1, same), make_row(2, same)]) == [[0.0]] * 3
    # The third episode counts in its group's mean, 1/3 and std 0.5773503, not in the batch's: the
    # others have (1 - 1/3) / 0.57735 = 1.1547 and -0.57735, mean 0.288675, std 1.2247449.
    rows = [
        make_row(1, {"right": 1.0}),
        make_row(1, {"right": 0.0}),
        make_row(1, {"right": 0.0}, trained=False),
    ]
    assert [value for values in advantages(rows) for value in values] == pytest.approx(
        [HALF, -HALF, 0.0], rel=1e-5
    )


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=6),
    st.floats(0.5, 100),
    st.floats(-10, 10),
)
def test_scale_and_offset_of_a_reward_do_not_matter(
    rewards: list[tuple[int, int]], scale: float, offset: float
) -> None:
    plain = [{"a": float(a), "b": float(b)} for a, b in rewards]
    changed = [{"a": scale * a + offset, "b": float(b)} for a, b in rewards]
    assert gdpo.weighted_advantages(changed, None) == pytest.approx(
        gdpo.weighted_advantages(plain, None), abs=1e-4
    )


def test_the_parts_of_a_group_reach_the_estimator() -> None:
    scored = group(1, [1.0, 1.0])
    parts = [{"env": 0.0, "format": 1.0}, {"env": 1.0, "format": 0.0}]
    trajectories = [
        msgspec.structs.replace(trajectory, reward_parts=part)
        for trajectory, part in zip(scored.trajectories, parts, strict=True)
    ]
    scored = msgspec.structs.replace(scored, trajectories=trajectories)
    section = AlgorithmSection(adv_estimator="gdpo", gdpo_weights={"env": 1.0, "format": 0.5})
    assembler = SampleAssembler(resolve("advantages", "gdpo", ADVANTAGES), section)
    assert assembler.needs_batch
    # The totals are equal, the weighted sums -+0.3535534, and normalised -+0.7071068.
    low, high = trained(assembler.batch([scored]))
    assert low == pytest.approx([-HALF] * len(low), rel=1e-5)
    assert high == pytest.approx([HALF] * len(high), rel=1e-5)
