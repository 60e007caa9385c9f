"""Policy losses by name; a new one is one file plus one line here. Resolved by ``broker.registry.resolve``."""

from __future__ import annotations

from typing import Final

LOSSES: Final[dict[str, str]] = {
    "ppo": "learner.losses.ppo:ppo",
    "reinforce": "learner.losses.reinforce:reinforce",
    "sft": "learner.losses.sft:sft",
}
