"""Advantage estimators by name; a new one is one file plus one line here. Resolved by ``broker.registry.resolve``."""

from __future__ import annotations

from typing import Final

ADVANTAGES: Final[dict[str, str]] = {
    "gae": "learner.advantages.gae:estimate",
    "grpo": "learner.advantages.grpo:estimate",
    "dr_grpo": "learner.advantages.dr_grpo:estimate",
    "rloo": "learner.advantages.rloo:estimate",
    "remax": "learner.advantages.remax:estimate",
    "reinforce": "learner.advantages.reinforce:estimate",
    "reinforce++": "learner.advantages.reinforce_plus_plus:estimate",
    "reinforce++_baseline": "learner.advantages.reinforce_plus_plus:estimate_baseline",
    "gigpo": "learner.advantages.gigpo:estimate",
}
