"""Plays and discards a trial episode of a failing domain, so that no ticket is spent on it."""

from __future__ import annotations

import random
from typing import Final

from envhub.domain import Domain
from envhub.episodes.runners import EpisodeRunners
from envhub.task import EpisodeFailed, EpisodeTask

# task numbers of a domain with endless tasks
NO_LIMIT: Final = 1 << 20


async def trial(
    runners: EpisodeRunners, domain: Domain, name: str, number: int
) -> tuple[bool | None, str]:
    """Play an episode of a random training task. Return whether it went well, and what failed.

    Args:
        name: of its conversation; unique at the servers.
        number: seed of the environment.

    Returns:
        None if the servers failed, which says nothing about the domain.
    """
    index = random.randrange(domain.num_tasks("train") or NO_LIMIT)
    try:
        await runners.play(
            EpisodeTask(name, domain, index, "train", seed=number, episode=0), lambda _: None
        )
    except EpisodeFailed as error:
        return (None if error.kind == "generate" else False), error.detail
    return True, ""
