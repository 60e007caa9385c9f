"""Registry of policy losses; a new one is one file plus one line here."""

from __future__ import annotations

from typing import Final

LOSSES: Final[dict[str, str]] = {
    "ppo": "learner.algorithm.losses.ppo:ppo",
    "gspo": "learner.algorithm.losses.gspo:gspo",
    "cispo": "learner.algorithm.losses.cispo:cispo",
    "topr": "learner.algorithm.losses.topr:topr",
    "raft++": "learner.algorithm.losses.raft:raft_plus_plus",
    "reinforce": "learner.algorithm.losses.reinforce:reinforce",
    "starpo": "learner.algorithm.losses.starpo:starpo",
    "starpo_s": "learner.algorithm.losses.starpo:starpo_s",
    "sapo": "learner.algorithm.losses.sapo:sapo",
    "gmpo": "learner.algorithm.losses.gmpo:gmpo",
    "dppo_tv": "learner.algorithm.losses.dppo:dppo_tv",
    "dppo_kl": "learner.algorithm.losses.dppo:dppo_kl",
    "clip_cov": "learner.algorithm.losses.covariance:clip_cov",
    "kl_cov": "learner.algorithm.losses.covariance:kl_cov",
    "sft": "learner.algorithm.losses.sft:sft",
}
