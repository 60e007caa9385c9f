"""Tries each of the user's rewards once in a worker process, for ``rlearner check``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from broker.errors import UserError
from broker.settings.run_settings import RunSettings
from rewardhub.rewards.base import Sample
from rewardhub.rewards.caller import is_callers
from rewardhub.score_dispatcher import ScoreDispatcher
from rewardhub.worker_pool import NoWorkerError, ScoreError


async def try_rewards(settings: RunSettings, samples: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Score each domain's sample once with each of the user's own rewards, and return the keys of
    these rewards.

    Args:
        samples: by domain, the fields of a ``Sample``.

    Raises:
        UserError: if a reward fails; names the user's file and line.
    """
    own = {
        f"domains.{name}.rewards.{index}": (reward, samples[name])
        for name, domain in settings.domains.items()
        for index, reward in enumerate(domain.rewards)
        if ":" in reward.name and name in samples and not is_callers(reward.name)
    }
    if not own:
        return []
    rewardhub = settings.rewardhub
    rewards = {key: reward for key, (reward, _) in own.items()}
    scorers = ScoreDispatcher(
        rewards,
        num_workers=1,
        timeout_s=rewardhub.timeout_s,
        memory_mib=rewardhub.worker_memory_mib,
        gpu_numbers=(),
        passed=rewardhub.pass_env,
    )
    try:
        await scorers.start()
        for key, (reward, sample) in own.items():
            try:
                await scorers.score(reward, msgspec.convert(sample, Sample))
            except (ScoreError, NoWorkerError) as error:
                raise UserError(
                    f"{key}: {reward.name} failed on a trial episode: {error}"
                ) from None
    finally:
        await scorers.close()
    return list(own)
