"""Decides what to do with a group: what to score and retry, where to send it. No I/O.

Events go in (``start``, ``scored``, ``failed``), actions come out. A group ends in exactly one
Forward or Close.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from broker.contract import wire
from broker.contract.streams import EPISODES, MAX_DELIVERIES, Stream
from broker.jetstream.ticket_results import result_log
from broker.settings.config import DomainSection, RewardConfig
from rewardhub.config import ENV, reward_labels
from rewardhub.rewards.base import Scored, Value, total_value
from rewardhub.turn_scores import add_turn_scores, with_rewards


@dataclass(frozen=True)
class ScoreAction:
    """Action: score one trajectory with one reward of its domain; ``attempt`` counts from 0."""

    trajectory: int
    reward: int
    attempt: int = 0


@dataclass(frozen=True)
class ForwardAction:
    """Action: publish the group to its next pool, or to its final log."""

    group: wire.Group
    stream: Stream
    key: str


@dataclass(frozen=True)
class CloseAction:
    """Action: close the ticket without a group, and keep the bytes for the operator.

    Attributes:
        own: whether the group itself is at fault; else this host may be, and another hub may
            succeed.
    """

    reason: wire.ClosedReason
    detail: str
    own: bool = True


Action = ScoreAction | ForwardAction | CloseAction


def find_refusal(
    group: wire.Group, pool: str, domains: Mapping[str, DomainSection], num_delivered: int
) -> CloseAction | None:
    """Return why a group from the queue of ``pool`` cannot be scored, or None."""
    if num_delivered >= MAX_DELIVERIES:
        detail = f"the group came to reward hubs of pool {pool} for the {num_delivered}th time"
        return CloseAction("too_many_deliveries", detail)
    if group.domain not in domains:
        detail = (
            f"domain {group.domain!r} is not a domain of the run: {', '.join(domains) or 'none'}"
        )
        return CloseAction("malformed", detail)
    if not group.pools or group.pools[0] != pool:
        return CloseAction(
            "malformed", f"in the queue of pool {pool}, but its pools are {group.pools}"
        )
    return None


def rewards_digest(rewards: Sequence[RewardConfig]) -> str:
    """Return the digest of a domain's rewards and their arguments."""
    plain = json.dumps([reward.model_dump(mode="json") for reward in rewards], sort_keys=True)
    return blake2b(plain.encode(), digest_size=8).hexdigest()


def add_scores(
    reward: float,
    parts: Mapping[str, float],
    scores: Mapping[int, Scored],
    rewards: Sequence[RewardConfig],
) -> tuple[float, dict[str, float], bool | None]:
    """Return an episode's reward, its parts and its success with these scores; None: they do not
    decide about success.

    Args:
        scores: by index in ``rewards``, all rewards of the domain.
    """
    names = reward_labels(rewards)
    total = reward
    success = None
    parts_and_notes = dict(parts)
    for r, scored in scores.items():
        value = scored.value
        notes = scored.notes
        amount = total_value(value)
        total += rewards[r].weight * amount
        if isinstance(value, dict):
            parts_and_notes |= {f"{names[r]}/{part}": number for part, number in value.items()}
        else:
            parts_and_notes[names[r]] = amount
        # not part of the total
        parts_and_notes |= {f"{names[r]}/{note}": number for note, number in notes.items()}
        # If the environment gives no reward, the domain's first reward decides about success.
        if r == 0 and ENV not in parts:
            success = amount >= 1
    return total, parts_and_notes, success


