"""The parameters of a run as a closed queueing network. No I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

Stage = Literal["learner", "generation", "environment", "reward", "tail", "staleness", "filtering"]
STAGES: Final[tuple[Stage, ...]] = (
    "learner",
    "generation",
    "environment",
    "reward",
    "tail",
    "staleness",
    "filtering",
)

NORMAL: Final = NormalDist()
# A thousand points give the mean of a lognormal distribution to a percent.
SCORES: Final = np.array([NORMAL.inv_cdf((index + 0.5) / 1000) for index in range(1000)])


@dataclass(frozen=True)
class Lengths:
    """The distribution of the tokens of an episode, by points of its quantile function.

    Between two points, and beyond the last ones, the logarithm of the length is linear in the
    standard normal score of the quantile: two points are a lognormal distribution, one is a
    constant.

    Attributes:
        points: pairs of (score, tokens), by score.
        longest: no episode has more.
    """

    points: tuple[tuple[float, float], ...]
    longest: float = math.inf

    def at(self, scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the lengths at these standard normal scores."""
        x = np.array([score for score, _ in self.points])
        y = np.log([max(0.5, tokens) for _, tokens in self.points])
        log_lengths = np.interp(scores, x, y)
        if len(x) > 1:
            log_lengths += np.minimum(scores - x[0], 0) * (y[1] - y[0]) / (x[1] - x[0])
            log_lengths += np.maximum(scores - x[-1], 0) * (y[-1] - y[-2]) / (x[-1] - x[-2])
        lengths: npt.NDArray[np.float64] = np.minimum(np.exp(log_lengths), max(0.5, self.longest))
        return lengths

    @property
    def mean(self) -> float:
        """Mean of the tokens of an episode."""
        return float(self.at(SCORES).mean())

    def scaled(self, mean: float) -> Lengths:
        """Return the same distribution with another mean."""
        factor = mean / self.mean
        return Lengths(
            tuple((score, tokens * factor) for score, tokens in self.points), self.longest * factor
        )


@dataclass(frozen=True)
class RunModel:
    """A run: tickets, episodes of turns, servers, environments, rewards and the learner.

    ``r`` requests that run at once on one server each get a token every ``token_s + token_each_s *
    r`` seconds; scores and environment steps slow each other down in the same way. Times are
    seconds.
    """

    groups_per_step: int
    group_size: int  # episodes that start for a group
    max_staleness: int
    tokens: Lengths  # of an episode
    servers: float  # of the actor
    slots: int  # requests that one server runs at once
    token_s: float
    token_each_s: float = 0.0
    redundancy: int = 0  # episodes of a group that are aborted once the others have finished
    alike: float = 0.0  # correlation of the lengths of one group
    turns: float = 1.0
    drops_late: bool = False  # on_late: drop; else a step waits for the groups that are due
    kept: float = 1.0  # share of the groups that are trained on; tickets replace the others
    hubs: float = 1.0
    envs: int = 64  # episodes that one hub plays at once
    env_s: float = 0.0  # in the environment, of one episode alone
    env_each_s: float = 0.0  # more for each further call at the same time on one hub
    # standard deviation of the logarithm of an episode's time in the environment
    env_spread: float = 0.0
    reward_hubs: float = 1.0
    workers: int = 1  # scores that one reward hub computes at once
    score_s: float = 0.0  # of one sample, 0: no reward hub is involved
    score_each_s: float = 0.0
    scores_early: bool = False  # whether an episode is scored when it ends, not when its group does
    group_s: float = 0.0  # the learner's work on a group when it arrives
    step_s: float = 0.0  # its work once a step has all its groups, weights included
    rest_s: float = 0.0  # what it does between two steps while new tickets are out already
    # of an episode: for its requests on their way, and for servers to load its version
    delay_s: float = 0.0

    def relieved(self, stage: Stage) -> RunModel:
        """Return the run with one stage twice as fast or as large, or without spread or filter."""
        match stage:
            case "learner":
                return replace(
                    self, group_s=self.group_s / 2, step_s=self.step_s / 2, rest_s=self.rest_s / 2
                )
            case "generation":
                return replace(self, servers=2 * self.servers)
            case "environment":
                return replace(
                    self, envs=2 * self.envs, env_s=self.env_s / 2, env_each_s=self.env_each_s / 2
                )
            case "reward":
                return replace(self, reward_hubs=2 * self.reward_hubs)
            case "tail":
                return replace(
                    self, tokens=Lengths(((0.0, self.tokens.mean),)), env_spread=0.0, alike=0.0
                )
            case "staleness":
                return replace(self, max_staleness=2 * self.max_staleness + 1)
            case "filtering":
                return replace(self, kept=1.0)

    @property
    def samples_per_step(self) -> int:
        """Episodes that a step trains on."""
        return self.groups_per_step * (self.group_size - self.redundancy)
