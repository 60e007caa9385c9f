"""The configuration section ``rewardhub``, and the checks of a run's rewards before it starts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from broker.errors import ConfigError, UserError
from broker.settings.config import DomainSection, RewardConfig, num_greedy
from broker.settings.run_settings import RunSettings
from broker.settings.schema.hubs import RewardhubSection
from rewardhub.rewards.caller import is_callers

__all__ = [
    "ENV",
    "RewardhubSection",
    "all_pools",
    "check",
    "longest_scoring_s",
    "own_pools",
    "pools_of_kinds",
    "reward_labels",
]

# Rewards whose ``cpu_s`` bounds a call in their own process.
BOUNDED_REWARDS: Final = ("math_answer", "verifier", "format", "instruction_following")
# The environment's part of a trajectory's reward.
ENV: Final = "env"


def check(settings: RunSettings) -> None:
    """Check that all rewards can be loaded, and take less time than the hub waits.

    Raises:
        ConfigError: for an unknown name (lists the known ones), a missing file, module or function,
            bad arguments.
    """
    from rewardhub.rewards import loading

    _check_weights(settings)
    waits_s = settings.rewardhub.timeout_s
    for name, domain in settings.domains.items():
        for index, reward in enumerate(domain.rewards):
            key = f"domains.{name}.rewards.{index}"
            args = loading.check(reward.name, reward.args, key)
            cpu_s = getattr(args, "cpu_s", None) if reward.name in BOUNDED_REWARDS else None
            if cpu_s is not None and 2 * cpu_s > waits_s:
                raise ConfigError(
                    f"{key}.args.cpu_s",
                    cpu_s,
                    f"at most half of rewardhub.timeout_s ({waits_s:g}), to stop a costly "
                    "answer in time",
                )
            takes_s = getattr(args, "timeout_s", None)
            if (
                takes_s is not None
                and loading.concurrency_of(reward) is None
                and takes_s >= waits_s
            ):
                raise ConfigError(
                    f"{key}.args.timeout_s",
                    takes_s,
                    f"below rewardhub.timeout_s ({waits_s:g}), because the hub treats a "
                    "late score as a failure",
                )


def _check_weights(settings: RunSettings) -> None:
    """Check that ``algorithm.gdpo_weights`` names rewards, some of every domain."""
    weights = settings.algorithm.gdpo_weights
    if weights is None:
        return
    labels = {
        name: [ENV, *reward_labels(domain.rewards)]
        for name, domain in settings.trained_domains.items()
    }
    known = dict.fromkeys(label for names in labels.values() for label in names)
    for key in weights:
        if key.partition("/")[0] not in known:
            allowed = f"the rewards of this run are {', '.join(known)}"
            raise ConfigError(f"algorithm.gdpo_weights.{key}", weights[key], allowed)
    for name, own in labels.items():
        if not any(key.partition("/")[0] in own for key in weights):
            allowed = f"also a reward of domain {name}: {', '.join(own)}"
            raise ConfigError("algorithm.gdpo_weights", weights, allowed)


def longest_scoring_s(settings: RunSettings) -> dict[str, float]:
    """Return the longest time that reward hubs take for one group of each domain, in seconds.

    Assumes one hub for each pool, busy with ``max_groups`` such groups, and every try of every
    score at its timeout.
    """
    from rewardhub.rewards import loading

    rewardhub = settings.rewardhub
    greedy = num_greedy(settings.algorithm.adv_estimator)
    tries = 1 + rewardhub.max_retries
    longest: dict[str, float] = {}
    for name, domain in settings.domains.items():
        scores = rewardhub.max_groups * (domain.group_size + greedy + domain.group_size_redundancy)
        # rewards that the pool's workers compute, one sample at a time
        singles: Counter[str] = Counter()
        pools: dict[str, float] = {}
        for reward in domain.rewards:
            if (own := loading.concurrency_of(reward)) is None:
                singles[reward.pool] += 1
                took_s = (
                    math.ceil(singles[reward.pool] * scores / rewardhub.workers)
                    * rewardhub.timeout_s
                    * tries
                )
            else:
                took_s = math.ceil(scores / own.at_once) * own.timeout_s * tries
            pools[reward.pool] = max(pools.get(reward.pool, 0.0), took_s)
        longest[name] = sum(pools.values())
    return longest


def reward_labels(rewards: Sequence[RewardConfig]) -> list[str]:
    """Return the name of each reward in a trajectory's reward parts: short and unique.

    ``math_answer`` stays, ``my/rewards.py:brevity`` becomes ``brevity``, a second one
    ``brevity_2``.
    """
    result: list[str] = []
    for reward in rewards:
        short = reward.name.rpartition(":")[2]
        num_earlier = sum(
            1 for earlier in rewards[: len(result)] if earlier.name.rpartition(":")[2] == short
        )
        result.append(f"{short}_{num_earlier + 1}" if num_earlier else short)
    return result


def pools_of_kinds(domains: Mapping[str, DomainSection], kinds: Sequence[str]) -> list[str]:
    """Return the pools with rewards of these kinds: registry names, or short names of paths.

    Raises:
        UserError: if no domain has such a reward, or a pool also holds others, which such a hub
            could not score.
    """
    rewards_of_pools = [
        (f"domains.{name}.rewards.{index}", reward.pool, reward.name.rpartition(":")[2])
        for name, domain in domains.items()
        for index, reward in enumerate(domain.rewards)
    ]
    known_kinds = list(dict.fromkeys(kind for _, _, kind in rewards_of_pools))
    for kind in kinds:
        if kind not in known_kinds:
            raise UserError(
                f"--rewards: {kind!r} is not allowed; the rewards of this run are "
                f"{', '.join(known_kinds) or 'none'}"
            )
    pools = list(dict.fromkeys(pool for _, pool, kind in rewards_of_pools if kind in kinds))
    for key, pool, kind in rewards_of_pools:
        if pool in pools and kind not in kinds:
            reason = f"pool {pool} also holds {kind} ({key}); give one of them a separate pool"
            raise UserError(f"--rewards {','.join(kinds)}: {reason}")
    return pools


def all_pools(domains: Mapping[str, DomainSection]) -> list[str]:
    """Return the pools of all domains, without duplicates, in order."""
    return list(
        dict.fromkeys(reward.pool for domain in domains.values() for reward in domain.rewards)
    )


def own_pools(domains: Mapping[str, DomainSection]) -> list[str]:
    """Return the pools that any hub can serve, in order: those without functions of the process
    that started the run.
    """
    callers = {
        reward.pool
        for domain in domains.values()
        for reward in domain.rewards
        if is_callers(reward.name)
    }
    return [pool for pool in all_pools(domains) if pool not in callers]
