"""One transfer, as a conversation through the rendezvous store; both ends, side by side.

    receiver r                        sender
    held/r  = digest           --->                                 what it holds already, if it knows
    ready/r = "" or a reason   --->
                               <---   mode = whole or changes       changes: if all hold what the sender's copy says
                               <---   go = "" or a reason           nobody enters the collective unless all are here
                               <---   size/i = bytes or whole       changes only, before each bucket
    ------- broadcast of the buckets as they are packed, digest pipelined -------
                               <---   digest                        for those whose offer came before it was known
    done/r  = "" or a reason   --->                                 bytes right, or why not
                               <---   stop = reason                 at any time: leave, ask again

So the sender knows whom to blame, a member that fails ends the wait of the others, and only a peer that hangs in the middle of
the broadcast costs its timeout. All functions block and belong in a thread.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from torch.distributed import Store  # type: ignore[attr-defined]

from broker import wire
from broker.errors import TransferFailed, WireError
from broker.weights.buffers import Arrival
from broker.weights.cargo import WHOLE, Base, Incoming, Outgoing
from broker.weights.digest import combine, digest_bucket
from broker.weights.group import PEEK_EVERY_S, Backend, Communicator, Watch, reachable
from broker.weights.lines import STORE_POLL_S, Lines
from broker.weights.membership import Start, parse_session
from broker.weights.staging import Staged

CHANGES: Final = "changes"


@dataclass(frozen=True)
class Settings:
    """How long to wait, and where to listen."""

    backend: Backend = "gloo"
    host: str = "127.0.0.1"  # interface of the weight sockets
    timeout_s: float = 30.0  # longest wait for one bucket
    connect_timeout_s: float = 5.0  # longest wait for a peer to come


class SessionFailed(TransferFailed):
    """A transfer that failed, with the servers to blame, as far as known, and why."""

    def __init__(self, reason: str, servers: dict[str, str]) -> None:
        super().__init__(reason)
        self.servers = servers


@dataclass(frozen=True)
class Sent:
    """A transfer that all members have confirmed.

    Attributes:
        communicator: to be used again.
        seconds: from go until all had their bytes.
        size_bytes: that each member was sent.
        whole: everything, not only what has changed.
    """

    communicator: Communicator
    seconds: float
    size_bytes: int
    whole: bool


@dataclass(frozen=True)
class Received:
    """A version that has arrived; the communicator is to be used again."""

    communicator: Communicator
    digest: str


def lead(
    store: Store,
    start: Start,
    staged: Staged,
    communicator: Communicator | None,
    settings: Settings,
    watch: Watch,
    base: Base | None = None,
) -> Sent:
    """The sender's side. The version may still be being packed and digested by others.

    Args:
        base: what the members may hold already; with it only changes are sent where all do. It follows what is sent.

    Raises:
        SessionFailed: with those to blame; the communicator, old or new, is closed.
    """
    lines = Lines(store, start.session, watch)
    group = communicator
    try:
        _collect(lines, "ready", start, settings.connect_timeout_s)
        whole = base is None or not base.fits([lines.heard(f"held/{rank}") or "" for rank, _ in enumerate(start.members, 1)])
        if base is not None:
            base.begin()
        lines.say("mode", WHOLE if whole else CHANGES)
        lines.say("go")
        started = time.monotonic()
        if group is None:
            group = _meet(store, start.session, 0, len(start.members) + 1, settings)
        outgoing = Outgoing(staged, base, lines, whole=whole)
        group.broadcast(outgoing, watch, done=outgoing.sent, peek=lambda: _blame(lines, start))
        digest = _own_digest(staged, watch, settings.timeout_s)
        lines.say("digest", digest)
        _collect(lines, "done", start, settings.timeout_s)
        seconds = time.monotonic() - started
        if base is not None:
            base.end(digest, whole=whole)
    except TransferFailed as error:
        lines.say("stop", str(error))
        lines.say("go", str(error))
        if group is not None:
            group.close()
        if isinstance(error, SessionFailed):
            raise
        raise SessionFailed(str(error), _said(lines, start)) from None
    lines.forget(len(start.members), 0 if whole else len(outgoing))
    return Sent(group, seconds, outgoing.size_bytes, whole)


def _own_digest(staged: Staged, watch: Watch, timeout_s: float) -> str:
    """What the bytes came to; taken beside the broadcast, so it is there soon."""
    deadline = time.monotonic() + timeout_s
    while (digest := staged.digest) is None:
        watch.beat()
        if time.monotonic() > deadline:
            raise TransferFailed(f"the digest took longer than {timeout_s:g} s")
        time.sleep(STORE_POLL_S)
    return digest


def call_off(store: Store, start: Start, communicator: Communicator | None, reason: str) -> SessionFailed:
    """Tell the members that it will not happen; the communicator is closed, for its members leave it too."""
    Lines(store, start.session, Watch()).say("go", reason)
    if communicator is not None:
        communicator.close()
    return SessionFailed(reason, {})


def follow(
    store: Store,
    session: wire.WeightsSession,
    digest: str,
    arrival: Arrival,
    communicator: Communicator | None,
    settings: Settings,
    watch: Watch,
) -> Received:
    """A receiver's side: fills ``arrival.flat`` with bytes that match the digest.

    Args:
        digest: what the offer says; empty: not known when it was made, the sender says it at the end.
        communicator: the one this server still has, of any session.

    Raises:
        TransferFailed: the communicator is closed, and something may still write into ``arrival.flat``: drop it.
    """
    lines = Lines(store, session.session, watch)
    try:
        name, uses = parse_session(session.session)
    except WireError as error:
        if communicator is not None:
            communicator.close()
        raise TransferFailed(str(error)) from None
    group = communicator if communicator is not None and communicator.name == name else None
    if communicator is not None and group is None:
        communicator.close()
    rank = session.rank
    try:
        if uses and group is None:
            raise TransferFailed(f"communicator {name} is not known here any more")
        if arrival.held:
            lines.say(f"held/{rank}", arrival.held)
        lines.say(f"ready/{rank}")
        _wait_for_go(lines, session.timeout_s)
        if group is None:
            group = _meet(store, session.session, rank, session.world_size, settings)
        incoming = Incoming(arrival.flat, lines, whole=lines.heard("mode") != CHANGES, base=arrival.base)
        digests: list[bytes] = [b""] * len(incoming)

        def take(index: int) -> None:
            digests[index] = digest_bucket(incoming.arrived(index))

        group.broadcast(incoming, watch, done=take, peek=lambda: _stopped(lines))
        expected = digest or _wait_for_digest(lines, session.timeout_s)
        if (received := combine(digests)) != expected:
            raise TransferFailed(f"digest of version {session.version}: received {received}, offered {expected}; nothing was loaded")
    except TransferFailed as error:
        if reachable(session.host, session.port, 1.0):
            with suppress(TransferFailed):  # the store may be what failed
                lines.say(f"ready/{rank}", str(error))
                lines.say(f"done/{rank}", str(error))
        if group is not None:
            group.close()
        raise
    lines.say(f"done/{rank}")
    return Received(group, received)


def _meet(store: Store, session: str, rank: int, size: int, settings: Settings) -> Communicator:
    return Communicator(
        store,
        parse_session(session)[0],
        rank,
        size,
        backend=settings.backend,
        host=settings.host,
        timeout_s=settings.timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
    )


def _collect(lines: Lines, word: str, start: Start, timeout_s: float) -> None:
    """Wait until every member has said the word."""
    deadline = time.monotonic() + timeout_s
    wrong: dict[str, str] = {}
    for rank, server in enumerate(start.members, 1):
        answer = lines.wait(f"{word}/{rank}", max(0.0, deadline - time.monotonic()))
        if answer is None:
            wrong[server] = f"not {word} within {timeout_s:g} s"
        elif answer:
            wrong[server] = answer
    if wrong:
        raise SessionFailed("; ".join(f"{server}: {reason}" for server, reason in wrong.items()), wrong)


def _said(lines: Lines, start: Start) -> dict[str, str]:
    """The members that said that they failed."""
    answers = {server: lines.heard(f"done/{rank}") for rank, server in enumerate(start.members, 1)}
    return {server: answer for server, answer in answers.items() if answer}


def _blame(lines: Lines, start: Start) -> None:
    if wrong := _said(lines, start):
        raise SessionFailed("; ".join(f"{server}: {reason}" for server, reason in wrong.items()), wrong)


def _wait_for_go(lines: Lines, timeout_s: float) -> None:
    answer = lines.wait("go", timeout_s)
    if answer is None:
        raise TransferFailed(f"the learner did not start within {timeout_s:g} s")
    if answer:
        raise TransferFailed(f"the learner called it off: {answer}")


def _wait_for_digest(lines: Lines, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while not (digest := lines.wait("digest", PEEK_EVERY_S)):
        _stopped(lines)
        if time.monotonic() > deadline:
            raise TransferFailed(f"the learner did not say the digest within {timeout_s:g} s")
    return digest


def _stopped(lines: Lines) -> None:
    reason = lines.heard("stop")
    if reason is not None:
        raise TransferFailed(f"the learner stopped it: {reason}")
