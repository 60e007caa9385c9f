"""``broker dead retry``: has the processes of a run do again what ended as a dead letter, for the operator to look at.

It is asked for and answered by request and reply. Nothing is stored and no ticket is touched, so nothing of it can be
trained on; and it leaves the numbers of the evaluation tickets alone, which are their sequences.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final

from broker.contract import codec, wire
from broker.contract.streams import RERUNS
from broker.errors import RequestFailed, UserError, WireError
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import request
from broker.runtime.presence import census

SHOWN_CHARS: Final = 200

Outcome = wire.Group | wire.Closed


def original(letter: wire.DeadLetter) -> wire.Ticket | wire.EvalTicket | wire.Group:
    """What the letter holds, if it can be done again.

    Raises:
        UserError: it does not decode, or it is a message that asks for nothing.
    """
    try:
        message = codec.decode(letter.data, *wire.MESSAGES)
    except WireError as error:
        raise UserError(
            f"its {len(letter.data)} bytes are no message, so there is nothing to do again: {error}"
        ) from None
    if not isinstance(message, (wire.Ticket, wire.EvalTicket, wire.Group)):
        raise UserError(f"it holds a {type(message).__name__}; a Ticket, an EvalTicket or a Group can be done again")
    return message


async def retry(bus: Bus, letter: wire.DeadLetter, timeout_s: float) -> AsyncGenerator[Outcome, None]:
    """The outcome at each process that it visits: an environment hub for a ticket, then a reward hub for each pool.

    Raises:
        UserError: nothing to do again, nobody there who could, or no answer.
    """
    message = original(letter)
    if isinstance(message, wire.Group):
        outcome: Outcome = message
    else:
        outcome = await _ask(bus, "envhub", message.domain, message, letter.by, timeout_s)
        yield outcome
    while isinstance(outcome, wire.Group) and outcome.pools:
        outcome = await _ask(bus, "rewardhub", outcome.pools[0], outcome, letter.by, timeout_s)
        yield outcome


async def _ask(bus: Bus, role: str, serves: str, message: wire.Message, rather_not: str, timeout_s: float) -> Outcome:
    what = "domain" if role == "envhub" else "pool"
    able = [
        one
        for one in await census(bus, bus.run)
        if one.role == role and serves in one.serves and one.state == "serving"
    ]
    if not able:
        raise UserError(f"run {bus.run} has no {role} at present that serves {what} {serves!r}")
    # elsewhere, if there is an elsewhere
    chosen = min(able, key=lambda one: (one.id == rather_not, one.running, one.id))
    try:
        answer = await request(bus, RERUNS, chosen.id, message, timeout_s=timeout_s, reply=(wire.Group, wire.Closed))
    except RequestFailed as error:
        raise UserError(f"{chosen.id} did not answer: {error}") from None
    assert isinstance(answer, (wire.Group, wire.Closed))
    return answer


def described(outcome: Outcome) -> list[str]:
    """An outcome in lines for the operator."""
    if isinstance(outcome, wire.Closed):
        return [f"{outcome.by} gave it up: {outcome.reason}: {outcome.detail}"]
    if outcome.reward_hubs:
        lines = [f"{outcome.reward_hubs[-1]} scored it:"]
    else:
        lines = [
            f"{outcome.hub} played it, {outcome.generate_s:.2f} s of generation and {outcome.env_step_s:.3f} s of "
            f"environment each:"
        ]
    return lines + [line for one in outcome.trajectories for line in _episode(one)]


def _episode(one: wire.Trajectory) -> list[str]:
    versions = one.version_runs.array()[::2].tolist()
    parts = "".join(f", {name} {value:g}" for name, value in one.reward_parts.items())
    solved = "solved" if one.success else "not solved"
    text = " ".join(one.response.split())[:SHOWN_CHARS]
    policy = f"versions {min(versions)}-{max(versions)}" if versions else "no tokens"
    return [
        f"  episode {one.episode}: {solved}, reward {one.reward:g}{parts}; {one.end} after {len(one.turns)} turns, "
        f"{policy}",
        f"    last response: {text}",
    ]
