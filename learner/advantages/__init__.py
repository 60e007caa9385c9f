"""Advantage estimators by name; a new one is one file plus one line here. Resolved by ``broker.registry.resolve``."""

from __future__ import annotations

from typing import Final

ADVANTAGES: Final[dict[str, str]] = {
    "grpo": "learner.advantages.grpo:estimate",
    "rloo": "learner.advantages.rloo:estimate",
    "reinforce": "learner.advantages.reinforce:estimate",
}
