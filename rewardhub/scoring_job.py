"""Scores one group: executes the actions of ``rewardhub.routing`` until the group ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from broker.contract import wire
from broker.settings.config import DomainSection, Reward
from broker.system.workers.fault import Traces
from rewardhub.routing import Action, Ask, Close, Forward, Scoring, refusal, sample_of
from rewardhub.scorers import Scorers
from rewardhub.workers import NoWorker, ScoreFailed

log = logging.getLogger(__name__)
_traces: Final = Traces()  # of this process


async def carry_out(scoring: Scoring, rewards: Sequence[Reward], scorers: Scorers) -> Forward | Close:
    """Compute all scores of a group; the first one that finally fails ends it.

    Raises:
        NoWorker: if no worker process can be started here now.
    """
    asking: set[asyncio.Task[list[Action]]] = set()
    todo = scoring.start()
    try:
        while True:
            for action in todo:
                if not isinstance(action, Ask):
                    return action
                asking.add(asyncio.create_task(_ask(scoring, action, rewards[action.reward], scorers)))
            done, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            todo = [action for task in done for action in task.result()]
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def rerun(message: wire.Message, domains: Mapping[str, DomainSection], scorers: Scorers, by: str) -> wire.Message | None:
    """Score a group again for the operator, and store nothing."""
    if not isinstance(message, wire.Group) or not message.pools:
        return None  # nothing to score
    ending: Forward | Close | None = refusal(message, message.pools[0], domains, 1)
    if ending is None:
        rewards = domains[message.domain].rewards
        try:
            ending = await carry_out(Scoring(message, rewards, 0), rewards, scorers)
        except NoWorker as error:
            ending = Close("aborted", str(error))
    if isinstance(ending, Forward):
        return msgspec.structs.replace(ending.group, reward_hubs=[*message.reward_hubs, by])
    return wire.Closed(
        ticket=message.ticket,
        domain=message.domain,
        reason=ending.reason,
        detail=" ".join(ending.detail.split())[:1000],
        by=by,
        eval_step=message.eval_step,
    )


async def _ask(scoring: Scoring, ask: Ask, reward: Reward, scorers: Scorers) -> list[Action]:
    group = scoring.group
    try:
        value = await scorers.score(reward, sample_of(group, group.trajectories[ask.trajectory]))
    except ScoreFailed as error:
        _traces.say(log, f"ticket {group.ticket}: {error}", error.trace)
        return scoring.failed(ask, str(error), retry=error.retry)
    return scoring.scored(ask, value)
