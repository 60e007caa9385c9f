"""The sender's side of a transfer (see ``broker.weights.protocol.transfer``). All functions block
and belong in a thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from broker.errors import TransferFailed
from broker.weights.bucket_payload import OutgoingBuckets, ReferenceBytes
from broker.weights.carriers import CARRIERS
from broker.weights.group import Group, IndependentGroup, PeerLost, WaitMonitor
from broker.weights.memory.staging import StagedVersion
from broker.weights.protocol.session import TransferSettings, parse_session, session_before
from broker.weights.protocol.transfer import CHANGES, PEER, SAY_EVERY_S
from broker.weights.rendezvous.board_request import BoardStore
from broker.weights.sender.membership import StartTransfer
from broker.weights.store_messages import STORE_POLL_S, StoreMessages

LAST_WORD_S: Final = 1.0  # for members to report about a failed transfer


class SessionFailed(TransferFailed):
    """A failed transfer.

    Attributes:
        servers: those at fault, as far as known, and why.
        ours: no server is at fault.
    """

    def __init__(self, reason: str, servers: dict[str, str], *, ours: bool = False) -> None:
        super().__init__(reason)
        self.servers = servers
        self.ours = ours


@dataclass(frozen=True)
class SentVersion:
    """A transfer that all members have confirmed.

    Attributes:
        communicator: to be reused; None if there was none.
        seconds: from go until all had their bytes.
        size_bytes: sent to, or read by, each member.
        whole: everything was sent, not only changes.
    """

    communicator: Group | None
    seconds: float
    size_bytes: int
    whole: bool


def lead(
    store: BoardStore,
    start: StartTransfer,
    staged: StagedVersion,
    communicator: Group | None,
    settings: TransferSettings,
    watch: WaitMonitor,
    base: ReferenceBytes | None = None,
) -> SentVersion:
    """Run the sender's side. The version may still be packed and digested while it is sent.

    Args:
        base: what the members may hold; if all hold it, only changes are sent. It follows what is
            sent.

    Raises:
        SessionFailed: names the servers at fault; the communicator is closed. By CURVE all others
            have the version.
    """
    lines = StoreMessages(store, start.session, watch)
    group = communicator
    num_sent = start.num_sent
    base = base if num_sent else None  # it tracks what the communicator carries
    lost_receivers: dict[str, str] | None = {} if start.independent else None
    try:
        collect(lines, "ready", start, settings.connect_timeout_s, lost_receivers)
        whole = base is None or not base.fits(
            [lines.heard(f"held/{rank}") or "" for rank in range(1, num_sent + 1)]
        )
        if base is not None:
            base.begin()
        if lost_receivers is not None:
            group = group or _open_group(store, start, settings)
            assert isinstance(group, IndependentGroup), "the settings have not changed"
            group.open(len(staged), lost_receivers)
        lines.say("go", "" if whole else CHANGES)
        start_time = time.monotonic()
        size_bytes = staged.plan.size_bytes
        if num_sent:
            if group is None:
                group = _open_group(store, start, settings)
            outgoing = OutgoingBuckets(staged, base, lines, whole=whole)
            group.broadcast(
                outgoing,
                watch,
                done=outgoing.sent,
                peek=lambda: blame(lines, start, lost_receivers),
            )
            size_bytes = outgoing.size_bytes
        digest = _own_digest(staged, watch, settings.timeout_s)
        lines.say("digest", digest)
        collect(lines, "done", start, settings.timeout_s, lost_receivers)
        if lost_receivers:
            raise SessionFailed(_listed(lost_receivers), lost_receivers)
        seconds = time.monotonic() - start_time
        if base is not None:
            base.end(digest, whole=whole)
    except TransferFailed as error:
        lines.say("stop", str(error))
        lines.say("go", str(error))
        if group is not None:
            group.close()
        if isinstance(error, SessionFailed):
            raise
        servers = to_blame(lines, start) if isinstance(error, PeerLost) else {}
        raise SessionFailed(str(error), servers, ours=not isinstance(error, PeerLost)) from None
    lines.forget(len(start.members), 0 if whole else len(staged), session_before(start.session))
    return SentVersion(group, seconds, size_bytes, whole)


def _own_digest(staged: StagedVersion, watch: WaitMonitor, timeout_s: float) -> str:
    """Return the digest of the bytes, which is computed while they are packed.

    Raises:
        TransferFailed: if they could not be packed, or there was no progress for so long.
    """
    deadline = time.monotonic() + timeout_s
    last_packed = -1
    while (digest := staged.digest) is None:
        watch.beat()
        packed = staged.packed_bytes
        now = time.monotonic()
        if staged.version < 0:
            raise TransferFailed("the weights could not be packed")
        if packed != last_packed:
            last_packed = packed
            deadline = now + timeout_s
        if now > deadline:
            raise TransferFailed(f"the digest took longer than {timeout_s:g} s")
        time.sleep(STORE_POLL_S)
    return digest


def call_off(
    store: BoardStore, start: StartTransfer, communicator: Group | None, reason: str
) -> SessionFailed:
    """Tell the members that the transfer is cancelled; close the communicator, as its members leave
    it too.
    """
    StoreMessages(store, start.session, WaitMonitor()).say("go", reason)
    if communicator is not None:
        communicator.close()
    return SessionFailed(reason, {}, ours=True)


def _open_group(store: BoardStore, start: StartTransfer, settings: TransferSettings) -> Group:
    """Open the communicator of a transfer at the sender, which is rank 0."""
    return CARRIERS[start.carrier].open_group(
        store,
        parse_session(start.session)[0],
        rank=0,
        size=start.num_sent + 1,
        settings=settings,
        members=start.members[: start.num_sent],
    )


def collect(
    lines: StoreMessages,
    word: str,
    start: StartTransfer,
    timeout_s: float,
    lost_receivers: dict[str, str] | None = None,
) -> None:
    """Wait until every member has sent the word, while those that read report progress.

    Args:
        lost_receivers: members to go on without; those that do not send it are added. None: one failure ends
            the transfer.
    """
    deadline = time.monotonic() + timeout_s
    wrong: dict[str, str] = {}
    readers = range(start.num_sent + 1, len(start.members) + 1)
    at: dict[int, str | None] = {rank: lines.heard(f"at/{rank}") for rank in readers}
    for rank, server in enumerate(start.members, 1):
        if lost_receivers is not None and server in lost_receivers:
            continue
        answer = None
        while answer is None and (left_s := deadline - time.monotonic()) > 0:
            answer = lines.wait(f"{word}/{rank}", min(left_s, SAY_EVERY_S))
            if rank in at and (now := lines.heard(f"at/{rank}")) != at[rank]:
                at[rank] = now
                deadline = time.monotonic() + timeout_s
        # sent while others were awaited
        answer = lines.heard(f"{word}/{rank}") if answer is None else answer
        if answer is None:
            wrong[server] = f"not {word} within {timeout_s:g} s"
        elif answer:
            wrong[server] = answer
    if lost_receivers is None:
        _fail(wrong)
        return
    lost_receivers |= wrong
    if len(lost_receivers) == len(start.members):
        raise SessionFailed(_listed(lost_receivers), lost_receivers)


def _listed(wrong: dict[str, str]) -> str:
    return "; ".join(f"{server}: {reason}" for server, reason in wrong.items())


def _fail(wrong: dict[str, str]) -> None:
    """End a transfer in which members report faults."""
    text = _listed(wrong)
    if own := {server: reason for server, reason in wrong.items() if not reason.startswith(PEER)}:
        raise SessionFailed(text, own)
    if wrong:
        raise PeerLost(text)


def to_blame(lines: StoreMessages, start: StartTransfer) -> dict[str, str]:
    """Wait for reports of a lost peer; return the members at fault, empty if unknown."""
    until = time.monotonic() + LAST_WORD_S
    while len(reasons := _said(lines, start)) < len(start.members) and time.monotonic() < until:
        time.sleep(10 * STORE_POLL_S)
    if own := {server: answer for server, answer in reasons.items() if not answer.startswith(PEER)}:
        return own
    silent = [server for server in start.members if server not in reasons]
    return (
        {server: "it says nothing" for server in silent} if len(silent) < len(start.members) else {}
    )


def _said(lines: StoreMessages, start: StartTransfer, first: int | None = None) -> dict[str, str]:
    """Return which of the ``first`` members reported a failure, and why."""
    answers = {
        server: lines.heard(f"done/{rank}") for rank, server in enumerate(start.members[:first], 1)
    }
    return {server: answer for server, answer in answers.items() if answer}


def blame(
    lines: StoreMessages, start: StartTransfer, lost_receivers: dict[str, str] | None
) -> None:
    """End a broadcast that lacks a member, or go on without it; a member that reads does not need
    it.
    """
    reasons = _said(lines, start, start.num_sent)
    if lost_receivers is None:
        _fail(reasons)
    else:
        lost_receivers |= {
            server: reason for server, reason in reasons.items() if server not in lost_receivers
        }
