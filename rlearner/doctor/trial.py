"""Tries the user's own environments and rewards once, by the code of the roles that run them."""

from __future__ import annotations

from typing import Final

from broker.settings.registry import resolve
from broker.settings.run_settings import RunSettings

EPISODES: Final = "envhub.episodes.smoke:try_domains"
SCORES: Final = "rewardhub.reward_trial:try_rewards"


async def try_own_code(settings: RunSettings) -> None:
    """Run one episode of each domain of a run and score it once, in worker processes, without
    a model.

    Raises:
        UserError: if the user's code fails; names file and line.
    """
    samples = await resolve("trial", EPISODES, {})(settings)
    await resolve("trial", SCORES, {})(settings, samples)
