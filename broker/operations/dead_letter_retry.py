"""``broker dead retry``: asks the processes of a run to repeat what ended as a dead letter, for
inspection.

It uses request and reply. Nothing is stored, so the result cannot be trained on, and ticket
numbers, which are sequences of their streams, do not change.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final

from broker.contract import codec, wire
from broker.contract.streams import RERUNS
from broker.errors import RequestFailed, UserError, WireError
from broker.jetstream.bus import Bus
from broker.jetstream.core_messages import send_request
from broker.nats.addresses import without_logins
from broker.runtime.presence import census

SHOWN_CHARS: Final = 200

Outcome = wire.Group | wire.Closed


def original(letter: wire.DeadLetter) -> wire.Ticket | wire.EvalTicket | wire.Group:
    """Return the message in a dead letter.

    Raises:
        UserError: if it does not decode, or is not a message that can be repeated.
    """
    try:
        message = codec.decode(letter.data, *wire.MESSAGES)
    except WireError as error:
        raise UserError(
            f"its {len(letter.data)} bytes do not decode, so they cannot be retried: {error}"
        ) from None
    if not isinstance(message, (wire.Ticket, wire.EvalTicket, wire.Group)):
        raise UserError(
            f"expected a Ticket, an EvalTicket or a Group, found a {type(message).__name__}"
        )
    return message


async def retry(
    bus: Bus, letter: wire.DeadLetter, timeout_s: float
) -> AsyncGenerator[Outcome, None]:
    """Yield the outcome at each process: an environment hub for a ticket, then a reward hub for
    each pool.

    Raises:
        UserError: if the letter cannot be retried, no process serves its domain or pool, or one
            does not answer.
    """
    message = original(letter)
    if isinstance(message, wire.Group):
        outcome: Outcome = message
    else:
        outcome = await _ask(
            bus,
            "envhub",
            message.domain,
            message=message,
            last_resort=letter.by,
            timeout_s=timeout_s,
        )
        yield outcome
    while isinstance(outcome, wire.Group) and outcome.pools:
        outcome = await _ask(
            bus,
            "rewardhub",
            outcome.pools[0],
            message=outcome,
            last_resort=letter.by,
            timeout_s=timeout_s,
        )
        yield outcome


async def _ask(
    bus: Bus, role: str, serves: str, message: wire.Message, last_resort: str, timeout_s: float
) -> Outcome:
    served_kind = "domain" if role == "envhub" else "pool"
    members = await census(bus, bus.run)
    candidates = [
        member
        for member in members
        if member.role == role and serves in member.serves and member.state == "serving"
    ]
    if not candidates:
        problem = f"run {bus.run} has no {role} that serves {served_kind} {serves!r} now"
        raise UserError(f"{problem}: {_missing_process(bus, role, serves, members)}")
    target = min(
        candidates, key=lambda member: (member.id == last_resort, member.running, member.id)
    )
    try:
        key = f"{role}.{target.id}"
        reply = (wire.Group, wire.Closed)
        answer = await send_request(bus, RERUNS, key, message, timeout_s=timeout_s, reply=reply)
    except RequestFailed as error:
        raise UserError(f"{target.id} did not answer: {error}") from None
    assert isinstance(answer, (wire.Group, wire.Closed))
    return answer


def _missing_process(bus: Bus, role: str, serves: str, members: Sequence[wire.Presence]) -> str:
    """Return what processes of a role serve now, and the command that starts the missing one."""
    present = [
        f"{member.id} ({member.state}) serves {', '.join(member.serves) or 'none'}"
        for member in members
        if member.role == role
    ]
    option = {"envhub": "--domains", "rewardhub": "--pools"}[role]
    url = without_logins(bus.link.url)
    command = f"`{role} --run {bus.run} --broker {url} {option} {serves}`"
    return f"{'; '.join(present) or 'none is running'}; {command} starts one"


def as_plain(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome for ``--json``, without tokens."""
    if isinstance(outcome, wire.Closed):
        return {"by": outcome.by, "closed": outcome.reason, "detail": outcome.detail}
    names = ("episode", "reward", "reward_parts", "success", "end", "response")
    episodes = [
        {name: getattr(trajectory, name) for name in names} | {"turns": len(trajectory.turns)}
        for trajectory in outcome.trajectories
    ]
    times = {"generate_s": outcome.generate_s, "env_step_s": outcome.env_step_s}
    return {"by": (outcome.reward_hubs or [outcome.hub])[-1], **times, "episodes": episodes}


def described(outcome: Outcome) -> list[str]:
    """Return an outcome as lines for the operator."""
    if isinstance(outcome, wire.Closed):
        return [f"{outcome.by} gave up: {outcome.reason}: {outcome.detail}"]
    times = (
        f"{outcome.generate_s:.2f} s of generation and "
        f"{outcome.env_step_s:.3f} s of environment each"
    )
    title = (
        f"{outcome.reward_hubs[-1]} scored it:"
        if outcome.reward_hubs
        else f"{outcome.hub} played it, {times}:"
    )
    return [title, *(line for trajectory in outcome.trajectories for line in _episode(trajectory))]


def _episode(trajectory: wire.Trajectory) -> list[str]:
    versions = trajectory.version_runs.array()[::2].tolist()
    parts = "".join(f", {name} {value:g}" for name, value in trajectory.reward_parts.items())
    solved = "solved" if trajectory.success else "not solved"
    text = " ".join(trajectory.response.split())[:SHOWN_CHARS]
    policy = f"versions {min(versions)}-{max(versions)}" if versions else "no tokens"
    end = f"{trajectory.end} after {len(trajectory.turns)} turns, {policy}"
    line = f"  episode {trajectory.episode}: {solved}, reward {trajectory.reward:g}{parts}; {end}"
    return [line, f"    last response: {text}"]
