"""Tries the user's own environments and rewards once, by the code of the roles that run them."""

from __future__ import annotations

from typing import Any, Final

from broker.settings.registry import resolve

EPISODES: Final = "envhub.episodes.smoke:try_domains"
SCORES: Final = "rewardhub.reward_trial:try_rewards"


async def try_own_code(config: dict[str, Any]) -> None:
    """Run one episode of a validated configuration and score it once, in worker processes, without
    a model.

    Raises:
        UserError: if the user's code fails; names file and line.
    """
    samples = await resolve("trial", EPISODES, {})(config)
    await resolve("trial", SCORES, {})(config, samples)
