"""Offline training on the learner's backends: registries of pipelines and preference losses."""

from __future__ import annotations

from typing import Final

PIPELINES: Final[dict[str, str]] = {
    "sft": "learner.offline.supervised:SupervisedPipeline",
    "dpo": "learner.offline.preference:PreferencePipeline",
    "distill": "learner.offline.distillation:DistillationPipeline",
    "rm": "learner.offline.reward_model:RewardModelPipeline",
}
PREFERENCES: Final[dict[str, str]] = {
    "dpo": "learner.algorithm.losses.dpo:dpo",
    "ipo": "learner.algorithm.losses.ipo:ipo",
    "outcome": "learner.algorithm.losses.outcome:outcome",
}
