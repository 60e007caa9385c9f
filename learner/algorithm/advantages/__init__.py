"""Registry of advantage estimators; a new one is one file plus one line here."""

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
    "gdpo": "learner.algorithm.advantages.gdpo:estimate",
    "gpg": "learner.algorithm.advantages.gpg:estimate",
    "grpo_passk": "learner.algorithm.advantages.grpo_passk:estimate",
    "maxrl": "learner.algorithm.advantages.maxrl:estimate",
    "opo": "learner.algorithm.advantages.opo:estimate",
    "optimal_token_baseline": "learner.algorithm.advantages.optimal_token_baseline:estimate",
}
