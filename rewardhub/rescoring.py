"""Scores groups that a run has consumed again, with other rewards; stores nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from broker.contract import wire
from broker.settings.config import DomainSection, RewardConfig
from broker.settings.run_settings import RunSettings
from rewardhub.config import ENV, all_pools
from rewardhub.score_dispatcher import ScoreDispatcher
from rewardhub.scoring_job import rescore_group

NAME = "rescore"


def open_dispatcher(settings: RunSettings, num_workers: int) -> ScoreDispatcher:
    """Return the processes that score for all domains of a run, as those of a hub."""
    rewards: dict[str, RewardConfig] = {
        f"domains.{name}.rewards.{index}": reward
        for name, domain in settings.domains.items()
        for index, reward in enumerate(domain.rewards)
    }
    section = settings.rewardhub
    return ScoreDispatcher(
        rewards,
        num_workers=num_workers,
        timeout_s=section.timeout_s,
        memory_mib=section.worker_memory_mib,
        gpu_numbers=(),
        passed=section.pass_env,
    )


def remove_scores(group: wire.Group, section: DomainSection, row: Mapping[str, Any]) -> wire.Group:
    """Return a scored group as its environment left it, for the pools of these rewards.

    What rewards gave to single turns cannot be told from what the environment gave, and stays.

    Args:
        row: the task's row in its data set.
    """
    trajectories = []
    for trajectory in group.trajectories:
        parts = {ENV: trajectory.reward_parts[ENV]} if ENV in trajectory.reward_parts else {}
        bare = msgspec.structs.replace(
            trajectory,
            reward=sum(parts.values()),
            reward_parts=parts,
            success=trajectory.success and ENV in parts,
        )
        trajectories.append(bare)
    return msgspec.structs.replace(
        group,
        trajectories=trajectories,
        pools=all_pools({group.domain: section}),
        scores=[],
        row=dict(row),
        reward_hubs=[],
    )


async def score_again(
    group: wire.Group,
    section: DomainSection,
    scorers: ScoreDispatcher,
    row: Mapping[str, Any] | None = None,
) -> wire.Group | wire.Closed:
    """Return the group with the scores of these rewards, or why it has none.

    Args:
        section: of the group's domain, with the rewards.
        row: the task's row, for rewards that read it.
    """
    message: wire.Message | None = remove_scores(group, section, row or {})
    while isinstance(message, wire.Group) and message.pools:
        message = await rescore_group(message, {group.domain: section}, scorers, NAME)
    assert isinstance(message, wire.Group | wire.Closed), "a group with pools is scored or closed"
    return message
