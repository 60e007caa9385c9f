"""Advantage estimators by name; a new one is one file plus one line here. Resolved by ``broker.settings.registry.resolve``."""

from __future__ import annotations

from typing import Final

ADVANTAGES: Final[dict[str, str]] = {
    "gae": "learner.algorithm.advantages.gae:estimate",
    "grpo": "learner.algorithm.advantages.grpo:estimate",
    "dr_grpo": "learner.algorithm.advantages.dr_grpo:estimate",
    "rloo": "learner.algorithm.advantages.rloo:estimate",
    "remax": "learner.algorithm.advantages.remax:estimate",
    "reinforce": "learner.algorithm.advantages.reinforce:estimate",
    "reinforce++": "learner.algorithm.advantages.reinforce_plus_plus:estimate",
    "reinforce++_baseline": "learner.algorithm.advantages.reinforce_plus_plus:estimate_baseline",
    "gigpo": "learner.algorithm.advantages.gigpo:estimate",
}

# What settings are checked by, without importing anything.
WHOLE_BATCH: Final = frozenset({"gae", "reinforce++", "reinforce++_baseline"})  # take all groups of a step at once
NEEDS_GROUPS: Final = frozenset({"grpo", "dr_grpo", "rloo", "reinforce++_baseline", "gigpo"})  # compare episodes of one group
COUNT_EPISODES: Final = frozenset({"grpo", "dr_grpo", "rloo", "gigpo"})  # an episode counts once, however many samples it was cut into
