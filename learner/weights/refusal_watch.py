"""Follows which servers refuse the weights on offer, and checks the offer in the learner."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from broker.contract import wire
from broker.errors import RlearnerError
from broker.runtime.presence import Roster
from learner.weights.refusals import CheckOffer, OfferRefusals

if TYPE_CHECKING:
    from broker.weights.sender.send import WeightSender

log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0


async def watch_refusals(
    refusals: OfferRefusals,
    sender: WeightSender,
    check: Callable[[CheckOffer], Awaitable[str]],
    roster: Roster,
    paused: Callable[[], bool],
    end: Callable[[str], None],
) -> None:
    """Look once a second until there is a verdict, and pass it to ``end``.

    Args:
        check: returns the first fault that this process finds in its own offer, empty if it finds
            none.
    """
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        if paused():
            refusals.pause()
            continue
        refusals.offered(sender.version)
        servers = [server for server in roster.alive("rollout") if server.policy == wire.ACTOR]
        if (request := refusals.look(servers, roster.clock)) is not None:
            log.warning("weights: refused by %s; checking them here", request.refusal)
            refusals.checked(request, await _check_result(check, request))
        if refusals.verdict:
            end(refusals.verdict)
            return


async def _check_result(check: Callable[[CheckOffer], Awaitable[str]], request: CheckOffer) -> str:
    try:
        difference = await check(request)
    except (RlearnerError, RuntimeError) as error:
        # torch's, for example out of memory. A check that fails proves nothing: the run goes on.
        log.warning(
            "weights: they could not be checked here: %s", " ".join(str(error).split())[:300]
        )
        return ""
    if not difference:
        log.info("weights: this process finds no fault in them, so the server must be at fault")
    return difference
