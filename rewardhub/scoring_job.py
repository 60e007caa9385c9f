"""Scores one group: executes the actions of ``rewardhub.routing`` until the group ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Final

import msgspec

from broker.contract import wire
from broker.settings.config import DomainSection
from broker.system.fault import TracebackLog
from rewardhub.episode_samples import sample_of
from rewardhub.routing import (
    Action,
    CloseAction,
    ForwardAction,
    GroupScoring,
    ScoreAction,
    find_refusal,
)
from rewardhub.score_dispatcher import ScoreDispatcher
from rewardhub.worker_pool import NoWorkerError, ScoreError

log = logging.getLogger(__name__)
_traces: Final = TracebackLog()  # of this process


async def score_group(
    scoring: GroupScoring, section: DomainSection, scorers: ScoreDispatcher
) -> ForwardAction | CloseAction:
    """Compute all scores of a group; the first one that finally fails ends it.

    Raises:
        NoWorkerError: if no worker process can be started here now.
    """
    asking: set[asyncio.Task[list[Action]]] = set()
    todo = scoring.start()
    try:
        while True:
            for action in todo:
                if not isinstance(action, ScoreAction):
                    return action
                asking.add(asyncio.create_task(_request_score(scoring, action, section, scorers)))
            finished, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            todo = [action for task in finished for action in task.result()]
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def rescore_group(
    message: wire.Message, domains: Mapping[str, DomainSection], scorers: ScoreDispatcher, by: str
) -> wire.Message | None:
    """Score a group again for the operator, and store nothing."""
    if not isinstance(message, wire.Group) or not message.pools:
        return None  # nothing to score
    ending: ForwardAction | CloseAction | None = find_refusal(message, message.pools[0], domains, 1)
    if ending is None:
        section = domains[message.domain]
        unscored = msgspec.structs.replace(message, scores=[])
        try:
            ending = await score_group(GroupScoring(unscored, section.rewards, 0), section, scorers)
        except NoWorkerError as error:
            ending = CloseAction("aborted", str(error))
    if isinstance(ending, ForwardAction):
        return msgspec.structs.replace(ending.group, reward_hubs=[*message.reward_hubs, by])
    return wire.Closed(
        ticket=message.ticket,
        domain=message.domain,
        reason=ending.reason,
        detail=" ".join(ending.detail.split())[:1000],
        by=by,
        eval_step=message.eval_step,
    )


async def _request_score(
    scoring: GroupScoring, ask: ScoreAction, section: DomainSection, scorers: ScoreDispatcher
) -> list[Action]:
    group = scoring.group
    try:
        sample = sample_of(group, group.trajectories[ask.trajectory], section.max_turns)
        value = await scorers.score(section.rewards[ask.reward], sample)
    except ScoreError as error:
        _traces.say(log, f"ticket {group.ticket}: {error}", error.trace)
        return scoring.failed(ask, str(error), retry=error.retry)
    return scoring.scored(ask, value)
