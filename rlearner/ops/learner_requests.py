"""``rlearner checkpoint-now`` and ``eval-now``: ask the learner for work off its schedule."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final, Literal

from broker.contract import wire
from broker.contract.streams import REQUESTS
from broker.errors import BrokerUnreachable, RequestFailed, UserError
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import send_request
from broker.runtime.presence import census
from broker.settings.run_address import broker_address
from broker.system.visible_text import visible
from learner.reporting.metrics import newest_line
from learner.reporting.status import ID
from learner.run_folder import find_run

Action = Literal["checkpoint", "evaluate"]

ANSWER_S: Final = 10.0
POLL_S: Final = 0.5
ACTIONS: Final[dict[str, Action]] = {"checkpoint-now": "checkpoint", "eval-now": "evaluate"}
WORDS: Final = {"checkpoint": "checkpoint of step", "evaluate": "evaluation after step"}


async def ask_learner(bus: Bus, action: Action, step: int = -1) -> wire.OperatorReply:
    """Return the learner's reply to one request.

    Args:
        step: of an earlier reply, to learn how far it is; -1 begins.

    Raises:
        UserError: if no learner answers, or it refuses.
    """
    message = wire.OperatorRequest(action=action, step=step)
    try:
        reply = await send_request(
            bus, REQUESTS, ID, message, timeout_s=ANSWER_S, reply=wire.OperatorReply
        )
    except RequestFailed as error:
        processes = await census(bus, bus.run)
        states = [presence.state for presence in processes if presence.role == "learner"]
        state = "no learner is running"
        if states:
            state = f"its learner is {states[0]}"
        raise UserError(f"run {bus.run} did not answer, {state}: {error}") from None
    if reply.state == "refused":
        raise UserError(f"run {bus.run}: {reply.detail}")
    return reply


async def follow_action(bus: Bus, action: Action) -> AsyncGenerator[wire.OperatorReply, None]:
    """Begin the action, and yield each new reply until it is done.

    Raises:
        UserError: as ``ask_learner``.
    """
    reply = await ask_learner(bus, action)
    yield reply
    while reply.state != "done":
        await asyncio.sleep(POLL_S)
        previous = reply
        reply = await ask_learner(bus, action, reply.step)
        if reply != previous:
            yield reply


def text_of(action: Action, reply: wire.OperatorReply) -> str:
    """Return one line about a reply."""
    return visible(f"{WORDS[action]} {reply.step}: {reply.state}, {reply.detail}")


async def request_now(options: argparse.Namespace) -> int:
    """Ask, print each reply, by default until the work is done, and return the exit code."""
    action = ACTIONS[options.command]
    place = find_run(options.run_name, options.dir)
    url = broker_address(options.broker, Path(place.folder))
    deadline_s = options.connect_deadline
    try:
        bus = await Bus.connect(
            url, place.name, name=f"operator-{os.getpid()}", deadline_s=deadline_s
        )
    except BrokerUnreachable:
        step = newest_line(place.folder / "metrics.jsonl").get("step", 0)
        if step < place.steps:
            raise
        raise UserError(
            f"run {place.name} ended after its last step, {step}, and wrote a checkpoint of it"
        ) from None
    try:
        async with (
            asyncio.timeout(None if options.no_wait else options.timeout),
            aclosing(follow_action(bus, action)) as replies,
        ):
            async for reply in replies:
                _print_reply(action, reply, as_json=options.json)
                if options.no_wait:
                    break
    except TimeoutError:
        raise UserError(
            f"not done after {options.timeout:g} s; the learner goes on with it"
        ) from None
    finally:
        await bus.close()
    return 0


def _print_reply(action: Action, reply: wire.OperatorReply, *, as_json: bool) -> None:
    fields: dict[str, Any] = {
        "action": action,
        "state": reply.state,
        "step": reply.step,
        "detail": reply.detail,
    }
    # Flushed at once: another program may read it while the work goes on.
    if as_json:
        print(json.dumps(fields), flush=True)
    else:
        print(text_of(action, reply), flush=True)
