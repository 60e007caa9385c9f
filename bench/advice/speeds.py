"""The speeds of a simulated fleet, and the twelve fleets."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any, Final


@dataclass(frozen=True)
class FleetSpeeds:
    """How fast each part of a fleet is; times in seconds.

    Attributes:
        median, spread, most: tokens of a turn: lognormal with this median and standard deviation of
            the logarithm.
        token_s, token_each_s: r requests at once on one server get a token each every token_s + r *
            token_each_s.
        env_s, env_spread: one step of an environment: lognormal with this mean and standard
            deviation of the logarithm.
        score_s: one score, 0: no reward hub.
        sample_s, step_s: training on one sample, and the rest of an optimizer step.
        equal_rewards: share of the groups whose rewards are equal, which are replaced.
    """

    groups_per_step: int = 8
    group_size: int = 4
    redundancy: int = 0
    max_staleness: int = 1
    median: float = 40.0
    spread: float = 0.4
    most: int = 400
    alike: float = 0.0
    turns: int = 1
    servers: int = 2
    slots: int = 32
    token_s: float = 0.005
    token_each_s: float = 0.0
    hubs: int = 1
    envs: int = 256
    env_s: float = 0.0
    env_spread: float = 0.0
    reward_hubs: int = 1
    workers: int = 2
    score_s: float = 0.0
    sample_s: float = 0.002
    step_s: float = 0.1
    equal_rewards: float = 0.0

    def tokens(self, seed: int, group_seed: int = 0) -> int:
        """Return the tokens of a turn, the same for the same seed."""
        z = random.Random(seed).gauss(0, 1)
        if self.alike:
            z = (
                math.sqrt(self.alike) * random.Random(group_seed).gauss(0, 1)
                + math.sqrt(1 - self.alike) * z
            )
        return max(1, min(self.most, round(self.median * math.exp(self.spread * z))))

    def env_step(self, seed: int) -> float:
        """Return the seconds of one step of an environment."""
        z = random.Random(seed).gauss(0, 1)
        return self.env_s * math.exp(self.env_spread * z - self.env_spread**2 / 2)

    def has_equal_rewards(self, seed: int) -> bool:
        """Return whether the group of this seed is filtered."""
        return random.Random(seed + 1).random() < self.equal_rewards

    def relieved(self, stage: str) -> FleetSpeeds:
        """Return the fleet with one stage twice as fast, as large or as patient, or with all
        episodes alike.
        """
        match stage:
            case "learner":
                return replace(self, sample_s=self.sample_s / 2, step_s=self.step_s / 2)
            case "generation":
                return replace(self, servers=2 * self.servers)
            case "environment":
                return replace(self, env_s=self.env_s / 2, envs=2 * self.envs)
            case "reward":
                return replace(self, reward_hubs=2 * self.reward_hubs)
            case "tail":
                mean = sum(self.tokens(seed) for seed in range(4000)) / 4000
                return replace(self, median=mean, spread=0.0, env_spread=0.0)
            case "filtering":
                return replace(self, equal_rewards=0.0)
        return replace(self, max_staleness=2 * self.max_staleness + 1)


@dataclass(frozen=True)
class Case:
    """One fleet.

    Attributes:
        change: by the keys of ``rlearner advise --simulate``.
        is_real: whether it is also run as real processes.
    """

    name: str
    speeds: FleetSpeeds
    change: dict[str, float]
    is_real: bool = False

    @property
    def changed(self) -> FleetSpeeds:
        """The fleet after the change."""
        speeds = self.speeds
        for key, value in self.change.items():
            if key == "learner":
                speeds = replace(
                    speeds, sample_s=speeds.sample_s / value, step_s=speeds.step_s / value
                )
            else:
                name = {"group_size_redundancy": "redundancy"}.get(key, key)
                fields: dict[str, Any] = {name: int(value)}
                speeds = replace(speeds, **fields)
        return speeds


BASE: Final = FleetSpeeds()
CASES: Final = (
    Case("learner, heavy steps", replace(BASE, step_s=1.0), {"learner": 2}, is_real=True),
    Case(
        "learner, heavy samples",
        replace(BASE, sample_s=0.03, token_s=0.003),
        {"learner": 3, "servers": 4},
    ),
    Case(
        "servers that share their speed",
        replace(BASE, servers=1, token_s=0.002, token_each_s=0.001, slots=64),
        {"servers": 3},
        is_real=True,
    ),
    Case(
        "servers with few slots",
        replace(BASE, servers=2, slots=4, token_s=0.006),
        {"servers": 4, "learner": 2},
    ),
    Case(
        "slow environments",
        replace(BASE, turns=4, median=6, env_s=0.15, env_spread=0.3),
        {"max_staleness": 2},
    ),
    Case(
        "few environments",
        replace(BASE, turns=3, median=8, envs=16, env_s=0.1, env_spread=0.5, group_size=4),
        {"hubs": 3},
        is_real=True,
    ),
    Case("slow rewards", replace(BASE, score_s=0.08, workers=2), {"reward_hubs": 3}, is_real=True),
    Case(
        "one judge",
        replace(BASE, score_s=0.03, workers=1, token_s=0.004),
        {"reward_hubs": 2, "max_staleness": 3},
    ),
    Case(
        "long tail",
        replace(BASE, max_staleness=0, median=20, spread=1.0, most=600),
        {"max_staleness": 1},
    ),
    Case(
        "long tail of groups",
        replace(BASE, max_staleness=0, median=20, spread=1.1, most=600, group_size=8, step_s=0.05),
        {"group_size_redundancy": 2},
    ),
    Case(
        "strictly on-policy",
        replace(BASE, max_staleness=0, step_s=0.25, spread=0.1),
        {"max_staleness": 1},
    ),
    Case(
        "little credit",
        replace(BASE, turns=2, spread=0.2, env_s=0.1, step_s=0.1),
        {"max_staleness": 3},
    ),
)
