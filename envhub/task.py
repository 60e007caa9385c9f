"""The task of an episode, its result, and its failure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from broker.contract import wire
from broker.errors import RlearnerError
from envhub.domain import Domain
from envhub.envs.base import Split
from envhub.scheduling.slots import FailureKind
from rlearner_text.template_rules import Examples


class EpisodeFailed(RlearnerError):
    """The episode failed through no fault of the policy, and is never scored.

    ``trace`` is a traceback for the log.
    """

    def __init__(self, kind: FailureKind, detail: str, trace: str = "") -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.trace = trace


@dataclass(frozen=True)
class EpisodeTask:
    """What an episode plays and how it samples.

    Attributes:
        id: name of the conversation at the servers; unique among running episodes.
        seed: of the environment; the episodes of a group share it.
        ticket: number of the ticket, 0 for evaluations and trials.
        step: training step that the group is expected in, -1 unknown.
        episode: number in the group, from 0.
        draw: mixed into the seeds of sampling, 0: not; a task that comes back samples others.
        seat: whose part of the episode it is, empty for all of it.
        seat_number: of the seat from 1, mixed into the seeds of sampling, 0: not.
        record: whether to keep text frames for a replay.
    """

    id: str
    domain: Domain
    task_index: int
    split: Split
    seed: int
    episode: int
    policy: str = wire.ACTOR
    min_version: int = 0
    temperature: float | None = None  # None: the domain's own
    greedy: bool = False  # a baseline at temperature 0
    record: bool = False
    ticket: int = 0
    step: int = -1
    draw: int = 0
    seat: str = ""
    seat_number: int = 0

    @property
    def sampling_seeds(self) -> tuple[int, ...]:
        """Numbers that the seeds of its turns are made of."""
        seeds = [self.seed, self.episode]
        if self.draw:
            seeds.append(self.draw)
        if self.seat_number:
            seeds.append(self.seat_number)
        return tuple(seeds)

    @property
    def conversation(self) -> str:
        """Name of the conversation at the servers: seats have one each."""
        return f"{self.id}.{self.seat}" if self.seat else self.id


@dataclass(frozen=True)
class PromptText:
    """What a trajectory began with: the first message of the user, and what stood before it."""

    opening: tuple[str, str, Examples]  # system prompt, tools as JSON, examples
    text: str


@dataclass
class EpisodeResult:
    """A finished episode: one trajectory or one per turn; the last has metrics and response.

    ``row`` is empty unless the domain's rewards may read it, ``prompts``, of each trajectory, for
    agents, which write their own. With ``num_seats`` above 1, the trajectories are of as many
    episodes of the record, one for each seat.
    """

    trajectories: list[wire.Trajectory]
    prompt: str
    reference: str
    generate_s: float
    env_step_s: float
    frames: list[str]
    row: dict[str, Any] = field(default_factory=dict)
    prompts: list[PromptText] = field(default_factory=list)
    num_seats: int = 1

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all turns."""
        return sum(
            turn.end - turn.start for trajectory in self.trajectories for turn in trajectory.turns
        )

    @property
    def trajectory(self) -> wire.Trajectory:
        """The last trajectory, which says how the episode ended."""
        return self.trajectories[-1]
