"""No reply reaches a subject that its requester may not publish to: of JetStream, of a process, in
any run.

``tests/contract/test_former_broker.py`` shows that these attempts succeed against a broker without
accounts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from reply_attacks import ANSWERED, ATTACKERS, KINDS, harm_done

from broker.contract import wire
from broker.contract.examples import EXAMPLES
from broker.contract.streams import CONTROL, EPISODES, EVALS, RUNS, SAMPLES, TICKETS, WEIGHTS
from broker.identity.login import find_login
from broker.jetstream.bus import Bus


async def fill(bus: Bus) -> None:
    """Give a run a message of each kind that an attack could change."""
    await bus.ensure_consumers(TICKETS, ["lake"])
    await bus.ensure_consumers(EPISODES, ["default"])
    await bus.publish(TICKETS, EXAMPLES[wire.Ticket], key="lake")
    await bus.publish(EPISODES, EXAMPLES[wire.Group], key="default")
    for log in (SAMPLES, EVALS):
        await bus.publish(log, EXAMPLES[wire.Closed])
    await bus.publish(WEIGHTS, EXAMPLES[wire.WeightsOffer])
    await bus.key_value(RUNS).put(bus.run, EXAMPLES[wire.RunSpec])
    await bus.key_value(CONTROL).put(bus.run, wire.DesiredState(state="running"))


@pytest.fixture
async def runs(broker_url: str) -> AsyncIterator[tuple[Bus, Bus]]:
    """Two runs of the same names in every test, whose keys the broker therefore learns once."""
    own = await Bus.connect(broker_url, "attacked", name="own", deadline_s=60)
    other = await Bus.connect(broker_url, "attacked-other", name="other", deadline_s=60)
    for each in (own, other):
        await each.ensure_streams()
        await fill(each)
    yield own, other
    for each in (own, other):
        await each.delete_streams()
        await each.close()


@pytest.mark.parametrize("whose", ["own", "other"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.replace(" ", "-"))
@pytest.mark.parametrize("role", ATTACKERS)
async def test_no_reply_reaches_a_forbidden_subject(
    runs: tuple[Bus, Bus], broker_url: str, role: str, kind: str, whose: str
) -> None:
    own, other = runs
    responder = None
    if kind == "answer":
        answering = ANSWERED[role][2]
        login = find_login(broker_url, answering, own.run)
        responder = await Bus.connect(
            broker_url, own.run, name=answering, role=answering, login=login, deadline_s=60
        )
    try:
        victim = own if whose == "own" else other
        assert await harm_done(broker_url, role, kind, own, victim, responder) == set()
    finally:
        if responder is not None:
            await responder.close()
