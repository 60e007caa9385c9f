"""The episodes of a group: one trajectory each, whether or not an episode is cut into several."""

from __future__ import annotations

from typing import Final

import msgspec

from broker.contract import wire

NO_IDS: Final = wire.Column("<i4", b"")
NO_LOGPROBS: Final = wire.Column("<f4", b"")
NO_MASK: Final = wire.Column("|u1", b"")


def episodes(group: wire.Group) -> list[wire.Trajectory]:
    """Return the last trajectory of each episode, in order of the episodes, without greedy baselines."""
    last = {trajectory.episode: trajectory for trajectory in group.trajectories if not trajectory.greedy}
    return [last[number] for number in sorted(last)]


def episode_rewards(group: wire.Group) -> tuple[float, ...]:
    """Return each episode's total reward."""
    return tuple(trajectory.reward for trajectory in episodes(group))


def num_bytes(group: wire.Group) -> int:
    """Return the bytes of a group's columns of tokens."""
    columns = ((one.token_ids, one.loss_mask, one.logprobs) for one in group.trajectories)
    return sum(len(column.data) for own in columns for column in own)


def num_sampled(trajectory: wire.Trajectory) -> int:
    """Return the number of sampled tokens, which its version runs count, too."""
    return int(trajectory.version_runs.array()[1::2].sum())


def without_tokens(group: wire.Group) -> wire.Group:
    """Return what the metrics of a step read of a group, without tokens and texts."""
    trajectories = [
        msgspec.structs.replace(
            trajectory, token_ids=NO_IDS, loss_mask=NO_MASK, logprobs=NO_LOGPROBS, turns=_turns(trajectory), response=""
        )
        for trajectory in group.trajectories
    ]
    return msgspec.structs.replace(group, trajectories=trajectories, prompt="", reference="", frames=[], scores=[])


def _turns(trajectory: wire.Trajectory) -> list[wire.Turn]:
    return [msgspec.structs.replace(turn, anchor="") if turn.anchor else turn for turn in trajectory.turns]
