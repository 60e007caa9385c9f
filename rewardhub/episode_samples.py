"""Makes samples for rewards of what messages say about an episode."""

from __future__ import annotations

from collections.abc import Sequence

from broker.contract import wire
from rewardhub.rewards.base import Sample, SampleTurn


def sample_of(group: wire.Group, trajectory: wire.Trajectory, max_turns: int = 1) -> Sample:
    """Return the sample of the episode that this trajectory ends.

    Args:
        max_turns: of the domain.
    """
    parts = [part for part in group.trajectories if part.episode == trajectory.episode]
    turns = [turn for part in parts for turn in part.turns]
    messages = [message for part in parts for message in part.messages]
    return Sample(
        domain=group.domain,
        task_index=group.task_index,
        prompt=group.prompt,
        response=trajectory.response,
        reference=group.reference,
        reward=trajectory.reward,
        reward_parts=trajectory.reward_parts,
        success=trajectory.success,
        end=trajectory.end,
        num_turns=len(turns),
        max_turns=max_turns,
        num_tokens=sum(turn.end - turn.start for turn in turns),
        metrics=trajectory.metrics,
        row=group.row,
        messages=[message.plain() for message in messages],
        turns=_sample_turns(turns, messages),
    )


def sample_of_request(request: wire.EpisodeScoreRequest, max_turns: int = 1) -> Sample:
    """Return the sample that the episode's group will hold."""
    names = set(Sample.__struct_fields__) - {"messages", "turns", "max_turns"}
    return Sample(
        **{name: getattr(request, name) for name in names},
        max_turns=max_turns,
        messages=[message.plain() for message in request.messages],
        turns=_sample_turns(request.turns, request.messages),
    )


def _sample_turns(
    turns: Sequence[wire.Turn], messages: Sequence[wire.EpisodeMessage]
) -> list[SampleTurn]:
    places = {message.turn: index for index, message in enumerate(messages)}
    return [
        SampleTurn(
            message=places.get(number, -1),
            reward=turn.reward,
            valid=turn.valid,
            num_tokens=turn.end - turn.start,
        )
        for number, turn in enumerate(turns)
    ]
