"""What an operator may do to a run from the console, as by command; yields lines."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from broker.contract import wire
from broker.contract.streams import DEAD
from broker.errors import UserError
from broker.jetstream.bus import Bus, LogRecord
from broker.operations import dead_letter_retry, runs
from broker.operations.dead_letters import stored_letters
from broker.runtime.presence import census
from rlearner.ops.control import STATES, drain_actions
from rlearner.ops.learner_requests import Action, follow_action, text_of

log = logging.getLogger(__name__)

RETRY_S: Final = 120.0
MAX_LETTERS: Final = 500
MAX_REASON: Final = 200  # characters


async def set_desired(bus: Bus, command: str, reason: str, session: str) -> list[str]:
    """Pause, resume, drain or stop the run.

    Raises:
        UserError: if the run is stopped, so that its processes have ended.
    """
    log.warning("%s of run %s from the console, by session %s", command, bus.run, session)
    await runs.set_desired(bus, bus.run, STATES[command], " ".join(reason.split())[:MAX_REASON])
    doing = drain_actions(bus.run, await census(bus, bus.run)) if command == "drain" else []
    return [
        f"{bus.run}: {STATES[command]}",
        *(f"{role} {name}: {does}" for role, name, does in doing),
    ]


async def request(bus: Bus, action: Action, session: str) -> AsyncGenerator[str, None]:
    """Yield a line for each reply of the learner until it is done.

    Raises:
        UserError: if no learner answers, or it refuses.
    """
    log.warning("%s of run %s from the console, by session %s", action, bus.run, session)
    async with aclosing(follow_action(bus, action)) as replies:
        async for reply in replies:
            yield text_of(action, reply)


async def letters(bus: Bus) -> list[LogRecord]:
    """Return the newest dead letters, newest first."""
    async with aclosing(stored_letters(bus, newest=MAX_LETTERS)) as records:
        return [record async for record in records][::-1]


async def retry(bus: Bus, record: LogRecord, session: str) -> AsyncGenerator[str, None]:
    """Yield lines for each outcome of a retried dead letter; nothing of it is trained on.

    Raises:
        UserError: if it cannot be retried.
    """
    letter = record.message
    if not isinstance(letter, wire.DeadLetter):
        raise UserError(f"dead letter {record.seq} does not decode, so it cannot be retried")
    log.warning(
        "retry of dead letter %d of run %s from the console, by session %s",
        record.seq,
        bus.run,
        session,
    )
    async with aclosing(dead_letter_retry.retry(bus, letter, RETRY_S)) as outcomes:
        async for outcome in outcomes:
            for line in dead_letter_retry.described(outcome):
                yield line
    yield "for inspection only: the result is neither stored nor trained on"


async def purge(bus: Bus, through: int, session: str) -> str:
    """Delete the dead letters up to a number, and say how many they were."""
    log.warning(
        "purge of dead letters up to %d of run %s from the console, by session %s",
        through,
        bus.run,
        session,
    )
    num_before = (await bus.depth(DEAD)).get("", 0)
    await bus.trim(DEAD, through + 1)
    return f"{num_before - (await bus.depth(DEAD)).get('', 0)} dead letters deleted"
