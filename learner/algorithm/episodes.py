"""The episodes of a group: one trajectory each, whether or not an episode is cut into several."""

from __future__ import annotations

import msgspec

from broker.contract import wire


def final_trajectories(group: wire.Group) -> list[wire.Trajectory]:
    """Return the last trajectory of each episode, in order, without greedy baselines."""
    last = {
        trajectory.episode: trajectory for trajectory in group.trajectories if not trajectory.greedy
    }
    return [last[number] for number in sorted(last)]


def episode_rewards(group: wire.Group) -> tuple[float, ...]:
    """Return each episode's total reward."""
    return tuple(trajectory.reward for trajectory in final_trajectories(group))


def num_bytes(group: wire.Group) -> int:
    """Return the bytes of a group's columns of tokens."""
    return sum(
        len(column.data)
        for trajectory in group.trajectories
        for column in _columns_of(trajectory)
        if column is not None
    )


def _columns_of(trajectory: wire.Trajectory) -> tuple[wire.Column | None, ...]:
    columns = (trajectory.token_ids, trajectory.loss_mask, trajectory.logprobs)
    teacher = trajectory.teacher
    if teacher is None:
        return columns
    return (*columns, teacher.logprobs, teacher.top_ids, teacher.top_logprobs)


def without_episodes(group: wire.Group) -> wire.Group:
    """Return the head of a group, which needs no memory."""
    return msgspec.structs.replace(
        group, trajectories=[], prompt="", reference="", frames=[], scores=[]
    )
