"""Checks this role's part of a configuration on a machine before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from broker.settings.config import JUDGED_REWARDS, RewardConfig
from broker.settings.preflight import PreflightFinding
from broker.settings.run_settings import RunSettings
from rewardhub.rewards.caller import describe_owner, is_missing

if TYPE_CHECKING:
    from rewardhub.rewards.judges.judge_client import JudgeEndpointArgs


def preflight_findings(settings: RunSettings) -> list[PreflightFinding]:
    """Check that functions of the process that starts the run are there, and the endpoint of each
    judge once; its API key must be set, but it need not be reachable yet.
    """
    return [*_function_findings(settings), *_judge_findings(settings)]


def _function_findings(settings: RunSettings) -> list[PreflightFinding]:
    return [
        PreflightFinding("rewards", key, "missing", describe_owner(reward.name))
        for name, domain in settings.domains.items()
        for index, reward in enumerate(domain.rewards)
        if is_missing(reward.name) and (key := f"domains.{name}.rewards.{index}.name")
    ]


def _judge_sections(key: str, reward: RewardConfig) -> list[tuple[str, JudgeEndpointArgs]]:
    """Return the arguments of a reward's judge with their key; none if it has no judge."""
    from rewardhub.rewards import loading
    from rewardhub.rewards.judges.judge_client import JudgeEndpointArgs

    args = loading.check(reward.name, reward.args, key)
    if isinstance(args, JudgeEndpointArgs):
        return [(f"{key}.args", args)]
    judge = getattr(args, "judge", None)
    return [(f"{key}.args.judge", judge)] if judge is not None else []


def _judge_findings(settings: RunSettings) -> list[PreflightFinding]:
    rewards = [
        (f"domains.{name}.rewards.{index}", reward)
        for name, domain in settings.domains.items()
        for index, reward in enumerate(domain.rewards)
        if reward.name in JUDGED_REWARDS
    ]
    if not rewards:
        return []
    from rlearner_text.openai.endpoint_check import check_endpoint

    judges = [judge for key, reward in rewards for judge in _judge_sections(key, reward)]
    judge_of_endpoint = {
        (args.base_url, args.api_key): (key, args) for key, args in reversed(judges)
    }
    return [
        check_endpoint(
            key,
            args.base_url,
            args.api_key,
            is_named="api_key" in args.model_fields_set,
            is_needed=False,
        )
        for key, args in judge_of_endpoint.values()
    ]