class GroupScoring:
    """State machine of one group in one pool.

    Args:
        group: the group as received; its first pool scores it now.
        rewards: all rewards of its domain, in order.
        max_retries: retries of one score.
    """

    def __init__(
        self, group: wire.Group, rewards: Sequence[RewardConfig], max_retries: int
    ) -> None:
        self.group = group
        self._rewards = list(rewards)
        self._max_retries = max_retries
        pool = group.pools[0]
        self._mine = [index for index, reward in enumerate(self._rewards) if reward.pool == pool]
        self._values: dict[tuple[int, int], Scored] = {}
        # Step-independent samples share their episode's number; the last one has its end and is
        # scored for all.
        self._last = {
            trajectory.episode: index for index, trajectory in enumerate(group.trajectories)
        }
        self._brought = self._scored_before()
        self._values |= self._brought
        self.num_retries = self.num_asked = 0
        # The one that failed, if any.
        self.failed_episode = group.trajectories[0].episode
        self.ended = False

    @property
    def cost(self) -> float:
        """The cost of the scores so far, from their notes."""
        return sum(value.notes.get("cost", 0.0) for value in self._values.values())

    def start(self) -> list[Action]:
        """Return all scores to compute, or the group itself if there are none."""
        needed = [(t, r) for t in sorted(self._last.values()) for r in self._mine]
        asks: list[Action] = [ScoreAction(t, r) for t, r in needed if (t, r) not in self._values]
        self.num_asked = len(asks)
        return asks or self._forward()

    def scored(self, ask: ScoreAction, value: Scored | Value) -> list[Action]:
        """Apply one score."""
        if self.ended:
            return []
        self._values[ask.trajectory, ask.reward] = (
            value if isinstance(value, Scored) else Scored(value)
        )
        complete = len(self._values) == len(self._last) * len(self._mine)
        return self._forward() if complete else []

    def failed(self, ask: ScoreAction, detail: str, *, retry: bool) -> list[Action]:
        """Apply a failure: retry, or give the group up; it never becomes a reward of zero."""
        if self.ended:
            return []
        if retry and ask.attempt < self._max_retries:
            self.num_retries += 1
            return [ScoreAction(ask.trajectory, ask.reward, ask.attempt + 1)]
        self.ended = True
        self.failed_episode = self.group.trajectories[ask.trajectory].episode
        tries = f" (after {ask.attempt + 1} tries)" if ask.attempt else ""
        works_here = any(
            reward == ask.reward for _, reward in self._values.keys() - self._brought.keys()
        )
        reason = f"episode {self.failed_episode}: {detail}{tries}"
        return [CloseAction("reward_error", reason, own=works_here or not retry)]

    def _forward(self) -> list[Action]:
        self.ended = True
        pools = self.group.pools[1:]
        num_turns: Counter[int] = Counter()  # by episode, of earlier trajectories
        trajectories = []
        for trajectory in self.group.trajectories:
            scored = self._add(trajectory, num_turns[trajectory.episode])
            num_turns[trajectory.episode] += len(trajectory.turns)
            trajectories.append(scored)
        group = msgspec.structs.replace(self.group, trajectories=trajectories, pools=pools)
        if not pools:
            unread = [msgspec.structs.replace(scored, messages=[]) for scored in trajectories]
            group = msgspec.structs.replace(group, trajectories=unread, scores=[], row={})
        stream, key = (
            (EPISODES, group.pools[0])
            if group.pools
            else (result_log(evaluation=group.eval_step >= 0), "")
        )
        return [ForwardAction(group, stream, key)]

    def _add(self, trajectory: wire.Trajectory, first_turn: int) -> wire.Trajectory:
        scores = {r: self._values[self._last[trajectory.episode], r] for r in self._mine}
        total, parts, success = add_scores(
            trajectory.reward, trajectory.reward_parts, scores, self._rewards
        )
        success = trajectory.success if success is None else success
        turns = with_rewards(
            trajectory.turns,
            add_turn_scores(
                [turn.reward for turn in trajectory.turns], scores, self._rewards, first_turn
            ),
        )
        return msgspec.structs.replace(
            trajectory, reward=total, reward_parts=parts, success=success, turns=turns
        )

    def _scored_before(self) -> dict[tuple[int, int], Scored]:
        """Return this pool's scores that the group brings along, unless of other rewards."""
        labels = {
            label: r for r, label in enumerate(reward_labels(self._rewards)) if r in self._mine
        }
        digest = rewards_digest(self._rewards) if self.group.scores else ""
        turns: Counter[int] = Counter()
        for trajectory in self.group.trajectories:
            turns[trajectory.episode] += len(trajectory.turns)
        return {
            (self._last[scores.episode], labels[score.reward]): Scored(score.value, score.notes)
            for scores in self.group.scores
            if scores.rewards == digest and scores.episode in self._last
            for score in scores.scores
            if score.reward in labels
            and (not isinstance(score.value, list) or len(score.value) == turns[scores.episode])
        }
