import numpy as np
import pytest

from broker.contract import codec, wire
from learner.algorithm.samples import TrainSample, from_trajectory


def from_group(group, advantages, *, temperature=1.0):
    pairs = zip(group.trajectories, advantages, strict=True)
    return [
        from_trajectory(
            one, values, group=group.ticket, temperature=temperature, trained=not one.greedy
        )
        for one, values in pairs
    ]


def group(*, mask, versions, reward=1.5):
    mask = np.array(mask, np.uint8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int))).reshape(-1, 2)
    one = wire.Trajectory(
        episode=0,
        token_ids=wire.column(np.arange(10, 10 + len(mask)), "<i4"),
        loss_mask=wire.column(mask, "|u1"),
        logprobs=wire.column(-0.25 * mask, "<f4"),
        version_runs=wire.column(versions, "<i4"),
        turns=[
            wire.Turn(
                start=int(a), end=int(b), reward=0.0, valid=True, finish_reason="stop", server="s"
            )
            for a, b in edges
        ],
        reward=reward,
        reward_parts={},
        success=True,
        end="terminated",
    )
    scored = wire.Group(
        ticket=7,
        domain="d",
        task_index=0,
        min_version=0,
        hub="h",
        deliveries=1,
        pools=[],
        trajectories=[one],
    )
    # as the learner gets it: checked, columns read-only
    return codec.decode(codec.encode(scored), wire.Group)


def test_columns_are_unpacked_and_versions_follow_the_mask():
    # Runs (4, 1), (5, 2): the first sampled token is of version 4, the next two of 5.
    message = group(mask=[0, 1, 1, 0, 1, 0], versions=[4, 1, 5, 2])
    (sample,) = from_group(message, [np.array([9.0, 1.0, 2.0, 9.0, 3.0, 9.0])], temperature=0.7)
    assert sample.token_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert sample.loss_mask.tolist() == [0, 1, 1, 0, 1, 0]
    assert sample.versions.tolist() == [-1, 4, 5, -1, 5, -1]
    assert sample.advantages.tolist() == [0, 1, 2, 0, 3, 0]
    assert sample.rollout_logprobs.tolist() == [0, -0.25, -0.25, 0, -0.25, 0]
    assert (sample.group, sample.reward, sample.temperature) == (7, 1.5, 0.7)
    assert [a.dtype.str for a in (sample.token_ids, sample.loss_mask, sample.rollout_logprobs, sample.versions,
        sample.advantages)] == [
        "<i4", "|u1", "<f4", "<i4", "<f4",
    ]  # fmt: skip
    # The last trained token, at 4, is predicted from the four before it; what follows is not read.
    assert (sample.num_tokens, sample.num_inputs, sample.positions.tolist()) == (3, 4, [1, 2, 4])


def test_a_token_sampled_from_nothing_is_not_trained():
    (sample,) = from_group(group(mask=[1, 1, 0], versions=[2, 2]), [np.ones(3)])
    assert sample.loss_mask.tolist() == [0, 1, 0]
    assert sample.versions.tolist() == [-1, 2, -1]
    assert sample.advantages.tolist() == [0, 1, 0]


def test_a_trajectory_without_sampled_tokens_trains_nothing():
    (sample,) = from_group(group(mask=[0, 0], versions=[]), [np.zeros(2)])
    assert (sample.num_tokens, sample.num_inputs) == (0, 0)


def test_one_advantage_array_per_trajectory():
    with pytest.raises(ValueError, match="zip"):
        from_group(group(mask=[0, 1], versions=[0, 1]), [])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"advantages": np.zeros(2, np.float32)}, r"advantages has shape \(2,\), expected \(3,\)"),
        ({"loss_mask": np.array([1, 0, 0], np.uint8)}, "position 0"),
        ({"temperature": 0.0}, "temperature 0.0"),
    ],
)
def test_impossible_samples_are_refused(change, problem):
    good = {
        "token_ids": np.zeros(3, np.int32),
        "loss_mask": np.array([0, 1, 1], np.uint8),
        "rollout_logprobs": np.zeros(3, np.float32),
        "versions": np.array([-1, 0, 0], np.int32),
        "advantages": np.zeros(3, np.float32),
        "group": 1,
        "reward": 0.0,
    }
    with pytest.raises(ValueError, match=problem):
        TrainSample(**(good | change))
