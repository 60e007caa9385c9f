"""Policy losses by name; a new one is one file plus one line here. Resolved by ``broker.registry.resolve``."""

from __future__ import annotations

from typing import Final

LOSSES: Final[dict[str, str]] = {
    "ppo": "learner.losses.ppo:ppo",
    "gspo": "learner.losses.gspo:gspo",
    "cispo": "learner.losses.cispo:cispo",
    "topr": "learner.losses.topr:topr",
    "raft++": "learner.losses.raft:raft_plus_plus",
    "reinforce": "learner.losses.reinforce:reinforce",
    "starpo": "learner.losses.starpo:starpo",
    "starpo_s": "learner.losses.starpo:starpo_s",
    "sft": "learner.losses.sft:sft",
}
