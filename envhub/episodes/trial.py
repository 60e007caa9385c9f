"""A trial episode of a domain whose tickets fail here: played like any other and thrown away, so it costs no ticket a
delivery.
"""

from __future__ import annotations

import random
from typing import Final

from envhub.domain import Domain
from envhub.episodes.runners import EpisodeRunners
from envhub.task import EpisodeFailed, EpisodeTask

NO_LIMIT: Final = 1 << 20  # task numbers of a domain whose tasks never run out


async def trial(players: EpisodeRunners, domain: Domain, name: str, number: int) -> tuple[bool | None, str]:
    """Play an episode of a random training task. Return whether it went well, and what failed.

    Args:
        players: of the hub.
        domain: to try.
        name: tells its conversations from all others that the servers see.
        number: seed of the environment.

    Returns:
        None where the servers failed: that says nothing about the domain.
    """
    index = random.randrange(domain.num_tasks("train") or NO_LIMIT)
    try:
        await players.play(
            EpisodeTask(id=name, domain=domain, task_index=index, split="train", seed=number, episode=0), lambda _: None
        )
    except EpisodeFailed as error:
        return (None if error.kind == "generate" else False), error.detail
    return True, ""
