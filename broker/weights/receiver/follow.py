"""A receiver's side of a transfer (see ``broker.weights.protocol.transfer``). It blocks and belongs
in a thread.
"""

from __future__ import annotations

import time
from contextlib import suppress

from torch import Tensor

from broker.contract import wire
from broker.errors import TransferFailed, WireError
from broker.weights.carriers import CARRIERS, READ
from broker.weights.digest import combine, digest_bucket
from broker.weights.group import PEEK_EVERY_S, POLL_S, Group, PeerLost, WaitMonitor
from broker.weights.memory.shared import SegmentReader
from broker.weights.protocol.session import TransferSettings, parse_session
from broker.weights.protocol.transfer import CHANGES, PEER, SAY_EVERY_S, STRIPES, ReceivedVersion
from broker.weights.receiver.bucket_stream import BucketStream
from broker.weights.receiver.buffers import IncomingVersion
from broker.weights.rendezvous.board_client import BoardClient
from broker.weights.rendezvous.board_request import BoardStore
from broker.weights.store_messages import StoreMessages
from broker.weights.stripes.receive import take_stripes

LAST_WORDS_S = 1.0  # for the report of a failure: the learner may be stopped


def follow(
    store: BoardStore,
    session: wire.WeightsSession,
    digest: str,
    arrival: IncomingVersion | BucketStream,
    communicator: Group | None,
    settings: TransferSettings,
    watch: WaitMonitor,
    window: SegmentReader | None = None,
) -> ReceivedVersion:
    """Receive bytes that match the digest, into ``arrival.flat`` or in passing.

    Args:
        digest: the offer's; empty if it was not known then: the sender sends it at the end.
        communicator: the one that this server still has, of any session.
        window: on the sender's memory, for a shared session.

    Raises:
        TransferFailed: if it failed. The communicator is closed and ``arrival.flat`` may still be
            written: drop it.
    """
    lines = StoreMessages(store, session.session, watch)
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
        reads = session.carrier in READ
        if uses and group is None and not reads:
            raise TransferFailed(f"communicator {name} is no longer known here")
        if reads and window is None:
            raise TransferFailed("the learner's memory can no longer be read from here")
        if arrival.held:
            lines.note(f"held/{rank}", arrival.held)
        lines.note(f"ready/{rank}")
        go = wait_for_go(lines, session.timeout_s)
        if go == STRIPES:
            assert isinstance(store, BoardClient), "a receiver is connected to the rendezvous"
            try:
                group, problem = take_stripes(
                    lines,
                    store,
                    session,
                    arrival=arrival,
                    communicator=group,
                    settings=settings,
                    watch=watch,
                )
            except TransferFailed as error:
                raise (TransferFailed if watch.reason else PeerLost)(str(error)) from error
            if problem:
                raise TransferFailed(f"{problem}; nothing was loaded")
            digests = None
        elif reads and window is not None:
            digests = _read(lines, session, window, arrival, watch)
        else:
            try:
                group = group or CARRIERS[session.carrier].open_group(
                    store, name, rank=rank, size=session.world_size, settings=settings
                )
                digests = _take(lines, group, arrival, watch, whole=not go)
            except TransferFailed as error:
                raise (TransferFailed if watch.reason else PeerLost)(str(error)) from error
        expected = digest or _wait_for_digest(lines, session.timeout_s)
        # each stripe was compared with its own digest
        received = expected if digests is None else combine(digests)
        if received != expected:
            raise TransferFailed(
                f"digest of version {session.version}: received {received}, "
                f"offered {expected}; nothing was loaded"
            )
    except TransferFailed as error:
        if isinstance(store, BoardClient):
            store.timeout_s = min(store.timeout_s, LAST_WORDS_S)
        with suppress(TransferFailed):  # perhaps the learner is gone
            reason = f"{PEER}{error}" if isinstance(error, PeerLost) else str(error)
            lines.say(f"ready/{rank}", reason)
            lines.say(f"done/{rank}", reason)
        if group is not None:
            group.close()
        raise
    lines.say(f"done/{rank}")
    return ReceivedVersion(group, received)


def _take(
    lines: StoreMessages,
    group: Group,
    arrival: IncomingVersion | BucketStream,
    watch: WaitMonitor,
    *,
    whole: bool,
) -> list[bytes]:
    """Receive by broadcast; return the digest of each bucket."""
    incoming = arrival.incoming(lines, whole=whole)
    digests: list[bytes] = [b""] * len(incoming)

    def take(index: int) -> None:
        digests[index] = digest_bucket(incoming.arrived(index))

    group.broadcast(incoming, watch, done=take, peek=lambda: _stopped(lines))
    return digests


def _read(
    lines: StoreMessages,
    session: wire.WeightsSession,
    window: SegmentReader,
    arrival: IncomingVersion | BucketStream,
    watch: WaitMonitor,
) -> list[bytes]:
    """Read the sender's memory; return the digest of each bucket."""
    said_at = time.monotonic()

    def bucket(index: int) -> Tensor:
        if isinstance(arrival, IncomingVersion):
            return arrival.flat.bucket(index)
        while (target := arrival[index]) is None:  # until the engine has loaded earlier ones
            watch.beat()
            if watch.due():
                _stopped(lines)
            time.sleep(POLL_S)
        return target

    def done(index: int) -> None:
        nonlocal said_at
        if isinstance(arrival, BucketStream):
            arrival.arrived(index)
        if time.monotonic() - said_at >= SAY_EVERY_S:
            said_at = time.monotonic()
            lines.say(f"at/{session.rank}", str(index + 1))

    return window.take(
        session.version,
        bucket,
        watch,
        timeout_s=session.timeout_s,
        done=done,
        peek=lambda: _stopped(lines),
    )


def wait_for_go(lines: StoreMessages, timeout_s: float) -> str:
    """Wait until the sender begins; return what it sends: empty for everything, ``changes`` or
    ``stripes``.

    Raises:
        PeerLost: if it does not begin, or cancels.
    """
    answer = lines.wait("go", timeout_s)
    if answer is None:
        raise PeerLost(f"the learner did not start within {timeout_s:g} s")
    if answer not in ("", CHANGES, STRIPES):
        raise PeerLost(f"the learner cancelled it: {answer}")
    return answer


def _wait_for_digest(lines: StoreMessages, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while not (digest := lines.wait("digest", PEEK_EVERY_S)):
        _stopped(lines)
        if time.monotonic() > deadline:
            raise PeerLost(f"the learner did not send the digest within {timeout_s:g} s")
    return digest


def _stopped(lines: StoreMessages) -> None:
    reason = lines.heard("stop")
    if reason is not None:
        raise PeerLost(f"the learner stopped it: {reason}")
